"""Triton device functions shared by the products: tiles of activations and weights, and the loop over inputs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TRITON = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.int8: tl.int8}


@triton.jit
def rows_tile(x, m, k, stride, valid, inputs, DOT: tl.constexpr):
    """x[m, k] as DOT, [M, K]; zeros where ``valid`` is false or beyond ``inputs``."""
    at = x + m.to(tl.int64)[:, None] * stride + k[None, :]
    return tl.load(at, mask=valid[:, None] & (k[None, :] < inputs), other=0).to(DOT)


@triton.jit
def plain_tile(weight, n, k, known, inputs, DOT: tl.constexpr):
    """Wᵀ[k, n] of a row-major weight of any type, as DOT (int8 fits every floating type exactly)."""
    at = weight + n.to(tl.int64)[None, :] * inputs + k[:, None]
    return tl.load(at, mask=known[None, :] & (k[:, None] < inputs), other=0).to(DOT)


@triton.jit
def packed_tile(
    packed, scale, low, n, step, known, inputs, GROUP: tl.constexpr, N: tl.constexpr, K: tl.constexpr, DOT: tl.constexpr
):
    """Two tiles [K / 2, N] as DOT: the first and the second halves of the groups of block ``step`` of K inputs.

    ``packed`` [out, inputs / 2] as `w4a16.reference` packs it, ``scale`` and ``low`` [out, inputs / GROUP].
    """
    group = step * (K // GROUP) + tl.arange(0, K // GROUP)
    row = n.to(tl.int64)[:, None]
    real = known[:, None] & (group[None, :] < inputs // GROUP)
    scales = tl.load(scale + row * (inputs // GROUP) + group[None, :], mask=real, other=0).to(tl.float32)[:, :, None]
    lows = tl.load(low + row * (inputs // GROUP) + group[None, :], mask=real, other=0).to(tl.float32)[:, :, None]
    # Three axes, so that a group's scale is loaded once and not for each of its inputs.
    at = (row * (inputs // 2) + (group * (GROUP // 2))[None, :])[:, :, None] + tl.arange(0, GROUP // 2)[None, None, :]
    both = tl.load(packed + at, mask=real[:, :, None], other=0)
    first = ((both & 15).to(tl.float32) * scales + lows).to(DOT)
    second = ((both >> 4).to(tl.float32) * scales + lows).to(DOT)
    return tl.trans(tl.reshape(first, (N, K // 2))), tl.trans(tl.reshape(second, (N, K // 2)))


@triton.jit
def product(
    x, m, valid, stride, weight, scale, low, n, known, inputs, begin, end,
    BITS: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, DOT: tl.constexpr
):  # fmt: skip
    """fp32 [M, N] of x[m] · W[n] over the blocks ``begin`` to ``end`` of K inputs; int8 weights are scaled after.

    Where DOT is int8 the sums are exact, in int32, and the scale of each row of x is left to the caller.
    """
    ACC: tl.constexpr = tl.int32 if tl.int8 == DOT else tl.float32
    sums = tl.zeros((M, N), ACC)
    for step in range(begin, end):
        if BITS == 4:
            first, second = packed_tile(weight, scale, low, n, step, known, inputs, GROUP, N, K, DOT)
            byte = tl.arange(0, K // 2)
            k = step * K + byte // (GROUP // 2) * GROUP + byte % (GROUP // 2)
            sums = tl.dot(rows_tile(x, m, k, stride, valid, inputs, DOT), first, sums, input_precision="ieee")
            other = rows_tile(x, m, k + GROUP // 2, stride, valid, inputs, DOT)
            sums = tl.dot(other, second, sums, input_precision="ieee")
        else:
            k = step * K + tl.arange(0, K)
            a = rows_tile(x, m, k, stride, valid, inputs, DOT)
            b = plain_tile(weight, n, k, known, inputs, DOT)
            sums = tl.dot(a, b, sums, input_precision="ieee", out_dtype=ACC)
    sums = sums.to(tl.float32)
    if BITS == 8:
        sums *= tl.load(scale + n, mask=known, other=0)[None, :]
    return sums
