"""Int8 weights: the Triton kernel against dequantize-then-multiply."""

from __future__ import annotations

import pytest
import torch

from autotune.runtimes.native.kernels.blocks import Blocks
from autotune.runtimes.native.kernels.w8a16 import reference
from autotune.runtimes.native.kernels.w8a16 import triton as kernel
from autotune.runtimes.native.quant.codes import int8_codes

SUMS = {"rtol": 1e-5, "atol": 1e-4}
"""fp32 sums of a few hundred products, taken in another order."""


def case(rows: int, outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows * outputs + inputs)
    x = torch.randn(rows, inputs, generator=generator)
    return x, *int8_codes(torch.randn(outputs, inputs, generator=generator))


@pytest.mark.parametrize("dot", [torch.float32, torch.float16])
@pytest.mark.parametrize("outputs, inputs", [(64, 64), (100, 72), (33, 200), (1, 16)])
@pytest.mark.parametrize("rows", [1, 3, 17, 70])
def test_the_kernel_is_the_reference(rows: int, outputs: int, inputs: int, dot: torch.dtype) -> None:
    x, codes, scale = case(rows, outputs, inputs)
    torch.testing.assert_close(kernel.matmul(x, codes, scale, dot), reference.matmul(x, codes, scale, dot), **SUMS)


@pytest.mark.parametrize(
    "blocks", [Blocks(16, 16, 16), Blocks(16, 32, 64, split=2), Blocks(32, 128, 32, split=8), Blocks(64, 16, 256)]
)
def test_no_choice_of_blocks_changes_the_result(blocks: Blocks) -> None:
    x, codes, scale = case(5, 50, 176)
    expected = reference.matmul(x, codes, scale, torch.float32)
    torch.testing.assert_close(kernel.launch(blocks, x, codes, scale, torch.float32), expected, **SUMS)


def test_rows_may_be_a_slice_of_wider_ones_and_of_16_bits() -> None:
    x, codes, scale = case(4, 40, 96)
    wide = torch.cat([torch.full((4, 5), torch.nan), x, torch.full((4, 3), torch.nan)], 1)
    expected = reference.matmul(x, codes, scale, torch.float32)
    torch.testing.assert_close(kernel.matmul(wide[:, 5:101], codes, scale, torch.float32), expected, **SUMS)
    torch.testing.assert_close(kernel.matmul(x.t().contiguous().t(), codes, scale, torch.float32), expected, **SUMS)
    half = kernel.matmul(x.half(), codes, scale, torch.float16)
    torch.testing.assert_close(half, reference.matmul(x, codes, scale, torch.float16), **SUMS)


def test_the_reference_is_the_weight_within_half_a_step() -> None:
    weight = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    codes, scale = int8_codes(weight)
    assert ((reference.dense(codes, scale) - weight).abs() <= scale[:, None] * 0.5001).all()
