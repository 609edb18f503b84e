"""Recognises the machine: the facts under which a measurement may be claimed again. Knows no engine and no database.

GPUs are asked about through `nvidia-smi`; parsers are pure functions of its text. A fact that the driver does not
tell is None, which means unknown and never equals another machine's.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import math
import os
import platform
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

QUERY = ("index", "uuid", "name", "memory.total", "compute_cap", "mig.mode.current", "power.limit", "driver_version")
FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16", "asimd", "sve", "bf16", "i8mm")
"""CPU features that change which kernels run."""
GIB = 1 << 30
TIMEOUT_S = 20.0
GPU_CACHE = 128 << 20
"""No GPU so far has a larger second-level cache, and `nvidia-smi` does not tell."""
USUAL_CACHE = 32 << 20

Ask = Callable[[Sequence[str]], str]


@dataclass(frozen=True, slots=True)
class Probe:
    """``kind``: gpu or cpu. ``facts`` are the identity; ``described`` is worth knowing but tells no machines apart;
    ``notes`` are sentences for the user."""

    kind: str
    facts: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    described: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Gpu:
    """One row of `nvidia-smi --query-gpu`; what the driver does not tell is None."""

    index: int
    uuid: str | None
    product: str | None
    memory_mib: int | None
    compute_capability: str | None
    mig: bool
    power_limit_w: int | None
    driver: str | None


def probe() -> Probe:
    """The facts of this machine. Never raises: what cannot be learned is None or a note."""
    cpu = _cpu_facts()
    described: dict[str, Any] = {"os": f"{platform.system()} {platform.release()}", "python": platform.python_version()}
    try:
        found = probe_gpus(_ask, os.environ.get("CUDA_VISIBLE_DEVICES"))
    except FileNotFoundError:
        return Probe("cpu", cpu, (), described)
    except (OSError, subprocess.SubprocessError) as error:
        return Probe("cpu", cpu, (f"nvidia-smi failed, so this counts as a machine without a GPU: {error}",), described)
    if found is None:
        return Probe("cpu", cpu, ("nvidia-smi shows no usable GPU; this counts as a machine without one",), described)
    facts, notes = found
    return Probe("gpu", facts, notes, {**described, **{k: cpu[k] for k in ("cpu_model", "cores")}})


def cache_bytes(kind: str) -> int:
    """Bytes of the last-level cache of a machine of ``kind``: read from the system for a CPU, else an upper bound."""
    sizes = []
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with contextlib.suppress(OSError, ValueError):
            sizes.append(int(file.read_text().strip().removesuffix("K")) << 10)
    return GPU_CACHE if kind == "gpu" else max(sizes, default=USUAL_CACHE)


def probe_gpus(ask: Ask, visible: str | None) -> tuple[dict[str, Any], tuple[str, ...]] | None:
    """The identity facts of the visible GPUs and notes, or None without any; ``ask`` runs `nvidia-smi` arguments."""
    gpus = visible_gpus(parse_query(ask([f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"])), visible)
    if not gpus:
        return None
    notes: list[str] = []
    profile, count, memory = "off", len(gpus), _same([g.memory_mib for g in gpus])
    if any(g.mig for g in gpus):
        profiles = parse_mig(ask(["-L"]))
        profile, count = (profiles[0] if profiles else "on, no instance"), 1
        size = re.search(r"(\d+)gb", profile)
        memory = int(size[1]) << 10 if size else None
        if len(profiles) > 1:
            notes.append(f"CUDA uses one MIG instance of {len(profiles)} ({', '.join(profiles)}): the first, {profile}")
    products = sorted({g.product or "unknown" for g in gpus})
    if len(products) > 1:
        notes.append(f"the GPUs differ ({', '.join(products)}); CUDA_VISIBLE_DEVICES can limit the search to some")
    links = "none" if count == 1 else parse_topology(ask(["topo", "-m"]), [g.index for g in gpus])
    facts = {
        "product": None if "unknown" in products else " + ".join(products),
        "count": count,
        # Drivers and ECC modes report the same card some MiB apart.
        "memory_bytes": None if memory is None else round(memory / 1024) * GIB,
        "compute_capability": _same([g.compute_capability for g in gpus]),
        "mig_profile": profile,
        "links": links,
        "power_limit_w": _same([g.power_limit_w for g in gpus]),
        "driver": _same([g.driver for g in gpus]),
        "cuda": parse_cuda(ask([])),
    }
    unknown = [name for name, value in facts.items() if value is None]
    if unknown:
        notes.append(f"unknown, so results are not shared with other machines: {', '.join(unknown)}")
    return facts, tuple(notes)


def _ask(arguments: Sequence[str]) -> str:
    done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip().splitlines()
        raise subprocess.SubprocessError(said[0] if said else f"exit code {done.returncode}")
    return done.stdout


def _same(values: Sequence[Any]) -> Any:
    """The common value; of numbers that differ the least, of texts that differ all; None if one is unknown."""
    if any(v is None for v in values):
        return None
    if len(set(values)) == 1:
        return values[0]
    return " + ".join(sorted(set(values))) if isinstance(values[0], str) else min(values)


def parse_query(text: str) -> list[Gpu]:
    """Rows of ``--query-gpu=QUERY --format=csv,noheader,nounits``; lines that are no such row are skipped."""
    gpus = []
    for cells in csv.reader(text.splitlines(), skipinitialspace=True):
        known = [None if _unknown(cell) else cell.strip() for cell in cells]
        if len(known) != len(QUERY) or known[0] is None or not known[0].isdecimal():
            continue
        index, uuid, name, memory, capability, mig, power, driver = known
        assert index is not None
        gpus.append(Gpu(int(index), uuid, name, _whole(memory), capability, mig == "Enabled", _whole(power), driver))
    return gpus


def _unknown(cell: str) -> bool:
    """``[N/A]``, ``[Not Supported]``, ``[Unknown Error]``, ``N/A`` or nothing."""
    return cell.strip() in ("", "N/A") or bool(re.fullmatch(r"\[.*\]", cell.strip()))


def _whole(cell: str | None) -> int | None:
    try:
        return None if cell is None else round(float(cell))
    except (ValueError, OverflowError):
        return None


def visible_gpus(gpus: Sequence[Gpu], visible: str | None) -> list[Gpu]:
    """The GPUs that ``CUDA_VISIBLE_DEVICES`` leaves, as CUDA reads it: up to the first entry that names none."""
    if visible is None:
        return list(gpus)
    chosen: list[Gpu] = []
    for entry in (part.strip() for part in visible.split(",")):
        if entry.startswith("MIG-"):
            return [g for g in gpus if g.mig][:1]
        match = [g for g in gpus if (str(g.index) == entry if entry.isdecimal() else _named(g, entry))]
        if not match:
            break
        chosen.append(match[0])
    return chosen


def _named(gpu: Gpu, entry: str) -> bool:
    return bool(entry) and gpu.uuid is not None and gpu.uuid.startswith(entry)


def parse_mig(text: str) -> list[str]:
    """The profiles (``3g.40gb``) of the MIG instances in `nvidia-smi -L`, in order."""
    return re.findall(r"^\s+MIG\s+(\S+)\s+Device\s+\d+:", text, re.MULTILINE)


def parse_topology(text: str, indices: Sequence[int]) -> str | None:
    """How the GPUs ``indices`` are linked, from `nvidia-smi topo -m`.

    One class (``NV12``, ``PIX``, ``SYS`` …) when all pairs are alike, else the count of each and a digest of the
    matrix, such as ``NV12*2 SYS*4 1a2b3c4d``. None when the text holds no such matrix.
    """
    rows = [re.split(r"\s+", line.strip()) for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()]
    header = next((row for row in rows if row and row[0] == "GPU0"), None)
    body = {row[0]: row[1:] for row in rows if len(row) > 1 and re.fullmatch(r"GPU\d+", row[0]) and row is not header}
    if header is None:
        return None
    columns = {name: place for place, name in enumerate(header) if re.fullmatch(r"GPU\d+", name)}
    names = [f"GPU{index}" for index in indices]
    try:
        matrix = [[body[a][columns[b]] for b in names if a != b] for a in names]
    except (KeyError, IndexError):
        return None
    kinds = Counter(link for i, row in enumerate(matrix) for link in row[i:])
    if len(kinds) == 1:
        return next(iter(kinds))
    digest = hashlib.sha256(repr(matrix).encode()).hexdigest()[:8]
    return " ".join(f"{kind}*{count}" for kind, count in sorted(kinds.items())) + f" {digest}"


def parse_cuda(text: str) -> str | None:
    """The newest CUDA version that the driver serves, from the head of plain `nvidia-smi`."""
    found = re.search(r"CUDA (?:UMD )?Version:\s*(\d+\.\d+)", text)
    return found[1] if found else None


def _cpu_facts() -> dict[str, Any]:
    model, family, flags = parse_cpuinfo(_read("/proc/cpuinfo"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = parse_quota(_read("/sys/fs/cgroup/cpu.max"))
    memory = parse_memory(_read("/proc/meminfo"), _read("/sys/fs/cgroup/memory.max"))
    return {
        "cpu_model": model or platform.processor() or None,
        "cpu_family": family,
        "cores": cores,
        "cpu_quota": "none" if quota is None or (cores is not None and quota >= cores) else quota,
        "memory_bytes": memory,
        "cpu_flags": flags,
        "machine": f"{platform.system()} {platform.machine()}",
    }


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def parse_cpuinfo(text: str) -> tuple[str | None, str | None, list[str]]:
    """Model name, ``family/model/stepping`` and those of FLAGS that the first core of /proc/cpuinfo has.

    Virtual machines often hide the model name; the second tells their CPUs apart.
    """
    pairs = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    fields = {name.strip(): value.strip() for name, _, value in pairs}
    numbers = [fields.get(name) for name in ("cpu family", "model", "stepping")]
    arm = [fields.get(name) for name in ("CPU implementer", "CPU part", "CPU variant")]
    family = next(("/".join(n) for n in (_full(numbers), _full(arm)) if n), None)
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    return fields.get("model name"), family, [flag for flag in FLAGS if flag in flags]


def _full(values: Sequence[str | None]) -> list[str]:
    known = [v for v in values if v]
    return known if len(known) == len(values) else []


def parse_quota(text: str) -> float | None:
    """CPUs that cgroup v2's ``cpu.max`` allows; None without a limit."""
    parts = text.split()
    if len(parts) != 2 or not all(p.isdecimal() for p in parts) or int(parts[1]) == 0:
        return None
    return round(int(parts[0]) / int(parts[1]), 2)


def parse_memory(meminfo: str, limit: str) -> int | None:
    """Usable bytes: MemTotal or the cgroup's ``memory.max`` if less, rounded to GiB (kernels reserve differently)."""
    found = re.search(r"^MemTotal:\s+(\d+) kB", meminfo, re.MULTILINE)
    sizes = [int(found[1]) << 10] if found else []
    if limit.strip().isdecimal():
        sizes.append(int(limit))
    return max(math.floor(min(sizes) / GIB + 0.5), 1) * GIB if sizes else None
