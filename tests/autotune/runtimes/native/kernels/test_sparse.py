"""Sparse attention: only the chosen pools and the tail are read, and the result is that of masking all others."""

from __future__ import annotations

import pytest
import torch
from contracts.latents import cached, queries, scope

from autotune.runtimes.native.kernels.absorbed.reference import absorbed
from autotune.runtimes.native.kernels.sparse import reference
from autotune.runtimes.native.kernels.sparse import triton as kernel

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
CASES = [([[16], [3], [5], [22]], 2, 4), ([[9, 10, 11, 12, 13]], 3, 4), ([[20], [21]], 5, 2), ([[30], [19]], 1, 8)]


@pytest.mark.parametrize("positions, choose, kpool", CASES)
@pytest.mark.parametrize("stored", ["fp32", "int8"])
def test_gathering_is_masking(positions: list[list[int]], choose: int, kpool: int, stored: str) -> None:
    where = scope(positions, kpool, choose)
    latents, query = cached([32] * len(positions), 16, stored), queries(where, 3, 16)
    seen = where.mask(32).any(-1)  # a query may have nothing chosen and no tail; what it gets is undefined
    expected = absorbed(query, latents, where, 0.2)
    torch.testing.assert_close(reference.sparse(query, latents, where, 0.2)[seen], expected[seen], **CLOSE)


@pytest.mark.parametrize("positions, choose, kpool", CASES)
@pytest.mark.parametrize("heads, rank", [(4, 16), (3, 20)])
def test_the_kernel_is_the_reference(
    positions: list[list[int]], choose: int, kpool: int, heads: int, rank: int
) -> None:
    where = scope(positions, kpool, choose)
    latents, query = cached([32] * len(positions), rank), queries(where, heads, rank)
    seen = where.mask(32).any(-1)
    found = kernel.sparse(query, latents, where, 0.2)
    torch.testing.assert_close(found[seen], reference.sparse(query, latents, where, 0.2)[seen], **CLOSE)


@pytest.mark.parametrize("stored", ["fp16", "bf16", "int8"])
def test_narrow_latents_are_widened_inside_the_kernel(stored: str) -> None:
    where = scope([[21], [13], [30]], 4, 2)
    latents, query = cached([32] * 3, 24, stored), queries(where, 3, 24)
    expected = reference.sparse(query, latents, where, 0.2)
    close = {"rtol": 2e-3, "atol": 2e-3} if stored == "fp16" else CLOSE
    torch.testing.assert_close(kernel.sparse(query, latents, where, 0.2), expected, **close)


def test_the_rest_of_the_cache_is_not_read() -> None:
    where = scope([[30], [25]], 4, 2)
    latents, query = cached([32, 32], 16), queries(where, 2, 16)
    for run in (reference.sparse, kernel.sparse):
        expected = run(query, latents, where, 0.2)
        spoilt = latents.rows.clone()
        for group, seen in enumerate(where.mask(32)[:, 0]):
            spoilt[latents.slots[group, ~seen]] = 1e6
        other = type(latents)(spoilt, latents.scale, latents.table, latents.size, latents.slots)
        assert torch.equal(run(query, other, where, 0.2), expected)
