"""Absorbed attention: the reference against plain attention token by token, the Triton kernel against the reference."""

from __future__ import annotations

import pytest
import torch
from contracts.latents import cached, queries, scope

from autotune.runtimes.native.kernels.absorbed import reference
from autotune.runtimes.native.kernels.absorbed import triton as kernel

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
HALF = {"rtol": 2e-3, "atol": 2e-3}
DECODE = [[16], [0], [5], [22]]
PREFILL = [list(range(9, 15))]


def test_the_reference_is_attention_over_the_visible_tokens_alone() -> None:
    latents, where = cached([23, 23, 23, 23], 8), scope(DECODE, choose=2)
    query = queries(where, 3, 8)
    found = reference.absorbed(query, latents, where, 0.3)
    for row, (position,) in enumerate(DECODE):
        assert where.pools is not None and where.real is not None
        picked = {int(pool) for pool, real in zip(where.pools[row, 0], where.real[row, 0], strict=True) if real}
        border = (position + 1) // 4 * 4
        seen = [t for t in range(position + 1) if t // 4 in picked or t >= border]
        if not seen:
            continue
        rows = latents.rows[latents.slots[row, seen]]
        for head in range(3):
            weights = (rows @ query[row, 0, head] * 0.3).softmax(0)
            torch.testing.assert_close(found[row, 0, head], weights @ rows, **CLOSE)


@pytest.mark.parametrize("positions", [DECODE, PREFILL, [[0]]], ids=["decode", "prefill", "first"])
@pytest.mark.parametrize("heads, rank", [(4, 16), (3, 24), (17, 5)])
def test_the_kernel_is_the_reference(positions: list[list[int]], heads: int, rank: int) -> None:
    where = scope(positions)
    latents = cached([23] * len(positions), rank)
    query = queries(where, heads, rank)
    found = kernel.absorbed(query, latents, where, 0.2)
    torch.testing.assert_close(found, reference.absorbed(query, latents, where, 0.2), **CLOSE)


@pytest.mark.parametrize("stored, close", [("fp16", HALF), ("bf16", CLOSE), ("int8", CLOSE)])
@pytest.mark.parametrize("choose", [0, 2])
def test_narrow_latents_are_widened_inside_the_kernel(stored: str, close: dict[str, float], choose: int) -> None:
    where = scope([[21], [7], [12]], choose=choose)
    latents = cached([22, 22, 22], 20, stored)
    query = queries(where, 3, 20)
    found = kernel.absorbed(query, latents, where, 0.2)
    torch.testing.assert_close(found, reference.absorbed(query, latents, where, 0.2), **close)


@pytest.mark.parametrize("kpool", [2, 4])
def test_a_selection_masks_the_other_pools(kpool: int) -> None:
    where = scope([[13, 14, 15, 16, 17]], kpool, choose=3)
    latents, query = cached([18], 16, size=4), queries(where, 2, 16)
    found = kernel.absorbed(query, latents, where, 0.5)
    torch.testing.assert_close(found, reference.absorbed(query, latents, where, 0.5), **CLOSE)


@pytest.mark.parametrize("tile", [kernel.Tile(16, 16), kernel.Tile(32, 64, 4, 1)])
def test_no_tile_changes_the_result(tile: kernel.Tile) -> None:
    where = scope([[40], [3]])
    latents, query = cached([41, 41], 12, size=16), queries(where, 20, 12)
    found = kernel.launch(tile, query, latents, where, 0.2, (kernel.CAUSAL, 1))[0][0]
    torch.testing.assert_close(found, reference.absorbed(query, latents, where, 0.2), **CLOSE)


def test_slots_are_a_table_of_blocks_of_one_token() -> None:
    where, latents = scope([[9], [4]]), cached([10, 10], 16)
    single = type(latents)(latents.rows, latents.scale, latents.slots, 1, latents.slots)
    query = queries(where, 2, 16)
    assert torch.equal(kernel.absorbed(query, single, where, 0.2), kernel.absorbed(query, latents, where, 0.2))
