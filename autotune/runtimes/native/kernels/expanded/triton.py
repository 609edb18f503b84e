"""A tile of queries of one head over all keys that any of them may see, in one pass with a running maximum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from autotune.runtimes.native.kernels.absorbed.triton import LOG2E, dot_type
from autotune.runtimes.native.kernels.latents import Scope


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries and keys of a tile (each at least 16), warps and pipeline stages."""

    queries: int
    keys: int
    warps: int = 8
    stages: int = 2


@triton.jit
def expanded_kernel(
    query, keys, values, positions, picked, out,
    queries, heads, pools, key_group, key_token, key_head, value_group, value_token, value_head, scale,
    D: tl.constexpr, V: tl.constexpr, KPOOL: tl.constexpr, MASKED: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """out [G, M, H, V]; keys and values are given by their strides, in elements, over groups, tokens and heads."""
    head, group = tl.program_id(1), tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    d, v = tl.arange(0, SIZE), tl.arange(0, WIDE)
    row = group * queries + m
    real = (m < queries)[:, None]
    q = tl.load(query + (row * heads + head)[:, None] * D + d[None, :], mask=real & (d < D)[None, :], other=0).to(DOT)
    position = tl.load(positions + row, mask=m < queries, other=-1).to(tl.int32)
    border = (position + 1) // KPOOL * KPOOL
    last = tl.max(position, 0)
    key_at = keys + group * key_group + head * key_head + d[:, None]
    value_at = values + group * value_group + head * value_head + v[None, :]
    top = tl.full((QUERIES,), -float("inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    sums = tl.zeros((QUERIES, WIDE), tl.float32)
    for start in range(0, last + 1, KEYS):
        n = start + tl.arange(0, KEYS)
        token = n.to(tl.int64)
        k = tl.load(key_at + token[None, :] * key_token, mask=(n <= last)[None, :] & (d < D)[:, None], other=0).to(DOT)
        seen = n[None, :] <= position[:, None]
        if MASKED:
            complete = seen & (n[None, :] < border[:, None])
            chosen = tl.load(picked + row[:, None] * pools + n[None, :] // KPOOL, mask=complete, other=1)
            seen = seen & (chosen != 0)
        scores = tl.where(seen, tl.dot(q, k, input_precision="ieee") * scale, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        safe = tl.where(higher == -float("inf"), 0.0, higher)
        weights = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(top - safe)
        total = total * shrink + tl.sum(weights, 1)
        x = tl.load(value_at + token[:, None] * value_token, mask=(n <= last)[:, None] & (v < V)[None, :], other=0)
        sums = tl.dot(weights.to(DOT), x.to(DOT), sums * shrink[:, None], input_precision="ieee")
        top = higher
    sums = sums / tl.where(total > 0, total, 1)[:, None]
    tl.store(out + (row * heads + head)[:, None] * V + v[None, :], sums, mask=real & (v < V)[None, :])


def expanded(query: Tensor, keys: Tensor, values: Tensor, scope: Scope, scale: float) -> Tensor:
    """See the reference; products are of the keys' type."""
    return launch(default(query.shape[1], keys.dtype), query, keys, values, scope, scale)


def default(queries: int, dtype: torch.dtype) -> Tile:
    """Of what compiles for compute capability 8.0, the largest that hardly spills; fp32 has no matrix units there."""
    if dtype is torch.float32:
        return Tile(16, 32, 8, 1)
    return Tile(64, 64, 8, 2) if queries > 16 else Tile(16, 64, 4, 2)


def launch(tile: Tile, query: Tensor, keys: Tensor, values: Tensor, scope: Scope, scale: float) -> Tensor:
    """`expanded` with this tile."""
    groups, queries, heads, size = query.shape
    keys, values = (t if t.stride(3) == 1 else t.contiguous() for t in (keys, values))
    wide = values.shape[3]
    out = query.new_empty(groups, queries, heads, wide, dtype=torch.float32)
    positions = scope.positions.contiguous()
    picked = positions if scope.pools is None else scope.picked(keys.shape[1])
    expanded_kernel[(-(-queries // tile.queries), heads, groups)](
        query.contiguous(), keys, values, positions, picked, out,
        queries, heads, picked.shape[-1], *keys.stride()[:3], *values.stride()[:3], scale * LOG2E,
        D=size, V=wide, KPOOL=scope.kpool, MASKED=scope.pools is not None, QUERIES=tile.queries, KEYS=tile.keys,
        SIZE=max(triton.next_power_of_2(size), 16), WIDE=max(triton.next_power_of_2(wide), 16),
        DOT=dot_type(keys), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def specimen(tile: Tile, masked: bool, stored: str) -> tuple[Any, dict[str, str], dict[str, Any], dict[str, int]]:
    """GLM-5.3-Flash: 64 heads with keys and values of 256, pools of 4."""
    types = {"query": "*fp32", "keys": f"*{stored}", "values": f"*{stored}", "positions": "*i64"}
    types |= {"picked": "*i1" if masked else "*i64", "out": "*fp32", "scale": "fp32"}
    types |= dict.fromkeys(("queries", "heads", "pools"), "i32")
    types |= {f"{of}_{over}": "i32:16" for of in ("key", "value") for over in ("group", "token", "head")}
    constants = {"D": 256, "V": 256, "KPOOL": 4, "MASKED": masked, "QUERIES": tile.queries, "KEYS": tile.keys}
    constants |= {"SIZE": 256, "WIDE": 256, "DOT": tl.float32 if stored == "fp32" else tl.bfloat16}
    return expanded_kernel, types, constants, {"num_warps": tile.warps, "num_stages": tile.stages}


SPECIMENS = [
    specimen(default(n, kind), masked, name)
    for name, kind in {"bf16": torch.bfloat16, "fp32": torch.float32}.items()
    for n in (1, 512)
    for masked in (False, True)
]
