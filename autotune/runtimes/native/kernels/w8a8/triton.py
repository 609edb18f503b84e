"""The product on integer matrix units, and the activations' codes as a small kernel of their own."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from autotune.runtimes.native.kernels.blocks import Blocks, chosen, default
from autotune.runtimes.native.kernels.tiles import product

ROUNDER = tl.constexpr(12582912.0)
"""1.5 · 2^23: added to and taken from a small fp32 it leaves the integer nearest, halves to even."""


@triton.jit
def quantize_kernel(x, codes, scales, inputs, stride, K: tl.constexpr):
    row, k = tl.program_id(0).to(tl.int64), tl.arange(0, K)
    values = tl.load(x + row * stride + k, mask=k < inputs, other=0).to(tl.float32)
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(values)), 1e-12), 127.0)
    rounded = (tl.div_rn(values, scale) + ROUNDER) - ROUNDER
    tl.store(codes + row * inputs + k, rounded.to(tl.int8), mask=k < inputs)
    tl.store(scales + row, scale)


@triton.jit
def kernel(
    x,
    rows_scale,
    codes,
    scale,
    out,
    rows,
    outputs,
    inputs,
    SPLIT: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    m = tl.program_id(0) * M + tl.arange(0, M)
    n = tl.program_id(1) * N + tl.arange(0, N)
    part = tl.program_id(2)
    steps = tl.cdiv(inputs, K * SPLIT)
    valid, known = m < rows, n < outputs
    begin, end = part * steps, part * steps + steps
    sums = product(x, m, valid, inputs, codes, scale, scale, n, known, inputs, begin, end, 8, 0, M, N, K, tl.int8)
    sums *= tl.load(rows_scale + m, mask=valid, other=0)[:, None]
    at = (part * rows + m).to(tl.int64)[:, None] * outputs + n[None, :]
    tl.store(out + at, sums, mask=valid[:, None] & known[None, :])


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """See the reference."""
    rows, inputs = x.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    codes, scales = x.new_empty(rows, inputs, dtype=torch.int8), x.new_empty(rows, dtype=torch.float32)
    width = triton.next_power_of_2(inputs)
    quantize_kernel[(rows,)](x, codes, scales, inputs, x.stride(0), K=width, num_warps=_warps(width))
    return codes, scales


def matmul(x: Tensor, rows_scale: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """See the reference."""
    return launch(chosen("w8a8", "int8-int8", (len(x), len(codes), x.shape[1]), 32), (x, rows_scale), codes, scale)


def launch(blocks: Blocks, activations: tuple[Tensor, Tensor], codes: Tensor, scale: Tensor) -> Tensor:
    """`matmul` with these blocks, ``blocks.k`` at least 32. Split inputs are summed in order."""
    x, rows_scale = activations
    (rows, inputs), outputs = x.shape, len(codes)
    out = x.new_empty(blocks.split, rows, outputs, dtype=torch.float32)
    kernel[blocks.grid(rows, outputs)](
        x,
        rows_scale,
        codes,
        scale,
        out,
        rows,
        outputs,
        inputs,
        SPLIT=blocks.split,
        **blocks.sizes,
        **blocks.options,
    )
    return out[0] if blocks.split == 1 else out.sum(0)


def _warps(width: int) -> int:
    """Sixteen values a thread and more spill; fewer than four leave it idle."""
    return min(max(width // 512, 1), 16)


def specimen(rows: int) -> tuple[Any, dict[str, str], dict[str, Any], dict[str, int]]:
    """What compiles for the model's own sizes, all of them multiples of 16."""
    blocks = default(rows, 24576, 4096, 32)
    types = {"x": "*i8", "rows_scale": "*fp32", "codes": "*i8", "scale": "*fp32", "out": "*fp32"}
    sizes = {"rows": "i32", "outputs": "i32:16", "inputs": "i32:16"}
    return kernel, types | sizes, {"SPLIT": blocks.split} | blocks.sizes, blocks.options


def quantize_specimen(width: int) -> tuple[Any, dict[str, str], dict[str, Any], dict[str, int]]:
    types = {"x": "*fp32", "codes": "*i8", "scales": "*fp32", "inputs": "i32:16", "stride": "i32:16"}
    return quantize_kernel, types, {"K": width}, {"num_warps": _warps(width)}


SPECIMENS = [*map(specimen, (1, 32, 2048)), *map(quantize_specimen, (2048, 4096, 16384))]
