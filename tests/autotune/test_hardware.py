"""Recognising machines from recorded `nvidia-smi` and /proc texts, and that no text makes the probe fail."""

from __future__ import annotations

import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune import hardware
from autotune.hardware import (
    GIB,
    parse_cpuinfo,
    parse_cuda,
    parse_memory,
    parse_mig,
    parse_query,
    parse_quota,
    parse_topology,
    probe,
    probe_gpus,
)

HEAD = "| NVIDIA-SMI 550.54.15    Driver Version: 550.54.15    CUDA Version: 12.4     |\n"
SXM_ROWS = "".join(
    f"{i}, GPU-aaaa000{i}-1111-2222-3333-444455556666, NVIDIA A100-SXM4-80GB, 81920, 8.0, Disabled, 400.00, 550.54.15\n"
    for i in range(4)
)
SXM_TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV12\tNV12\tNV12\tPXB\t0-31\t0\t\tN/A
GPU1\tNV12\t X \tNV12\tNV12\tPXB\t0-31\t0\t\tN/A
GPU2\tNV12\tNV12\t X \tNV12\tSYS\t32-63\t1\t\tN/A
GPU3\tNV12\tNV12\tNV12\t X \tSYS\t32-63\t1\t\tN/A
NIC0\tPXB\tPXB\tSYS\tSYS\t X

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks
"""
PCIE_ROWS = "".join(
    f"{i}, GPU-bbbb000{i}-1111-2222-3333-444455, NVIDIA A100-PCIE-40GB, 40536, 8.0, Disabled, 250.00, 535.161.08\n"
    for i in range(8)
)


def topology(link):
    """The text of `nvidia-smi topo -m` for eight cards; ``link(a, b)`` names the way between two."""
    lines = ["\t" + "\t".join(f"GPU{i}" for i in range(8)) + "\tCPU Affinity\tNUMA Affinity"]
    for a in range(8):
        lines.append("\t".join([f"GPU{a}", *(" X " if a == b else link(a, b) for b in range(8)), "0-63", "0"]))
    return "\n".join(lines)


PCIE_TOPOLOGY = topology(lambda a, b: "NODE" if a // 4 == b // 4 else "SYS")
MIG_ROWS = "0, GPU-cccc0000-1111-2222-3333-444455, NVIDIA A100-SXM4-80GB, 81920, 8.0, Enabled, 400.00, 550.54.15\n"
MIG_LIST = """\
GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-cccc0000-1111-2222-3333-444455556666)
  MIG 3g.40gb     Device  0: (UUID: MIG-5f8e0c5e-0000-1111-2222-333344445555)
  MIG 3g.40gb     Device  1: (UUID: MIG-6f8e0c5e-0000-1111-2222-333344445555)
"""
BARE_ROWS = "0, GPU-dddd0000, NVIDIA GB10, [N/A], 12.1, [N/A], [Not Supported], 580.95.05\n"


def driver(rows, topology="", listing="", head=HEAD):
    def ask(arguments):
        first = arguments[0] if arguments else ""
        return {"topo": topology, "-L": listing, "": head}.get(first, rows)

    return ask


def test_four_sxm_cards_on_nvlink():
    facts, notes = probe_gpus(driver(SXM_ROWS, SXM_TOPOLOGY), None)
    assert facts == {
        "product": "NVIDIA A100-SXM4-80GB", "count": 4, "memory_bytes": 80 * GIB, "compute_capability": "8.0",
        "mig_profile": "off", "links": "NV12", "power_limit_w": 400, "driver": "550.54.15", "cuda": "12.4",
    }  # fmt: skip
    assert notes == ()


def test_eight_pcie_cards_on_two_sockets():
    facts, _ = probe_gpus(driver(PCIE_ROWS, PCIE_TOPOLOGY), None)
    assert (facts["product"], facts["count"], facts["memory_bytes"]) == ("NVIDIA A100-PCIE-40GB", 8, 40 * GIB)
    assert facts["links"].startswith("NODE*12 SYS*16 ")
    half, _ = probe_gpus(driver(PCIE_ROWS, PCIE_TOPOLOGY), "0,1,2,3")
    assert (half["count"], half["links"]) == (4, "NODE")


def test_another_wiring_of_the_same_counts_is_another_machine():
    interleaved = topology(lambda a, b: "NODE" if a % 2 == b % 2 else "SYS")
    one, other = (parse_topology(text, range(8)) for text in (PCIE_TOPOLOGY, interleaved))
    assert one.split()[:2] == other.split()[:2] == ["NODE*12", "SYS*16"]
    assert one != other


def test_a_mig_instance_is_another_machine():
    facts, notes = probe_gpus(driver(MIG_ROWS, "", MIG_LIST), None)
    assert (facts["mig_profile"], facts["count"], facts["memory_bytes"]) == ("3g.40gb", 1, 40 * GIB)
    assert facts["links"] == "none"
    assert "one MIG instance of 2" in notes[0]
    assert parse_mig(MIG_LIST) == ["3g.40gb", "3g.40gb"]
    empty, _ = probe_gpus(driver(MIG_ROWS, "", "GPU 0: NVIDIA A100\n"), None)
    assert (empty["mig_profile"], empty["memory_bytes"]) == ("on, no instance", None)


def test_what_the_driver_does_not_tell_is_unknown():
    facts, notes = probe_gpus(driver(BARE_ROWS, head="no such line"), None)
    assert facts["memory_bytes"] is facts["power_limit_w"] is facts["cuda"] is None
    assert (facts["compute_capability"], facts["mig_profile"]) == ("12.1", "off")
    assert notes == ("unknown, so results are not shared with other machines: memory_bytes, power_limit_w, cuda",)


def test_unlike_cards_are_named():
    rows = SXM_ROWS.splitlines()[0] + "\n" + PCIE_ROWS.splitlines()[1]
    facts, notes = probe_gpus(driver(rows, SXM_TOPOLOGY), None)
    assert facts["product"] == "NVIDIA A100-PCIE-40GB + NVIDIA A100-SXM4-80GB"
    assert (facts["memory_bytes"], facts["power_limit_w"]) == (40 * GIB, 250)
    assert "the GPUs differ" in notes[0]


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 4),
        ("0", 1),
        ("2,3", 2),
        ("GPU-aaaa0001", 1),
        ("0,7,1", 1),
        ("", None),
        ("-1", None),
        ("NoDevFiles", None),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(visible, count):
    found = probe_gpus(driver(SXM_ROWS, SXM_TOPOLOGY), visible)
    assert (found and found[0]["count"]) == count


@pytest.mark.parametrize(
    "text", ["", "garbage", "No devices were found\n", "a,b\n1,2,3", "\x00\xff,,,,,,,\n", "[N/A]\n"]
)
def test_a_text_without_gpus_means_none(text):
    assert parse_query(text) == []
    assert probe_gpus(driver(text, text, text, text), None) is None


@given(st.text(), st.text(), st.text(max_size=20))
def test_no_text_breaks_a_parser(rows, other, visible):
    found = probe_gpus(driver(rows or SXM_ROWS, other, other, other), visible)
    assert found is None or found[0]["count"] >= 1
    probe_gpus(driver(SXM_ROWS, other, other, other), None)
    probe_gpus(driver(MIG_ROWS, other, other, other), None)
    parse_cpuinfo(other), parse_memory(other, rows), parse_quota(other)


def test_the_cuda_version_in_both_spellings():
    assert parse_cuda(HEAD) == "12.4"
    assert parse_cuda("| NVIDIA-SMI 610.1  CUDA UMD Version: 13.1 |") == "13.1"


INTEL = """\
processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 143
model name\t: Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz
stepping\t: 8
flags\t\t: fpu sse avx2 avx512f avx512_bf16 amx_bf16 amx_tile

processor\t: 1
flags\t\t: none
"""


def test_a_cpu_by_name_signature_and_features():
    model, family, flags = parse_cpuinfo(INTEL)
    assert (model, family) == ("Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", "6/143/8")
    assert flags == ["avx2", "avx512f", "avx512_bf16", "amx_bf16"]
    arm = "processor\t: 0\nFeatures\t: fp asimd sve\nCPU implementer\t: 0x41\nCPU variant\t: 0x0\nCPU part\t: 0xd4f\n"
    assert parse_cpuinfo(arm) == (None, "0x41/0xd4f/0x0", ["asimd", "sve"])
    assert parse_cpuinfo("") == (None, None, [])


def test_memory_is_whole_gib_and_the_lesser_of_machine_and_container():
    meminfo = "MemTotal:       65843236 kB\nMemFree: 1 kB\n"
    assert parse_memory(meminfo, "max\n") == parse_memory(meminfo, "") == 63 * GIB
    assert parse_memory(meminfo, f"{8 * GIB + 12345}\n") == 8 * GIB
    assert parse_memory("", "max") is None


def test_the_cpu_quota_of_a_container():
    assert parse_quota("150000 100000\n") == 1.5
    assert parse_quota("max 100000\n") is parse_quota("") is parse_quota("5 0") is None


def no_driver(arguments):
    raise FileNotFoundError("nvidia-smi")


def broken_driver(arguments):
    raise subprocess.SubprocessError("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver")


def test_a_machine_without_a_driver_is_a_cpu(monkeypatch):
    monkeypatch.setattr(hardware, "_ask", no_driver)
    found = probe()
    assert found.kind == "cpu" and found.notes == ()
    assert set(found.facts) == {"cpu_model", "cpu_family", "cores", "cpu_quota", "memory_bytes", "cpu_flags", "machine"}
    assert found == probe()
    assert found.facts["cores"] >= 1


def test_a_broken_driver_is_a_cpu_with_a_note(monkeypatch):
    monkeypatch.setattr(hardware, "_ask", broken_driver)
    found = probe()
    assert found.kind == "cpu" and "couldn't communicate" in found.notes[0]


def test_a_machine_with_gpus(monkeypatch):
    monkeypatch.setattr(hardware, "_ask", driver(SXM_ROWS, SXM_TOPOLOGY))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = probe()
    assert found.kind == "gpu" and found.facts["count"] == 4
    assert "cpu_model" in found.described and "cpu_model" not in found.facts
