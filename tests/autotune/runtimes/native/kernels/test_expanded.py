"""Multi-head attention over re-made keys and values: the Triton kernel against torch's own."""

from __future__ import annotations

import pytest
import torch
from contracts.latents import scope

from autotune.runtimes.native.kernels.expanded import reference
from autotune.runtimes.native.kernels.expanded import triton as kernel
from autotune.runtimes.native.kernels.latents import Scope

LATER = [list(range(5, 26))]
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def case(where: Scope, length: int, heads: int, sizes: tuple[int, int]) -> tuple[torch.Tensor, ...]:
    """Query, and keys and values as the two parts of one tensor."""
    source = torch.Generator().manual_seed(length * heads)
    query = torch.randn(*where.positions.shape, heads, sizes[0], generator=source)
    wide = torch.randn(len(query), length, heads, sum(sizes), generator=source)
    return query, *torch.split(wide, sizes, -1)


@pytest.mark.parametrize("heads, sizes", [(2, (16, 24)), (3, (20, 12))])
@pytest.mark.parametrize(
    "positions, choose",
    [
        ([list(range(5, 26))], 0),
        ([list(range(19))], 0),
        ([list(range(5, 26))], 3),
        ([[25], [0], [9]], 0),
        ([[25], [3]], 2),
    ],
    ids=["later", "whole", "chosen", "decode", "decode chosen"],
)
def test_the_kernel_is_the_reference(
    positions: list[list[int]], choose: int, heads: int, sizes: tuple[int, int]
) -> None:
    where = scope(positions, 4, choose)
    query, keys, values = case(where, 26, heads, sizes)
    seen = where.mask(26).any(-1)
    found = kernel.expanded(query, keys, values, where, 0.3)
    torch.testing.assert_close(found[seen], reference.expanded(query, keys, values, where, 0.3)[seen], **CLOSE)


def test_products_are_of_the_type_of_the_keys() -> None:
    where = scope([list(range(18))])
    query, keys, values = case(where, 18, 2, (16, 16))
    expected = reference.expanded(query, keys, values, where, 0.3)
    for run in (reference.expanded, kernel.expanded):
        half = run(query, keys.half(), values.half(), where, 0.3)
        assert half.dtype is torch.float32
        torch.testing.assert_close(half, expected, rtol=3e-3, atol=3e-3)


@pytest.mark.parametrize("tile", [kernel.Tile(16, 16), kernel.Tile(32, 16, 4, 1)])
def test_no_tile_changes_the_result(tile: kernel.Tile) -> None:
    where = scope([list(range(33))])
    query, keys, values = case(where, 33, 2, (16, 16))
    found = kernel.launch(tile, query, keys, values, where, 0.3)
    torch.testing.assert_close(found, reference.expanded(query, keys, values, where, 0.3), **CLOSE)
