"""4-bit weights: the packing, and the Triton kernel against dequantize-then-multiply."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.runtimes.native.kernels.blocks import Blocks
from autotune.runtimes.native.kernels.w4a16 import reference
from autotune.runtimes.native.kernels.w4a16 import triton as kernel
from autotune.runtimes.native.quant.codes import int4_codes

SUMS = {"rtol": 1e-5, "atol": 1e-4}
"""fp32 sums of a few hundred products, taken in another order."""
Case = tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]


def case(rows: int, outputs: int, inputs: int, group: int) -> Case:
    generator = torch.Generator().manual_seed(rows * outputs + inputs)
    x = torch.randn(rows, inputs, generator=generator)
    codes, scale, low = int4_codes(torch.randn(outputs, inputs, generator=generator), group)
    return x, reference.pack(codes, inputs // group), (scale, low)


@pytest.mark.parametrize("dot", [torch.float32, torch.float16])
@pytest.mark.parametrize("group, inputs", [(32, 32), (32, 224), (64, 192), (128, 384)])
@pytest.mark.parametrize("rows, outputs", [(1, 100), (3, 64), (17, 33), (70, 48)])
def test_the_kernel_is_the_reference(rows: int, outputs: int, group: int, inputs: int, dot: torch.dtype) -> None:
    x, packed, scales = case(rows, outputs, inputs, group)
    torch.testing.assert_close(
        kernel.matmul(x, packed, *scales, dot), reference.matmul(x, packed, *scales, dot), **SUMS
    )


@pytest.mark.parametrize(
    "blocks", [Blocks(16, 16, 32), Blocks(16, 32, 64, split=2), Blocks(32, 64, 128, split=4), Blocks(64, 16, 256)]
)
def test_no_choice_of_blocks_changes_the_result(blocks: Blocks) -> None:
    x, packed, scales = case(5, 50, 288, 32)
    expected = reference.matmul(x, packed, *scales, torch.float32)
    torch.testing.assert_close(kernel.launch(blocks, x, packed, scales, torch.float32), expected, **SUMS)


@settings(max_examples=30, deadline=None)
@given(outputs=st.integers(1, 5), groups=st.integers(1, 4), group=st.sampled_from([32, 64, 128]), seed=st.integers(0))
def test_packing_keeps_every_code_in_half_the_bytes(outputs: int, groups: int, group: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed % 2**32)
    codes = torch.randint(0, 16, (outputs, groups * group), generator=generator, dtype=torch.uint8)
    packed = reference.pack(codes, groups)
    assert packed.nbytes * 2 == codes.nbytes
    assert torch.equal(reference.unpack(packed, groups).flatten(1), codes)


def test_a_byte_holds_an_input_of_each_half_of_its_group() -> None:
    codes = torch.arange(64, dtype=torch.uint8)[None] % 16
    codes[0, 3], codes[0, 19], codes[0, 35] = 9, 12, 7  # inputs 3 and 19 of group 0, input 3 of group 1
    packed = reference.pack(codes, 2)
    assert packed[0, 3] == 9 | 12 << 4
    assert packed[0, 16 + 3] & 15 == 7


def test_the_reference_is_the_weight_within_a_step() -> None:
    weight = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    codes, scale, low = int4_codes(weight, 32)
    error = (reference.dense(reference.pack(codes, 2), scale, low) - weight).abs()
    # Half a step, and what rounding the minimum and the scale to bf16 may move the last code by.
    assert (error <= scale.float().repeat_interleave(32, 1) * 0.65).all()
