"""A tile of heads of one query over one part of its tokens, in one pass with a running maximum (online softmax).

The same kernel serves `sparse` and `split_kv`: only where token n lies, and which part of them is read, differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from autotune.runtimes.native.kernels.latents import Latents, Scope

CAUSAL, MASKED, GATHER = range(3)
LOG2E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Tile:
    """Heads and tokens of a tile (each at least 16), warps and pipeline stages."""

    heads: int
    tokens: int
    warps: int = 8
    stages: int = 2


@triton.jit
def visible(n, row, position, pools, picks, real, MODE: tl.constexpr, KPOOL: tl.constexpr):
    """The token that is number ``n`` of what the query ``row`` reads, and whether it may be seen."""
    border = (position + 1) // KPOOL * KPOOL
    if MODE == 2:
        inside = n < pools * KPOOL
        at = row * pools + n // KPOOL
        token = tl.load(picks + at, mask=inside, other=0).to(tl.int32) * KPOOL + n % KPOOL
        token = tl.where(inside, token, border + n - pools * KPOOL)
        seen = tl.load(real + at, mask=inside, other=1) != 0
    else:
        token = n
        seen = n <= position
        if MODE == 1:
            complete = seen & (n < border)
            seen = seen & (tl.load(picks + row * pools + n // KPOOL, mask=complete, other=1) != 0)
    return token, seen & (token <= position)


@triton.jit
def attend_kernel(
    query, rows, scales, table, positions, picks, real, out, totals,
    queries, blocks, pools, scale,
    H: tl.constexpr, R: tl.constexpr, SIZE: tl.constexpr, KPOOL: tl.constexpr, MODE: tl.constexpr,
    SPLITS: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr, RANK: tl.constexpr, INT8: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """out [SPLITS, Q, H, R] normalised, totals [SPLITS, Q, H] their log-sum-exps to base 2 (only if SPLITS > 1)."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(2)
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    r = tl.arange(0, RANK)
    inside = (h < H)[:, None] & (r < R)[None, :]
    q = tl.load(query + (row * H + h)[:, None] * R + r[None, :], mask=inside, other=0).to(DOT)
    position = tl.load(positions + row).to(tl.int32)
    count = pools * KPOOL + (position + 1) % KPOOL if MODE == 2 else position + 1
    share = tl.cdiv(tl.cdiv(count, TOKENS), SPLITS) * TOKENS
    end = tl.minimum(split * share + share, count)
    top = tl.full((HEADS,), -float("inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    sums = tl.zeros((HEADS, RANK), tl.float32)
    for start in range(split * share, end, TOKENS):
        n = start + tl.arange(0, TOKENS)
        token, seen = visible(n, row, position, pools, picks, real, MODE, KPOOL)
        seen = seen & (n < end)
        token = tl.where(seen, token, 0)
        slot = tl.load(table + row // queries * blocks + token // SIZE) * SIZE + token % SIZE
        latent = tl.load(rows + slot[:, None] * R + r[None, :], mask=seen[:, None] & (r < R)[None, :], other=0).to(DOT)
        scores = tl.dot(q, tl.trans(latent), input_precision="ieee") * scale
        if INT8:  # the codes fit bf16 exactly, so their scale waits for the products
            factor = tl.load(scales + slot, mask=seen, other=0).to(tl.float32)
            scores *= factor[None, :]
        scores = tl.where(seen[None, :], scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        safe = tl.where(higher == -float("inf"), 0.0, higher)
        weights = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(top - safe)
        total = total * shrink + tl.sum(weights, 1)
        if INT8:
            weights *= factor[None, :]
        sums = tl.dot(weights.to(DOT), latent, sums * shrink[:, None], input_precision="ieee")
        top = higher
    at = (split * tl.num_programs(0) + row) * H + h
    tl.store(out + at[:, None] * R + r[None, :], sums / tl.where(total > 0, total, 1)[:, None], mask=inside)
    if SPLITS > 1:
        high = top + tl.log2(tl.where(total > 0, total, 1))  # −∞ of a part that has no visible token
        tl.store(totals + at, high, mask=h < H)


def absorbed(query: Tensor, latents: Latents, scope: Scope, scale: float) -> Tensor:
    """See the reference."""
    mode = CAUSAL if scope.pools is None else MASKED
    return launch(default(query, latents), query, latents, scope, scale, (mode, 1))[0][0]


def default(query: Tensor, latents: Latents) -> Tile:
    """What compiles for compute capability 8.0 without spilling registers; fp32 is multiplied without matrix units."""
    if latents.rows.dtype is torch.float32:
        return Tile(16, 32, 8, 1)
    return Tile(32 if query.shape[2] > 16 else 16, 32, 8, 2)


def launch(
    tile: Tile, query: Tensor, latents: Latents, scope: Scope, scale: float, how: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """`absorbed` with this tile; ``how`` is which tokens are read (CAUSAL, MASKED, GATHER) and in how many parts.

    Returns the parts [N, G, M, H, R] and, for more than one, their log-sum-exps to base 2 [N, G, M, H].
    """
    (mode, splits), (groups, queries, heads, rank) = how, query.shape
    out = query.new_empty(splits, *query.shape, dtype=torch.float32)
    totals = query.new_empty(splits, *query.shape[:3], dtype=torch.float32)
    positions, table = scope.positions.contiguous(), latents.table.contiguous()
    picks, real, pools = positions, positions, 0  # never read without a selection
    if mode == MASKED:
        picks = scope.picked(latents.length)
        pools = picks.shape[2]
    elif mode == GATHER:
        assert scope.pools is not None and scope.real is not None
        picks, real, pools = scope.pools.contiguous(), scope.real.contiguous(), scope.pools.shape[2]
    attend_kernel[(groups * queries, -(-heads // tile.heads), splits)](
        query.contiguous(), latents.rows, latents.scale, table, positions, picks, real, out, totals,
        queries, table.shape[1], pools, scale * LOG2E,
        H=heads, R=rank, SIZE=latents.size, KPOOL=scope.kpool, MODE=mode, SPLITS=splits,
        HEADS=tile.heads, TOKENS=tile.tokens, RANK=max(triton.next_power_of_2(rank), 16),
        INT8=latents.rows.dtype is torch.int8, DOT=dot_type(latents.rows),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out, totals


def dot_type(rows: Tensor) -> Any:
    """What products are computed in: as stored, int8 as bf16, but fp32 on a CPU, whose interpreter spoils bf16."""
    if rows.dtype is torch.float16:
        return tl.float16
    return tl.float32 if rows.dtype is torch.float32 or rows.device.type == "cpu" else tl.bfloat16


def specimen(tile: Tile, mode: int, splits: int, stored: str) -> tuple[Any, dict[str, str], dict[str, Any], Any]:
    """GLM-5.3-Flash: 64 heads over latents of 512, pools of 4, blocks of 64."""
    types = {"query": "*fp32", "rows": f"*{stored}", "scales": "*bf16", "table": "*i64", "positions": "*i64"}
    types |= {"picks": "*i64" if mode == GATHER else "*i1", "real": "*i1", "out": "*fp32", "totals": "*fp32"}
    types |= {"queries": "i32", "blocks": "i32", "pools": "i32", "scale": "fp32"}
    constants = {
        "H": 64, "R": 512, "SIZE": 64, "KPOOL": 4, "MODE": mode, "SPLITS": splits, "HEADS": tile.heads,
        "TOKENS": tile.tokens, "RANK": 512, "INT8": stored == "i8",
        "DOT": tl.float32 if stored == "fp32" else tl.bfloat16,
    }  # fmt: skip
    return attend_kernel, types, constants, {"num_warps": tile.warps, "num_stages": tile.stages}


TILES = {"bf16": Tile(32, 32, 8, 2), "i8": Tile(32, 32, 8, 2), "fp32": Tile(16, 32, 8, 1)}
SPECIMENS = [specimen(TILES[stored], mode, 1, stored) for stored in TILES for mode in (CAUSAL, MASKED)]
