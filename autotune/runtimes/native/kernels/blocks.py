"""How a matrix product is cut into blocks on a GPU: as tuned for its shape, or by default. Knows no kernel."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from autotune.runtimes.native.kernels import tuning

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
MANY = 64
"""Rows beyond which activations are read so often that they are rounded to the type of the product once, before it."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Rows, outputs and inputs of a block, parts that the inputs are split into, warps and pipeline stages."""

    m: int
    n: int
    k: int
    split: int = 1
    warps: int = 4
    stages: int = 3

    def grid(self, rows: int, outputs: int) -> tuple[int, int, int]:
        """Rows vary fastest: neighbours read the same weights, and the activations stay in the L2 cache."""
        return -(-rows // self.m), -(-outputs // self.n), self.split

    @property
    def sizes(self) -> dict[str, int]:
        """What a kernel of this package is compiled with."""
        return {"M": self.m, "N": self.n, "K": self.k}

    @property
    def options(self) -> dict[str, int]:
        """What the Triton compiler is told."""
        return {"num_warps": self.warps, "num_stages": self.stages}


@cache
def processors() -> int:
    """Streaming multiprocessors of the current device; 1 where there is none, so that nothing is split."""
    if not torch.cuda.is_available():
        return 1
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)


def default(rows: int, outputs: int, inputs: int, step: int) -> Blocks:
    """Blocks for a product of ``rows``; the block of inputs is a multiple of ``step``.

    Few rows are bound by reading the weight: narrow blocks, and inputs split until every multiprocessor has two.
    """
    depth = -(-64 // step) * step
    if rows > MANY:
        return Blocks(128, 128 if depth <= 64 else 64, depth, 1, 8, 3)
    if rows > 16:
        return Blocks(64, 64, depth, 1, 4, 4)
    depth = max(128, depth)
    tiles, split = -(-outputs // 64), 1
    while tiles * split < 2 * processors() and inputs // (2 * split) >= 2 * depth:
        split *= 2
    return Blocks(16, 64, depth, split, 4, 4)


def chosen(op: str, dtype: str, sizes: tuple[int, int, int], step: int) -> Blocks:
    """The tuned blocks of a product of ``sizes`` (rows, outputs, inputs), else `default`'s; see `tuning.Operator`."""
    table, (rows, outputs, inputs) = tuning.current(), sizes
    if not table.entries:
        return default(rows, outputs, inputs, step)
    choice = table.find(tuning.Operator(op, dtype, outputs, inputs, tuning.bucket(rows)))
    return Blocks(**choice) if choice is not None else default(rows, outputs, inputs, step)  # type: ignore[arg-type]
