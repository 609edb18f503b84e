"""A step of Kimi delta attention in a pool: Triton against the reference, which is tested against transformers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autotune.runtimes.native.kernels.kda_decode import reference
from autotune.runtimes.native.kernels.kda_decode import triton as kernel

BOUNDS = (-5.0, 1e-6)


def case(
    rows: int, heads: int, size: int, taps: int, dtype: torch.dtype
) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor], Tensor, dict[str, Tensor]]:
    source = torch.Generator().manual_seed(rows * heads * size)

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source)

    inner, slots = heads * size, rows + 2
    projected = (some(rows, 3 * inner), some(rows, inner), some(rows, 2 * heads)[:, heads:], some(rows, inner))
    pool = some(slots, taps - 1, 3 * inner), some(slots, heads, size, size).to(dtype)
    small = {
        "dt_bias": some(inner), "rate": some(heads, 1).exp(), "taps": some(taps, 3 * inner), "o_norm": some(size),
    }  # fmt: skip
    return projected, pool, torch.randperm(slots, generator=source)[:rows], small


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows, heads, size, taps", [(1, 1, 16, 4), (5, 2, 16, 4), (3, 3, 12, 4), (2, 2, 20, 2)])
def test_the_kernel_is_the_reference(rows: int, heads: int, size: int, taps: int, dtype: torch.dtype) -> None:
    projected, pool, slots, small = case(rows, heads, size, taps, dtype)
    other = pool[0].clone(), pool[1].clone()
    for _ in range(3):  # the later steps read what the earlier ones left
        expected = reference.kda_decode(projected, pool, slots, small, BOUNDS)
        found = kernel.kda_decode(projected, other, slots, small, BOUNDS)
        near = 1e-5 if dtype is torch.float32 else 2e-2  # a state that rounds the other way
        torch.testing.assert_close(found, expected, rtol=near, atol=near)
    assert torch.equal(other[0], pool[0])
    torch.testing.assert_close(other[1], pool[1], rtol=near, atol=near)


def test_slots_of_other_sequences_stay_as_they_are() -> None:
    projected, pool, slots, small = case(2, 2, 16, 4, torch.float32)
    before = pool[0].clone(), pool[1].clone()
    kernel.kda_decode(projected, pool, slots, small, BOUNDS)
    others = [slot for slot in range(4) if slot not in slots.tolist()]
    assert torch.equal(pool[0][others], before[0][others]) and torch.equal(pool[1][others], before[1][others])
    assert not torch.equal(pool[1][slots], before[1][slots])
