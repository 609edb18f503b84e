"""Packed products against dequantize-then-multiply over shapes, rows, widths, group sizes and activations."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from autotune.runtimes.native.quant.linear import Int8Token, Linear, make_linear

EPSILON = {"fp32": 2.0**-24, "bf16": 2.0**-8}
"""Largest relative error of one rounding."""


def activations(linear: Linear, x: Tensor) -> Tensor:
    """What the product really multiplies: ``x``, or its int8 rounding with one scale a tensor or a row."""
    if linear.kernel not in ("int8_both", "int8_token"):
        return x
    top = x.abs().amax() if linear.kernel == "int8_both" else x.abs().amax(1, keepdim=True)
    scale = top.clamp(min=1e-12) / 127
    return (x / scale).round() * scale


@given(
    rows=st.integers(1, 100),
    shape=st.tuples(st.sampled_from([1, 8, 24, 64, 96, 320]), st.sampled_from([16, 48, 64, 128, 160, 384])),
    bits=st.sampled_from([4, 8, 16]),
    group=st.sampled_from([32, 64, 128]), compute=st.sampled_from(["fp32", "bf16"]),
    kind=st.sampled_from(["weight_only", "int8_token", "int8_tensor"]), seed=st.integers(0, 2**31),
)  # fmt: skip
@settings(max_examples=300, deadline=None)
def test_a_product_is_dequantize_then_multiply(
    rows: int, shape: tuple[int, int], bits: int, group: int, compute: str, kind: str, seed: int
) -> None:
    source = torch.Generator().manual_seed(seed)
    weight, x = torch.randn(shape, generator=source), torch.randn(rows, shape[1], generator=source)
    x[:, 0] *= 50  # an outlier channel, as trained models have
    linear = make_linear(weight, bits, compute, group, kind)
    dense, used = linear.dense(), activations(linear, x)
    assert dense.shape == shape and dense.dtype == torch.float32
    wanted, found = used.double() @ dense.t().double(), linear(x)
    assert found.shape == (rows, shape[0]) and found.dtype == torch.float32
    # Few rows keep fp32; many may be rounded as the compute type rounds (weight, activation, result), the sum in fp32.
    # A 4-bit weight is scale·code + minimum, so its error goes with the row's largest weight.
    few = rows <= linear.few  # type: ignore[attr-defined]
    exact = few or compute == "fp32" or linear.kernel in ("int8_both", "int8_token")
    epsilon = EPSILON["fp32"] * 32 if exact else EPSILON["bf16"] * 4
    size = dense.abs().amax(1, keepdim=True).expand_as(dense) if linear.kernel == "int4" else dense.abs()
    bound = epsilon * (used.abs() @ size.t()) + 1e-6
    assert ((found - wanted).abs() <= bound).all()


@given(rows=st.integers(2, 20), seed=st.integers(0, 2**31))
@settings(max_examples=50, deadline=None)
def test_a_scale_a_token_makes_a_row_independent_of_the_others(rows: int, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    linear = Int8Token(torch.randn(32, 64, generator=source), "fp32")
    x = torch.randn(rows, 64, generator=source)
    alone = linear(x[:1])
    x[1:] *= 1000
    assert torch.equal(linear(x)[:1], alone)


@pytest.mark.parametrize("kind", ["int8_token", "int8_tensor"])
def test_rows_of_zeros_stay_zero(kind: str) -> None:
    assert not make_linear(torch.randn(32, 64), 8, "fp32", 64, kind)(torch.zeros(3, 64)).any()
