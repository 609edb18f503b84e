"""Three kernels: scores within each chunk, the triangular solve, and the scan over the states of the chunks.

All products are fp32 without rounding to tf32: decays span many orders of magnitude.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from autotune.runtimes.native.kernels.kda_prefill.reference import SUB, chunked


@dataclass(frozen=True, slots=True)
class Tile:
    """Values of a program of the scan and keys that it multiplies at once (each at least 16), and its warps."""

    values: int
    keys: int
    warps: int


@triton.jit
def pairs_kernel(
    left, right, decay, out, length, DIAGONAL: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, SUB: tl.constexpr
):
    """out [N, C, C], zero before: rows ``SUB`` · program_id(1) and on of the reference's `pairs`."""
    chunk, start = tl.program_id(0).to(tl.int64), tl.program_id(1) * SUB
    d, i = tl.arange(0, SIZE), tl.arange(0, SUB)
    rows = start + i
    real = (rows < length)[:, None] & (d < D)[None, :]
    base = chunk * length
    at = (base + rows)[:, None] * D + d[None, :]
    x = tl.load(left + at, mask=real, other=0)
    fall = tl.load(decay + at, mask=real, other=0)
    stop = tl.minimum(start + SUB, length)
    middle = tl.load(decay + (base + (start + stop) // 2) * D + d, mask=d < D, other=0)[None, :]
    y = tl.load(right + at, mask=real, other=0) * tl.exp(middle - fall)
    near = tl.dot(x * tl.exp(fall - middle), tl.trans(y), input_precision="ieee")
    keep = i[:, None] >= i[None, :] - DIAGONAL
    tile = out + (base + rows)[:, None] * length + rows[None, :]
    tl.store(tile, tl.where(keep, near, 0.0), mask=(rows < length)[:, None] & (rows < length)[None, :])
    edge = tl.load(decay + (base + tl.maximum(start - 1, 0)) * D + d, mask=d < D, other=0)[None, :]
    x = x * tl.exp(fall - edge)
    for first in range(0, start, SUB):
        columns = first + i
        there = (base + columns)[:, None] * D + d[None, :]
        y = tl.load(right + there, mask=(d < D)[None, :], other=0)
        y = y * tl.exp(edge - tl.load(decay + there, mask=(d < D)[None, :], other=0))
        far = tl.dot(x, tl.trans(y), input_precision="ieee")
        tl.store(out + (base + rows)[:, None] * length + columns[None, :], far, mask=(rows < length)[:, None])


@triton.jit
def solve_kernel(mixing, target, out, length, W: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """out = (I + mixing)⁻¹ target, [N, C, W], by forward substitution: it never grows what a power series would."""
    chunk = tl.program_id(0).to(tl.int64)
    w, rows = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH), tl.arange(0, ROWS)
    solved = tl.zeros((ROWS, WIDTH), tl.float32)
    for i in range(length):
        at = chunk * length + i
        weights = tl.load(mixing + at * length + rows, mask=rows < i, other=0)
        fresh = tl.load(target + at * W + w, mask=w < W, other=0) - tl.sum(weights[:, None] * solved, 0)
        solved = tl.where((rows == i)[:, None], fresh[None, :], solved)
    there = (chunk * length + rows)[:, None] * W + w[None, :]
    tl.store(out + there, solved, mask=(rows < length)[:, None] & (w < W)[None, :])


@triton.jit
def scan_kernel(
    solved, query, rest, inside, end, out, states, count, length, heads,
    D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """out [count, H, C, D] and states [1 + count, H, D, D], of which the first is given: some values of one head
    through all chunks. The state goes through memory, where its keys can be taken ``KEYS`` at a time."""
    head = tl.program_id(0)
    v, i = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH), tl.arange(0, ROWS)
    values, rows = (v < D)[None, :], (i < length)[:, None]
    for c in range(count):
        n = (c * heads + head).to(tl.int64)
        at = (n * length + i)[:, None]
        old, new = states + n * D * D + v[None, :], states + (n + heads) * D * D + v[None, :]
        known = tl.load(solved + at * 2 * D + v[None, :], mask=rows & values, other=0)
        o = tl.zeros((ROWS, WIDTH), tl.float32)
        for first in range(0, D, KEYS):
            d = first + tl.arange(0, KEYS)
            square, long = (d < D)[:, None] & values, rows & (d < D)[None, :]
            s = tl.load(old + d[:, None] * D, mask=square, other=0)
            stale = tl.load(solved + at * 2 * D + D + d[None, :], mask=long, other=0)
            known = known - tl.dot(stale, s, input_precision="ieee")
            o = tl.dot(tl.load(query + at * D + d[None, :], mask=long, other=0), s, o, input_precision="ieee")
        within = tl.load(inside + at * length + i[None, :], mask=rows & (i < length)[None, :], other=0)
        o = tl.dot(within, known, o, input_precision="ieee")
        tl.store(out + at * D + v[None, :], o, mask=rows & values)
        for first in range(0, D, KEYS):
            d = first + tl.arange(0, KEYS)
            square, long = (d < D)[:, None] & values, rows & (d < D)[None, :]
            s = tl.load(old + d[:, None] * D, mask=square, other=0)
            s = s * tl.load(end + n * D + d, mask=d < D, other=0)[:, None]
            k = tl.load(rest + at * D + d[None, :], mask=long, other=0)
            tl.store(new + d[:, None] * D, tl.dot(tl.trans(k), known, s, input_precision="ieee"), mask=square)
        tl.debug_barrier()  # the next chunk reads what other threads have written


def kda_prefill(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, chunk: int
) -> tuple[Tensor, list[Tensor]]:
    """See the reference."""
    return launch(Tile(32, 32, 8), q, k, v, (log_decay, beta), state, chunk)


def launch(
    tile: Tile, q: Tensor, k: Tensor, v: Tensor, gates: tuple[Tensor, Tensor], state: Tensor, chunk: int
) -> tuple[Tensor, list[Tensor]]:
    """`kda_prefill` with this tile of the scan; ``gates`` are log decay and beta."""
    length, heads, size = q.shape
    query, key, value, decay, rate = (part.contiguous() for part in chunked(q, k, v, *gates, chunk))
    number, count = len(query), -(-length // chunk)
    whole, last, scaled = decay.exp(), decay[:, -1:], key * rate
    mixing, inside = q.new_zeros(2, number, chunk, chunk).unbind()
    wide, rows = max(triton.next_power_of_2(size), 16), max(triton.next_power_of_2(chunk), 16)
    for left, out, diagonal in ((scaled, mixing, -1), (query, inside, 0)):
        pairs_kernel[(number, -(-chunk // SUB))](
            left, key, decay, out, chunk, DIAGONAL=diagonal, D=size, SIZE=wide, SUB=SUB, num_warps=8
        )
    target = torch.cat([value * rate, scaled * whole], -1)
    solved = torch.empty_like(target)
    solve_kernel[(number, -(-2 * size // 64))](mixing, target, solved, chunk, W=2 * size, ROWS=rows, WIDTH=64)
    made, states = torch.empty_like(query), q.new_empty(1 + count, heads, size, size)
    states[0] = state
    scan_kernel[(heads, -(-size // tile.values))](
        solved, query * whole, key * (last - decay).exp(), inside, last.exp(), made, states, count, chunk, heads,
        D=size, ROWS=rows, KEYS=tile.keys, WIDTH=tile.values, num_warps=tile.warps, num_stages=1,
    )  # fmt: skip
    made = made.view(count, heads, chunk, size).transpose(1, 2).reshape(count * chunk, heads, size)
    return made[:length], list(states[1:])


def specimens() -> list[tuple[Any, dict[str, str], dict[str, Any], dict[str, int]]]:
    """GLM-5.3-Flash: 64 heads of 128, chunks of 64 (the largest)."""

    def floats(*names: str) -> dict[str, str]:
        return dict.fromkeys(names, "*fp32")

    pairs = floats("left", "right", "decay", "out") | {"length": "i32:16"}
    solve = floats("mixing", "target", "out") | {"length": "i32:16"}
    scan = floats("solved", "query", "rest", "inside", "end", "out", "states")
    scan |= {"count": "i32", "length": "i32:16", "heads": "i32:16"}
    return [
        (pairs_kernel, pairs, {"DIAGONAL": 0, "D": 128, "SIZE": 128, "SUB": SUB}, {"num_warps": 8, "num_stages": 3}),
        (solve_kernel, solve, {"W": 256, "ROWS": 64, "WIDTH": 64}, {"num_warps": 4, "num_stages": 3}),
        (scan_kernel, scan, {"D": 128, "ROWS": 64, "KEYS": 32, "WIDTH": 32}, {"num_warps": 8, "num_stages": 1}),
    ]


SPECIMENS = specimens()
