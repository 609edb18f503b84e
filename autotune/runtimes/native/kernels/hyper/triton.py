"""Two kernels: the small product over all streams, split over their width, and what follows for each token alone."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

WIDTH, ROWS = 128, 16
"""Inputs and tokens of a tile of the product."""


@triton.jit
def project_kernel(
    streams, fn, products, squares, tokens, inputs, share,
    F: tl.constexpr, FS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """products [S, T, F] of streams [T, inputs] and fn [F, inputs], squares [S, T], each over ``share`` inputs."""
    split = tl.program_id(1)
    t, f = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, FS)
    row = t.to(tl.int64)[:, None] * inputs
    sums = tl.zeros((ROWS, FS), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for start in range(split * share, tl.minimum(split * share + share, inputs), WIDTH):
        n = start + tl.arange(0, WIDTH)
        x = tl.load(streams + row + n[None, :], mask=(t < tokens)[:, None] & (n < inputs)[None, :], other=0)
        w = tl.load(fn + f[None, :] * inputs + n[:, None], mask=(f < F)[None, :] & (n < inputs)[:, None], other=0)
        sums = tl.dot(x, w, sums, input_precision="ieee")
        total += tl.sum(x * x, 1)
    at = split * tokens + t
    tl.store(products + at.to(tl.int64)[:, None] * F + f[None, :], sums, mask=(t < tokens)[:, None] & (f < F)[None, :])
    tl.store(squares + at, total, mask=t < tokens)


@triton.jit
def mixed(products, base, scale, inverse, row, tokens, f, real, F: tl.constexpr, SPLITS: tl.constexpr):
    """The scaled products ``f`` of a token, in the shape of ``f``."""
    total = tl.load(products + row * F + f, mask=real, other=0)
    for split in range(1, SPLITS):
        total += tl.load(products + (split * tokens + row) * F + f, mask=real, other=0)
    return tl.load(base + f, mask=real, other=0) + total * inverse * tl.load(scale + f, mask=real, other=0)


@triton.jit
def finish_kernel(
    streams, products, squares, base, scale, norm, out, post, mix, tokens, eps, norm_eps,
    ITERATIONS: tl.constexpr, N: tl.constexpr, D: tl.constexpr, F: tl.constexpr, SPLITS: tl.constexpr,
    NS: tl.constexpr, DS: tl.constexpr,
):  # fmt: skip
    """The gates, Sinkhorn's iterations and the normed input of one token; see the reference."""
    row = tl.program_id(0).to(tl.int64)
    i, d = tl.arange(0, NS), tl.arange(0, DS)
    j = i[None, :]
    total = tl.load(squares + row)
    for split in range(1, SPLITS):
        total += tl.load(squares + split * tokens + row)
    inverse = tl.rsqrt(total / (N * D) + norm_eps)
    pre = tl.sigmoid(mixed(products, base, scale, inverse, row, tokens, i, i < N, F, SPLITS)) + eps
    gate = 2 * tl.sigmoid(mixed(products, base, scale, inverse, row, tokens, N + i, i < N, F, SPLITS))
    tl.store(post + row * N + i, gate, mask=i < N)
    inside = (i < N)[:, None] & (j < N)
    f = 2 * N + i[:, None] * N + j
    logits = mixed(products, base, scale, inverse, row, tokens, f, inside, F, SPLITS)
    logits = tl.where(j < N, logits, -float("inf"))
    raised = tl.exp(logits - tl.max(logits, 1)[:, None])
    m = tl.where(inside, raised / tl.sum(raised, 1)[:, None] + eps, 0.0)
    m = m / (tl.sum(m, 0)[None, :] + eps)
    for _ in range(ITERATIONS - 1):
        m = m / (tl.sum(m, 1)[:, None] + eps)
        m = m / (tl.sum(m, 0)[None, :] + eps)
    tl.store(mix + row * N * N + i[:, None] * N + j, m, mask=inside)
    known = (i < N)[:, None] & (d < D)[None, :]
    x = tl.load(streams + (row * N + i)[:, None] * D + d[None, :], mask=known, other=0)
    x = tl.sum(x * pre[:, None], 0)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / D + norm_eps) * tl.load(norm + d, mask=d < D, other=0)
    tl.store(out + row * D + d, x, mask=d < D)


def hyper(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm: Tensor, sizes: tuple[int, float, float]
) -> tuple[Tensor, Tensor, Tensor]:
    """See the reference."""
    inputs = fn.shape[1]
    return launch(min(-(-inputs // (4 * WIDTH)), 32), streams, fn, (base, scale, norm), sizes)


def launch(
    splits: int, streams: Tensor, fn: Tensor, small: tuple[Tensor, Tensor, Tensor], sizes: tuple[int, float, float]
) -> tuple[Tensor, Tensor, Tensor]:
    """`hyper` with the product's inputs in this many parts, so that few tokens keep many multiprocessors busy."""
    (tokens, count, hidden), (total, inputs), (iterations, eps, norm_eps) = streams.shape, fn.shape, sizes
    streams = streams.contiguous()
    products, squares = streams.new_empty(splits, tokens, total), streams.new_empty(splits, tokens)
    share = -(-inputs // (splits * WIDTH)) * WIDTH
    project_kernel[(-(-tokens // ROWS), splits)](
        streams, fn, products, squares, tokens, inputs, share,
        F=total, FS=max(triton.next_power_of_2(total), 16), ROWS=ROWS, WIDTH=WIDTH, num_warps=4, num_stages=2,
    )  # fmt: skip
    out, post = streams.new_empty(tokens, hidden), streams.new_empty(tokens, count)
    mix = streams.new_empty(tokens, count, count)
    base, scale, norm = small
    finish_kernel[(tokens,)](
        streams, products, squares, base, scale, norm, out, post, mix, tokens, eps, norm_eps,
        ITERATIONS=iterations, N=count, D=hidden, F=total, SPLITS=splits,
        NS=triton.next_power_of_2(count), DS=triton.next_power_of_2(hidden), num_warps=8,
    )  # fmt: skip
    return out, post, mix


def specimens() -> list[tuple[Any, dict[str, str], dict[str, Any], dict[str, int]]]:
    """GLM-5.3-Flash: 4 streams of 4096, 20 iterations."""
    names = ("streams", "fn", "products", "squares", "base", "scale", "norm", "out", "post", "mix")
    pointers = dict.fromkeys(names, "*fp32")
    project = {name: pointers[name] for name in names[:4]} | {"tokens": "i32", "inputs": "i32:16", "share": "i32:16"}
    finish = {name: pointers[name] for name in names if name != "fn"} | {"tokens": "i32"}
    finish |= {"eps": "fp32", "norm_eps": "fp32"}
    tile = {"F": 24, "FS": 32, "ROWS": ROWS, "WIDTH": WIDTH}
    sizes = {"ITERATIONS": 20, "N": 4, "D": 4096, "F": 24, "SPLITS": 32, "NS": 4, "DS": 4096}
    return [
        (project_kernel, project, tile, {"num_warps": 4, "num_stages": 2}),
        (finish_kernel, finish, sizes, {"num_warps": 8, "num_stages": 1}),
    ]


SPECIMENS = specimens()
