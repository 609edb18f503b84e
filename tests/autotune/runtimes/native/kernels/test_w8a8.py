"""Int8 weights and activations: the codes of the activations and the integer product, against their references."""

from __future__ import annotations

import pytest
import torch

from autotune.runtimes.native.kernels.blocks import Blocks
from autotune.runtimes.native.kernels.w8a8 import reference
from autotune.runtimes.native.kernels.w8a8 import triton as kernel
from autotune.runtimes.native.quant.codes import int8_codes

SUMS = {"rtol": 1e-5, "atol": 1e-4}
"""fp32 sums of a few hundred products, taken in another order."""


def case(rows: int, outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows * outputs + inputs)
    x = torch.randn(rows, inputs, generator=generator) * torch.logspace(-3, 3, rows)[:, None]
    return x, *int8_codes(torch.randn(outputs, inputs, generator=generator))


@pytest.mark.parametrize("rows, inputs", [(1, 16), (3, 100), (17, 257)])
def test_activations_get_the_reference_codes(rows: int, inputs: int) -> None:
    x, _, _ = case(rows, 4, inputs)
    x[0] = 0
    for values in (x, x.half(), torch.cat([x, x], 1)[:, 1 : inputs + 1]):
        codes, scales = kernel.quantize(values)
        expected, expected_scales = reference.quantize(values)
        assert torch.equal(codes, expected)
        torch.testing.assert_close(scales, expected_scales, rtol=1e-6, atol=0)


def test_halves_are_rounded_to_even() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5, 3.49]])
    assert kernel.quantize(x)[0].tolist() == [[127, 0, 2, 2, 0, -2, -126, 3]]


@pytest.mark.parametrize("outputs, inputs", [(64, 64), (100, 72), (33, 200)])
@pytest.mark.parametrize("rows", [1, 3, 17, 70])
def test_the_product_is_exact(rows: int, outputs: int, inputs: int) -> None:
    x, codes, scale = case(rows, outputs, inputs)
    quantized = kernel.quantize(x)
    torch.testing.assert_close(
        kernel.matmul(*quantized, codes, scale), reference.matmul(*quantized, codes, scale), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("blocks", [Blocks(16, 16, 32), Blocks(16, 32, 64, split=2), Blocks(32, 128, 32, split=8)])
def test_no_choice_of_blocks_changes_the_result(blocks: Blocks) -> None:
    x, codes, scale = case(5, 50, 176)
    quantized = reference.quantize(x)
    expected = reference.matmul(*quantized, codes, scale)
    torch.testing.assert_close(kernel.launch(blocks, quantized, codes, scale), expected, **SUMS)


def test_a_loud_token_leaves_the_others_alone() -> None:
    x, codes, scale = case(3, 40, 64)
    x = x / x.abs().amax(1, keepdim=True)
    loud = torch.cat([x, torch.full((1, 64), 1e6)])
    alone = kernel.matmul(*kernel.quantize(x), codes, scale)
    torch.testing.assert_close(kernel.matmul(*kernel.quantize(loud), codes, scale)[:3], alone, rtol=0, atol=0)
    exact = x @ (codes.float() * scale[:, None]).t()
    assert (alone - exact).norm() < 0.01 * exact.norm()
