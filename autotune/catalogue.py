"""Named hardware that need not be here: what `4xA100-80GB` has. Knows nothing of this machine; see `hardware`.

Memory is what CUDA lets a process use, as torch's out-of-memory messages name it ("total capacity of 79.15 GiB").
Bandwidth and links are those of NVIDIA's data sheets, links both directions together.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

GIB = 1 << 30
MOST = 1024
NVLINK, PCIE = "NVLink", "PCIe"


class HardwareError(ValueError):
    """A name of hardware that is not in the catalogue; the message names the nearest one."""


@dataclass(frozen=True, slots=True)
class Device:
    """One kind of GPU. ``usable_gib``: GiB for a process; ``bandwidth``: bytes/s of its memory; ``link``: how several
    are joined, with ``link_bandwidth`` bytes/s for each; ``product``: as `nvidia-smi` names it."""

    name: str
    product: str
    usable_gib: float
    capability: str
    bandwidth: float
    link: str
    link_bandwidth: float

    @property
    def memory_bytes(self) -> int:
        return int(self.usable_gib * GIB)


@dataclass(frozen=True, slots=True)
class Machine:
    """``count`` devices of one kind in one machine. ``shared``: they are cores that share one memory (a CPU)."""

    name: str
    count: int
    memory_bytes: int
    capability: str | None = None
    link: str | None = None
    shared: bool = False

    @property
    def label(self) -> str:
        where = "shared" if self.shared else "each"
        return f"{self.name}: {self.count} devices, {self.memory_bytes / GIB:.2f} GiB {where}"


DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        Device("A100-80GB", "NVIDIA A100-SXM4-80GB", 79.15, "8.0", 2.039e12, NVLINK, 600e9),
        Device("A100-80GB-PCIe", "NVIDIA A100 80GB PCIe", 79.15, "8.0", 1.935e12, PCIE, 64e9),
        Device("A100-40GB", "NVIDIA A100-SXM4-40GB", 39.39, "8.0", 1.555e12, NVLINK, 600e9),
        Device("A100-40GB-PCIe", "NVIDIA A100-PCIE-40GB", 39.39, "8.0", 1.555e12, PCIE, 64e9),
        Device("A800-80GB", "NVIDIA A800-SXM4-80GB", 79.15, "8.0", 2.039e12, NVLINK, 400e9),
        Device("H100-80GB", "NVIDIA H100 80GB HBM3", 79.1, "9.0", 3.35e12, NVLINK, 900e9),
        Device("H200-141GB", "NVIDIA H200", 139.8, "9.0", 4.8e12, NVLINK, 900e9),
        Device("L40S-48GB", "NVIDIA L40S", 44.4, "8.9", 0.864e12, PCIE, 64e9),
        Device("RTX4090-24GB", "NVIDIA GeForce RTX 4090", 23.6, "8.9", 1.008e12, PCIE, 64e9),
        Device("RTX3090-24GB", "NVIDIA GeForce RTX 3090", 23.6, "8.6", 0.936e12, PCIE, 64e9),
        Device("V100-32GB", "Tesla V100-SXM2-32GB", 31.7, "7.0", 0.9e12, NVLINK, 300e9),
    )
}


def named(text: str) -> Machine:
    """The machine of ``[COUNTx]DEVICE``, as in ``4xA100-80GB``. Raises HardwareError naming the nearest device."""
    found = re.fullmatch(r"\s*(?:(\d{1,5})\s*[xX]\s*)?(\S+)\s*", text)
    if found is None:
        raise HardwareError(f"--hardware wants COUNTxDEVICE, as in 4xA100-80GB, not {text!r}")
    count, name = int(found[1] or 1), found[2]
    device = next((d for d in DEVICES.values() if d.name.lower() == name.lower()), None)
    if device is None:
        lower = {known.lower(): known for known in DEVICES}
        near = get_close_matches(name.lower(), lower, 1, cutoff=0.4)
        hint = f"did you mean {found[1] or 1}x{lower[near[0]]}?" if near else f"known are {', '.join(DEVICES)}"
        raise HardwareError(f"no hardware is called {name!r}; {hint}")
    if not 1 <= count <= MOST:
        raise HardwareError(f"--hardware {text}: a machine has 1 to {MOST} devices")
    link = device.link if count > 1 else "none"
    return Machine(f"{count}x{device.name}", count, device.memory_bytes, device.capability, link)
