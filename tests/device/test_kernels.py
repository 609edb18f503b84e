"""Every Triton kernel against its reference on a real GPU, in the types that the interpreter cannot check."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch


def agree(case: Any) -> None:
    wanted = case.run("reference")
    for found, other in zip(case.run("triton"), wanted, strict=True):
        error = float((found.float() - other.float()).abs().max() / other.float().abs().max())
        assert error <= case.close, f"{case.op} {case.label}: {error:.2e} of the largest answer"


def test_ragged_sizes(cases: Any) -> None:
    for case in cases.every(cases.SMALL, torch.bfloat16, "cuda"):
        agree(case)


@pytest.mark.parametrize("dot", [torch.float16, torch.float32], ids=str)
def test_other_types(cases: Any, dot: torch.dtype) -> None:
    for case in cases.every(cases.SMALL, dot, "cuda", (3,), (5,)):  # each number of rows is compiled anew, a second
        agree(case)


def test_the_sizes_of_the_model(cases: Any) -> None:
    sizes = replace(cases.MODEL, outputs=8192, experts=32)  # the references hold dense weights in fp32
    for case in cases.every(sizes, torch.bfloat16, "cuda", (1, 70), (5, 40)):
        agree(case)


def test_a_split_of_the_inputs_gives_the_same_bits_at_every_run(cases: Any) -> None:
    sizes = replace(cases.MODEL, outputs=1024)
    for case in cases.Cases(sizes, torch.bfloat16, "cuda").products(1):
        assert all(torch.equal(*pair) for pair in zip(case.run("triton"), case.run("triton"), strict=True))


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_experts_are_captured_and_follow_another_routing(cases: Any, bits: int) -> None:
    """A graph that had read the routing on the host would replay the first one, or not be captured at all."""
    from autotune.runtimes.native.kernels.experts.triton import experts

    of = cases.Cases(replace(cases.MODEL, experts=16), torch.bfloat16, "cuda")
    (case,) = of.experts((4,), bits)
    x, chosen, weights, layer = case.call.args[1]
    for _ in range(3):
        experts(x, chosen, weights, layer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = experts(x, chosen, weights, layer)
    for shift in range(3):
        chosen.copy_((chosen + shift) % 16)
        graph.replay()
        expected = experts(x, chosen, weights, layer)
        torch.testing.assert_close(out, expected, rtol=0, atol=0)
