"""Allocator policies and step inputs: applied to the engine's process, read back, refused where they cannot be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from autotune.runtimes.native import NativeRuntime, host
from autotune.runtimes.native.quant.linear import Embedding
from autotune.runtimes.native.transfers import Pinned, Plain, _Mapped
from autotune.setting import reference_model
from search_spaces import SpaceError, load

ON_CPU = load("native").narrow({"cores": 2, "layers": 4, "experts": 8})
ON_CUDA = load("native").narrow({"cores": 2, "layers": 4, "experts": 8, "cuda": True})


def test_keeping_freed_memory_spares_the_page_faults_of_large_tensors() -> None:
    program = (
        "import sys, torch\nfrom autotune.runtimes.native import host\nhost.apply(sys.argv[1])\ntorch.ones(9 << 20)\n"
        "before = host.allocations()['page_faults']\n"
        "for _ in range(20):\n    torch.ones(9 << 20).sum()\n"  # 36 MiB: beyond what glibc learns to keep by itself
        "print(int(host.allocations()['page_faults'] - before))"
    )
    faults = {
        policy: int(subprocess.run([sys.executable, "-c", program, policy], capture_output=True, check=True).stdout)
        for policy in ("default", "keep")
    }
    assert faults["keep"] < faults["default"] / 2


def test_a_policy_is_read_back_from_the_engine(tmp_path: Path) -> None:
    config = ON_CPU.complete({"allocator": "keep", "kv_tokens": 1024})
    with NativeRuntime(reference_model()).launch(config, tmp_path / "log") as endpoint:
        found = endpoint.effective()
        assert (found["allocator"], found["transfers"], found["embed_on"]) == ("keep", "plain", "device")
        endpoint.reset()
        endpoint.score([list(range(40, 140))], 1)
        assert endpoint.counters()["page_faults"] >= 0
    assert host.applied() == "default"  # here nothing changed


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="no allocator policy fastest"):
        host.apply("fastest")


@pytest.mark.parametrize(
    ("knob", "value"),
    [("transfers", "pinned"), ("transfers", "zero_copy"), ("embed_on", "cpu"), ("allocator", "async")],
)
def test_what_needs_a_device_is_removed_on_a_cpu_and_offered_beside_one(knob: str, value: str) -> None:
    with pytest.raises(SpaceError, match="needs a CUDA device"):
        ON_CPU.check(knob, value)
    ON_CUDA.check(knob, value)


def test_a_captured_step_cannot_look_tokens_up_on_the_host() -> None:
    config = ON_CUDA.complete({"graphs": "cuda", "embed_on": "cpu"})
    assert any("embed_on must be device" in sentence for sentence in ON_CUDA.broken(config))


def test_plain_inputs_do_not_move_on_a_cpu() -> None:
    rows = torch.arange(6).view(2, 3)
    assert Plain()(rows) is rows


def test_a_staged_input_is_a_copy_in_one_buffer_that_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pinned, "_locked", lambda self, count: torch.empty(count, dtype=torch.int64))
    send = Pinned()
    first = send(torch.arange(6).view(2, 3))
    assert torch.equal(first, torch.arange(6).view(2, 3))
    assert send(torch.arange(4).view(2, 2)).data_ptr() == first.data_ptr()
    assert torch.equal(send(torch.arange(12).view(3, 4)), torch.arange(12).view(3, 4))


def test_mapped_memory_is_described_as_it_lies() -> None:
    staged = torch.arange(6).view(2, 3)
    found = _Mapped(staged).__cuda_array_interface__
    assert found["shape"] == (2, 3) and found["data"] == (staged.data_ptr(), False) and found["typestr"] == "<i8"


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_a_table_on_the_host_gives_the_same_rows(bits: int) -> None:
    weight, ids = torch.randn(20, 32), torch.tensor([3, 19, 3])
    assert torch.equal(Embedding(weight, bits, "fp32", on_host=True)(ids), Embedding(weight, bits, "fp32")(ids))
