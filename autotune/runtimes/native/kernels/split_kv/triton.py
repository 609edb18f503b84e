"""The kernel of `absorbed` with a program for each part of the context, and one that merges the parts."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from autotune.runtimes.native.kernels.absorbed.triton import (
    CAUSAL,
    GATHER,
    MASKED,
    TILES,
    default,
    launch,
    specimen,
)
from autotune.runtimes.native.kernels.latents import Latents, Scope


@triton.jit
def merge_kernel(
    outs, totals, out, count, R: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr
):
    """out [count, R] from outs [SPLITS, count, R] and totals [SPLITS, count], log-sum-exps to base 2."""
    row = tl.program_id(0).to(tl.int64)
    part, r = tl.arange(0, PARTS), tl.arange(0, RANK)
    total = tl.load(totals + part * count + row, mask=part < SPLITS, other=-float("inf"))
    weights = tl.exp2(total - tl.max(total, 0))
    weights = weights / tl.sum(weights, 0)
    known = (part < SPLITS)[:, None] & (r < R)[None, :]
    values = tl.load(outs + (part.to(tl.int64) * count + row)[:, None] * R + r[None, :], mask=known, other=0)
    tl.store(out + row * R + r, tl.sum(values * weights[:, None], 0), mask=r < R)


def split_kv(query: Tensor, latents: Latents, scope: Scope, scale: float, splits: int, gather: bool) -> Tensor:
    """See the reference."""
    mode = GATHER if gather else CAUSAL if scope.pools is None else MASKED
    outs, totals = launch(default(query, latents), query, latents, scope, scale, (mode, splits))
    return outs[0] if splits == 1 else merge(outs, totals)


def merge(outs: Tensor, totals: Tensor) -> Tensor:
    """Parts [N, G, M, H, R] and their log-sum-exps to base 2 [N, G, M, H] → [G, M, H, R]."""
    splits, rank = outs.shape[0], outs.shape[-1]
    out = outs.new_empty(outs.shape[1:])
    count = out.numel() // rank
    sizes = {"R": rank, "SPLITS": splits, "PARTS": triton.next_power_of_2(splits)}
    merge_kernel[(count,)](outs, totals, out, count, **sizes, RANK=triton.next_power_of_2(rank), num_warps=4)
    return out


MERGE = (
    merge_kernel,
    {"outs": "*fp32", "totals": "*fp32", "out": "*fp32", "count": "i32"},
    {"R": 512, "SPLITS": 8, "PARTS": 8, "RANK": 512},
    {"num_warps": 4, "num_stages": 3},
)
SPECIMENS = [*(specimen(tile, mode, 8, kind) for kind, tile in TILES.items() for mode in (CAUSAL, GATHER)), MERGE]
