"""Reading hyper-connected streams: Triton against the reference, and what the mixing matrix must be."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autotune.runtimes.native.kernels.hyper import reference
from autotune.runtimes.native.kernels.hyper import triton as kernel

SIZES = (20, 1e-6, 1e-5)
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def case(tokens: int, count: int, hidden: int) -> tuple[Tensor, ...]:
    source = torch.Generator().manual_seed(tokens * count * hidden)
    total = (2 + count) * count
    shapes = ((tokens, count, hidden), (total, count * hidden), (total,), (total,), (hidden,))
    return tuple(torch.randn(*shape, generator=source) for shape in shapes)


@pytest.mark.parametrize("count, hidden", [(4, 64), (4, 40), (3, 33), (2, 200)])
@pytest.mark.parametrize("tokens", [1, 3, 19])
def test_the_kernel_is_the_reference(tokens: int, count: int, hidden: int) -> None:
    inputs = case(tokens, count, hidden)
    for found, wanted in zip(kernel.hyper(*inputs, SIZES), reference.hyper(*inputs, SIZES), strict=True):
        torch.testing.assert_close(found, wanted, **CLOSE)


@pytest.mark.parametrize("splits", [1, 2, 5])
def test_no_number_of_parts_changes_the_result(splits: int) -> None:
    streams, fn, *small = case(2, 4, 150)
    wanted = reference.hyper(streams, fn, *small, SIZES)
    for found, part in zip(kernel.launch(splits, streams, fn, tuple(small), SIZES), wanted, strict=True):
        torch.testing.assert_close(found, part, **CLOSE)


def test_the_mix_is_doubly_stochastic() -> None:
    _, _, mix = kernel.hyper(*case(5, 4, 32), SIZES)
    torch.testing.assert_close(mix.sum(1), torch.ones(5, 4), rtol=0, atol=1e-4)
    torch.testing.assert_close(mix.sum(2), torch.ones(5, 4), rtol=0, atol=0.05)
