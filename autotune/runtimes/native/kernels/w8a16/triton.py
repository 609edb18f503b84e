"""The product as a Triton kernel: int8 tiles become 16 bits in registers, the scale is applied to the result."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from autotune.runtimes.native.kernels.blocks import MANY, NAMES, Blocks, chosen, default
from autotune.runtimes.native.kernels.tiles import TRITON, product


@triton.jit
def kernel(
    x,
    codes,
    scale,
    out,
    rows,
    outputs,
    inputs,
    stride,
    SPLIT: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    DOT: tl.constexpr,
):
    m = tl.program_id(0) * M + tl.arange(0, M)
    n = tl.program_id(1) * N + tl.arange(0, N)
    part = tl.program_id(2)
    steps = tl.cdiv(inputs, K * SPLIT)
    begin = part * steps
    valid, known = m < rows, n < outputs
    sums = product(x, m, valid, stride, codes, scale, scale, n, known, inputs, begin, begin + steps, 8, 0, M, N, K, DOT)
    at = (part * rows + m).to(tl.int64)[:, None] * outputs + n[None, :]
    tl.store(out + at, sums, mask=valid[:, None] & known[None, :])


def matmul(x: Tensor, codes: Tensor, scale: Tensor, dot: torch.dtype) -> Tensor:
    """See the reference."""
    sizes = (len(x), len(codes), x.shape[1])
    return launch(chosen("w8a16", f"int8-{NAMES[dot]}", sizes, 16), x, codes, scale, dot)


def launch(blocks: Blocks, x: Tensor, codes: Tensor, scale: Tensor, dot: torch.dtype) -> Tensor:
    """`matmul` with these blocks. The parts of split inputs are summed in order: the same bits at every run."""
    (rows, inputs), outputs = x.shape, len(codes)
    x = x.to(dot) if rows > MANY else x
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = x.new_empty(blocks.split, rows, outputs, dtype=torch.float32)
    kernel[blocks.grid(rows, outputs)](
        x,
        codes,
        scale,
        out,
        rows,
        outputs,
        inputs,
        x.stride(0),
        SPLIT=blocks.split,
        DOT=TRITON[dot],
        **blocks.sizes,
        **blocks.options,
    )
    return out[0] if blocks.split == 1 else out.sum(0)


def specimen(rows: int) -> tuple[Any, dict[str, str], dict[str, Any], dict[str, int]]:
    """What compiles for the model's own sizes, all of them multiples of 16, with fp32 activations from outside."""
    blocks = default(rows, 24576, 4096, 16)
    sizes = dict.fromkeys(("rows",), "i32") | dict.fromkeys(("outputs", "inputs", "stride"), "i32:16")
    types = {"x": "*bf16" if rows > MANY else "*fp32", "codes": "*i8", "scale": "*fp32", "out": "*fp32"} | sizes
    return kernel, types, {"SPLIT": blocks.split, "DOT": tl.bfloat16} | blocks.sizes, blocks.options


SPECIMENS = [specimen(rows) for rows in (1, 32, 2048)]
