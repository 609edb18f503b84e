"""Which backend runs what: chosen by capability, with a reason for every backend that was not."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from autotune.runtimes.native.kernels import select
from autotune.runtimes.native.kernels.select import OPS, TRITON, Backend, Capability, choose

A100 = Capability("cuda", (8, 0), "bf16", latent=512, head=256, linear=128, triton=True, interpreter=False)
CPU = replace(A100, device="cpu", sm=(0, 0))


def test_a_gpu_runs_triton_and_says_why_not_the_reference() -> None:
    chosen = choose(A100)
    assert chosen.backends == dict.fromkeys(OPS, "reference") | dict.fromkeys(TRITON, "triton")
    missing = {"choose=triton": "triton has no kernel of it"}
    assert chosen.refusals == {f"{op}=reference": "triton comes first" for op in TRITON} | missing
    for op, function in chosen.functions.items():
        assert function.__module__.split(".")[-2:] == [op, chosen.backends[op]]


@pytest.mark.parametrize(
    "at, ops, reason",
    [
        (CPU, TRITON, "compiles for GPUs"),
        (replace(A100, triton=False), TRITON, "not installed"),
        (replace(A100, sm=(7, 5)), TRITON, "compute capability 8.0, and this device has 7.5"),
        (replace(A100, dtype="fp8"), ("absorbed", "sparse", "split_kv"), "not of fp8"),
        (replace(A100, latent=1024), ("absorbed", "sparse", "split_kv"), "1024 do not fit"),
        (replace(A100, head=320), ("expanded",), "320 do not fit"),
        (replace(A100, linear=256), ("kda_prefill", "kda_decode"), "256 do not fit"),
    ],
    ids=str,
)
def test_what_triton_cannot_run_the_reference_does(at: Capability, ops: tuple[str, ...], reason: str) -> None:
    chosen = choose(at)
    assert {op for op, name in chosen.backends.items() if name == "reference"} == {*ops, "choose"}
    for op in ops:
        assert reason in chosen.refusals[f"{op}=triton"]


def test_the_interpreter_lets_a_cpu_run_triton() -> None:
    assert choose(replace(CPU, interpreter=True)).backends == choose(A100).backends


def test_a_third_backend_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(hyper=lambda: None)
    monkeypatch.setitem(sys.modules, f"{select.PACKAGE}.hyper.c", module)
    line = Backend("c", ("hyper",), lambda op, at: "" if at.device == "cpu" else "it runs on CPUs")
    backends = (line, *select.BACKENDS)
    chosen = choose(CPU, backends)
    assert chosen.backends == dict.fromkeys(OPS, "reference") | {"hyper": "c"}
    assert chosen.functions["hyper"] is module.hyper
    assert chosen.refusals["hyper=triton"] == chosen.refusals["hyper=reference"] == "c comes first"
    assert choose(A100, backends).refusals["hyper=c"] == "it runs on CPUs"


def test_what_replaces_a_reference_has_its_name_and_never_replaces_anything_else() -> None:
    def compiled() -> None:
        pass

    on_cpu, on_gpu = (choose(at).replaced({"hyper": compiled}, "compiled") for at in (CPU, A100))
    assert on_cpu.backends["hyper"] == "compiled" and on_cpu.functions["hyper"] is compiled
    assert on_cpu.refusals["hyper=reference"] == "graphs=compiled runs it"
    assert on_gpu.backends["hyper"] == "triton" and on_gpu.functions["hyper"] is not compiled
