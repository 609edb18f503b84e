"""The product as a Triton kernel: one tile of bytes becomes two tiles of weights and two products."""

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
    packed,
    scale,
    low,
    out,
    rows,
    outputs,
    inputs,
    stride,
    GROUP: tl.constexpr,
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
    begin, end = part * steps, part * steps + steps
    valid, known = m < rows, n < outputs
    sums = product(x, m, valid, stride, packed, scale, low, n, known, inputs, begin, end, 4, GROUP, M, N, K, DOT)
    at = (part * rows + m).to(tl.int64)[:, None] * outputs + n[None, :]
    tl.store(out + at, sums, mask=valid[:, None] & known[None, :])


def matmul(x: Tensor, packed: Tensor, scale: Tensor, low: Tensor, dot: torch.dtype) -> Tensor:
    """See the reference."""
    group = x.shape[1] // scale.shape[1]
    sizes = (len(x), len(packed), x.shape[1])
    return launch(chosen("w4a16", f"int4g{group}-{NAMES[dot]}", sizes, group), x, packed, (scale, low), dot)


def launch(blocks: Blocks, x: Tensor, packed: Tensor, scales: tuple[Tensor, Tensor], dot: torch.dtype) -> Tensor:
    """`matmul` with these blocks; ``blocks.k`` is a multiple of the group. Split inputs are summed in order."""
    (rows, inputs), outputs, group = x.shape, len(packed), x.shape[1] // scales[0].shape[1]
    x = x.to(dot) if rows > MANY else x
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = x.new_empty(blocks.split, rows, outputs, dtype=torch.float32)
    kernel[blocks.grid(rows, outputs)](
        x,
        packed,
        *scales,
        out,
        rows,
        outputs,
        inputs,
        x.stride(0),
        GROUP=group,
        SPLIT=blocks.split,
        DOT=TRITON[dot],
        **blocks.sizes,
        **blocks.options,
    )
    return out[0] if blocks.split == 1 else out.sum(0)


def specimen(rows: int, group: int) -> tuple[Any, dict[str, str], dict[str, Any], dict[str, int]]:
    """What compiles for the model's own sizes, all of them multiples of 16, with fp32 activations from outside."""
    blocks = default(rows, 24576, 4096, group)
    sizes = {"rows": "i32"} | dict.fromkeys(("outputs", "inputs", "stride"), "i32:16")
    types = {
        "x": "*bf16" if rows > MANY else "*fp32",
        "packed": "*u8",
        "scale": "*bf16",
        "low": "*bf16",
        "out": "*fp32",
    } | sizes
    return kernel, types, {"GROUP": group, "SPLIT": blocks.split, "DOT": tl.bfloat16} | blocks.sizes, blocks.options


SPECIMENS = [specimen(rows, group) for rows in (1, 32, 2048) for group in (32, 64, 128)]
