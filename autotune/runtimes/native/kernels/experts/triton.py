"""Grouped products over tokens sorted by expert; the map from blocks to experts is made on the device.

Five launches whatever was chosen (seven where activations become int8), with sizes that follow from shapes alone, so
that a CUDA graph can capture them. Rows go to an expert in the order in which atomics happen to fall, but no row's
result depends on its place.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from autotune.runtimes.native.kernels.blocks import Blocks
from autotune.runtimes.native.kernels.experts.reference import Experts, Stack
from autotune.runtimes.native.kernels.tiles import TRITON, product
from autotune.runtimes.native.kernels.w8a8.triton import quantize

CHUNK = 64
"""Pairs of a token and an expert that one program of the routing kernels handles at once."""


@triton.jit
def count_kernel(
    chosen, starts, ends, cursor, pairs, E: tl.constexpr, PAD: tl.constexpr, M: tl.constexpr, C: tl.constexpr
):
    """starts [E + 1]: first row of each expert once sorted; ends [E]: blocks of M rows up to and with it."""
    counts = tl.zeros((PAD,), tl.int32)
    for begin in range(0, pairs, C):
        at = begin + tl.arange(0, C)
        expert = tl.load(chosen + at, mask=at < pairs, other=-1).to(tl.int32)
        counts += tl.histogram(expert, PAD, mask=(expert >= 0) & (expert < E))
    e = tl.arange(0, PAD)
    upto = tl.cumsum(counts)
    tl.store(starts, 0)
    tl.store(starts + 1 + e, upto, mask=e < E)
    tl.store(cursor + e, upto - counts, mask=e < E)
    tl.store(ends + e, tl.cumsum((counts + M - 1) // M), mask=e < E)


@triton.jit
def place_kernel(
    chosen, starts, ends, cursor, order, blocks, pairs, count,
    E: tl.constexpr, PAD: tl.constexpr, M: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """order [pairs]: the pair of each sorted row; blocks [3, count]: expert or −1, first row, row after the last."""
    at = tl.program_id(0) * C + tl.arange(0, C)
    expert = tl.load(chosen + at, mask=at < pairs, other=-1).to(tl.int32)
    real = (expert >= 0) & (expert < E)
    row = tl.atomic_add(cursor + expert, 1, mask=real)
    tl.store(order + row, at, mask=real)
    e = tl.arange(0, PAD)
    last = tl.load(ends + e, mask=e < E, other=2147483647)
    owner = tl.sum((last[None, :] <= at[:, None]).to(tl.int32), 1)
    used = (owner < E) & (at < count)
    before = tl.load(ends + owner - 1, mask=used & (owner > 0), other=0)
    first = tl.load(starts + owner, mask=used, other=0) + (at - before) * M
    tl.store(blocks + at, tl.where(used, owner, -1), mask=at < count)
    tl.store(blocks + count + at, first, mask=at < count)
    tl.store(blocks + 2 * count + at, tl.load(starts + owner + 1, mask=used, other=0), mask=at < count)


@triton.jit
def gate_up_kernel(
    x, rows_scale, weight, scale, low, order, blocks, out, count, inner, inputs, stride, limit,
    TOP: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, DOT: tl.constexpr
):  # fmt: skip
    """out [pairs, inner], sorted by expert: silu(min(gate, limit)) · clamp(up, ±limit)."""
    block = tl.program_id(1)
    expert = tl.load(blocks + block).to(tl.int64)
    if expert >= 0:
        row = tl.load(blocks + count + block) + tl.arange(0, M)
        valid = row < tl.load(blocks + 2 * count + block)
        token = tl.load(order + row, mask=valid, other=0) // TOP
        # N gates and their N ups side by side, so that one product makes both and the activations are read once.
        both = tl.arange(0, 2 * N)
        n = tl.program_id(0) * N + both % N
        known = n < inner
        n = (2 * expert + both // N) * inner + n
        end = tl.cdiv(inputs, K)
        sums = product(
            x, token, valid, stride, weight, scale, low, n, known, inputs, 0, end, BITS, GROUP, M, 2 * N, K, DOT
        )
        if tl.int8 == DOT:
            sums *= tl.load(rows_scale + token, mask=valid, other=0)[:, None]
        gate, up = tl.split(tl.trans(tl.reshape(sums, (M, 2, N)), (0, 2, 1)))
        gate = tl.minimum(gate, limit)
        made = gate * tl.sigmoid(gate) * tl.minimum(tl.maximum(up, -limit), limit)
        n = tl.program_id(0) * N + tl.arange(0, N)
        at = row.to(tl.int64)[:, None] * inner + n[None, :]
        tl.store(out + at, made.to(out.dtype.element_ty), mask=valid[:, None] & (n < inner)[None, :])


@triton.jit
def down_kernel(
    x, rows_scale, weight, scale, low, order, blocks, out, count, outputs, inputs,
    BITS: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, DOT: tl.constexpr
):  # fmt: skip
    """out [pairs, outputs] in fp32, back in the order of the pairs."""
    block = tl.program_id(1)
    expert = tl.load(blocks + block).to(tl.int64)
    if expert >= 0:
        row = tl.load(blocks + count + block) + tl.arange(0, M)
        valid = row < tl.load(blocks + 2 * count + block)
        n = tl.program_id(0) * N + tl.arange(0, N)
        known = n < outputs
        end = tl.cdiv(inputs, K)
        sums = product(
            x, row, valid, inputs, weight, scale, low, expert * outputs + n, known, inputs, 0, end,
            BITS, GROUP, M, N, K, DOT
        )  # fmt: skip
        if tl.int8 == DOT:
            sums *= tl.load(rows_scale + row, mask=valid, other=0)[:, None]
        pair = tl.load(order + row, mask=valid, other=0)
        at = pair.to(tl.int64)[:, None] * outputs + n[None, :]
        tl.store(out + at, sums, mask=valid[:, None] & known[None, :])


@triton.jit
def combine_kernel(made, chosen, weights, out, outputs, E: tl.constexpr, TOP: tl.constexpr, N: tl.constexpr):
    """out [T, outputs] fp32: the weighted sum over a token's experts, always in the order in which it chose them."""
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * N + tl.arange(0, N)
    sums = tl.zeros((N,), tl.float32)
    for place in range(TOP):
        pair = token * TOP + place
        expert = tl.load(chosen + pair)
        bound = tl.where((expert >= 0) & (expert < E), outputs, 0)
        part = tl.load(made + pair * outputs + n, mask=n < bound, other=0)
        sums += part * tl.load(weights + pair).to(tl.float32)
    tl.store(out + token * outputs + n, sums, mask=n < outputs)


def experts(x: Tensor, chosen: Tensor, weights: Tensor, of: Experts) -> Tensor:
    """See the reference."""
    rows = -(-chosen.numel() // len(of.gate_up.weight))
    return launch((default(rows, of.gate_up), default(rows, of.down)), x, chosen, weights, of)


def default(rows: int, stack: Stack) -> Blocks:
    """Blocks for about ``rows`` tokens an expert."""
    depth = max(64, stack.group)
    if rows > 32:
        return Blocks(64, 128, depth, 1, 8, 3)
    return Blocks(16, 64, max(128, depth), 1, 4, 3)


def launch(blocks: tuple[Blocks, Blocks], x: Tensor, chosen: Tensor, weights: Tensor, of: Experts) -> Tensor:
    """`experts` with blocks for gate and up (half of ``n`` each) and for down; both have the same ``m``."""
    first, second = blocks
    pairs, top, dot = chosen.numel(), chosen.shape[1], TRITON[of.dot]
    count_experts, hidden, inner = len(of.down.weight), of.down.weight.shape[1], of.gate_up.weight.shape[1] // 2
    x, scale = _activations(x, of.dot)
    chosen, weights = chosen.contiguous(), weights.contiguous()
    order, places = route(chosen, count_experts, first.m)
    count = places.shape[1]
    middle = x.new_empty(pairs, inner, dtype=torch.float32 if of.dot is torch.int8 else of.dot)
    gate_up_kernel[(-(-2 * inner // first.n), count)](
        x, scale, *_parts(of.gate_up), order, places, middle, count, inner, x.shape[1], x.stride(0), of.limit,
        TOP=top, BITS=of.gate_up.bits, GROUP=of.gate_up.group, DOT=dot,
        **first.sizes | {"N": first.n // 2}, **first.options,
    )  # fmt: skip
    middle, scale = _activations(middle, of.dot)
    made = x.new_empty(pairs, hidden, dtype=torch.float32)
    down_kernel[(-(-hidden // second.n), count)](
        middle, scale, *_parts(of.down), order, places, made, count, hidden, inner,
        BITS=of.down.bits, GROUP=of.down.group, DOT=dot, **second.sizes, **second.options,
    )  # fmt: skip
    out = x.new_empty(len(x), hidden, dtype=torch.float32)
    width = min(triton.next_power_of_2(hidden), 1024)
    combine_kernel[(len(x), -(-hidden // width))](made, chosen, weights, out, hidden, E=count_experts, TOP=top, N=width)
    return out


def route(chosen: Tensor, experts: int, rows: int) -> tuple[Tensor, Tensor]:
    """For pairs of a token and an expert, as ``chosen`` [T, k] lists them: ``order`` [pairs], the pair of each row
    once sorted by expert, and ``blocks`` [3, n], expert (−1: unused), first row and end of each block of ``rows``.

    n is the most that any choice can need.
    """
    pairs = chosen.numel()
    count = min(pairs, (pairs + experts * (rows - 1)) // rows)
    starts, ends, cursor = chosen.new_empty(3, experts + 1, dtype=torch.int32).unbind()
    order, blocks = chosen.new_empty(pairs, dtype=torch.int32), chosen.new_empty(3, count, dtype=torch.int32)
    sizes = {"E": experts, "PAD": triton.next_power_of_2(experts), "M": rows}
    count_kernel[(1,)](chosen, starts, ends, cursor, pairs, **sizes, C=16 * CHUNK)
    grid = (-(-pairs // CHUNK),)
    place_kernel[grid](chosen, starts, ends, cursor, order, blocks, pairs, count, **sizes, C=CHUNK)
    return order, blocks


def _activations(x: Tensor, dot: torch.dtype) -> tuple[Tensor, Tensor]:
    """What a product reads of ``x``, and the scales of its rows, which only int8 ones have."""
    if dot is torch.int8:
        return quantize(x)
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x, x


def _parts(stack: Stack) -> tuple[Tensor, Tensor, Tensor]:
    """Weight, scale and minimum; what a width lacks is never read."""
    scale = stack.weight if stack.scale is None else stack.scale
    return stack.weight, scale, scale if stack.low is None else stack.low


def specimens() -> list[tuple[Any, dict[str, str], dict[str, Any], dict[str, int]]]:
    """The model's own sizes: 288 experts of 2048, 8 a token, hidden 4096; decode and prefill blocks."""
    sixteen = dict.fromkeys(("inner", "inputs", "stride", "outputs"), "i32:16")
    routing = dict.fromkeys(("starts", "ends", "cursor", "order", "blocks"), "*i32") | {"chosen": "*i64"}
    common = (
        sixteen | routing | {"count": "i32", "pairs": "i32", "limit": "fp32", "low": "*bf16", "rows_scale": "*fp32"}
    )
    sizes = {"E": 288, "PAD": 512, "M": 16, "TOP": 8}
    found = [
        _specimen(count_kernel, common, sizes | {"C": 16 * CHUNK}, {}),
        _specimen(place_kernel, common, sizes | {"C": CHUNK}, {}),
        _specimen(
            combine_kernel, common | {"made": "*fp32", "weights": "*fp32", "out": "*fp32"}, sizes | {"N": 1024}, {}
        ),
    ]
    stacks = [
        (16, 0, tl.bfloat16, {"weight": "*bf16", "scale": "*bf16"}),
        (8, 0, tl.bfloat16, {"weight": "*i8", "scale": "*fp32"}),
        (8, 0, tl.int8, {"weight": "*i8", "scale": "*fp32"}),
        *((4, group, tl.bfloat16, {"weight": "*u8", "scale": "*bf16"}) for group in (32, 64, 128)),
    ]
    for bits, group, dot, types in stacks:
        for m, n, k, warps in ((16, 64, 128, 4), (64, 128, max(64, group), 8)):
            blocks = Blocks(m, n, k, 1, warps, 3)
            constants = sizes | blocks.sizes | {"BITS": bits, "GROUP": group, "DOT": dot}
            halved = constants | {"N": n // 2}
            x, middle = ("*i8", "*fp32") if dot is tl.int8 else ("*fp32", "*bf16")
            found.append(_specimen(gate_up_kernel, common | types | {"x": x, "out": middle}, halved, blocks.options))
            found.append(
                _specimen(
                    down_kernel,
                    common | types | {"x": "*i8" if dot is tl.int8 else middle, "out": "*fp32"},
                    constants,
                    blocks.options,
                )
            )
    return found


def _specimen(
    function: Any, types: dict[str, str], constants: dict[str, Any], options: dict[str, int]
) -> tuple[Any, dict[str, str], dict[str, Any], dict[str, int]]:
    names = function.arg_names
    return function, *({n: part[n] for n in names if n in part} for part in (types, constants)), options


SPECIMENS = specimens()
