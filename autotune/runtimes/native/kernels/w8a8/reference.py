"""The definition of the product and of the activations' codes, in plain torch; integers, so that it is exact."""

from __future__ import annotations

from torch import Tensor


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes int8 [rows, in] and one fp32 scale a row, of ``x`` [rows, in]: symmetric, rounded half to even."""
    scale = x.float().abs().amax(1).clamp(min=1e-12) / 127
    return (x.float() / scale[:, None]).round().char(), scale


def matmul(x: Tensor, rows_scale: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """fp32 [rows, out] of int8 ``x`` [rows, in] with a scale a row, and int8 ``codes`` [out, in] with one an output."""
    # fp64 holds every sum of int8 products exactly; torch has no general integer product on all devices.
    sums = x.double() @ codes.double().t()
    return sums.float() * rows_scale[:, None] * scale
