"""What 8 and 4 bits mean: how codes, scales and minima are chosen from a weight. Knows no kernel and no packing."""

from __future__ import annotations

import torch
from torch import Tensor


def int8_codes(weight: Tensor, peak: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Symmetric, one scale an output channel: codes int8 [out, in] and scales fp32 [out]; W ≈ code·scale.

    ``peak`` [out] are the largest magnitudes of whole rows, where ``weight`` holds only some of their inputs.
    """
    scale = (weight.abs().amax(1) if peak is None else peak).clamp(min=1e-12) / 127
    return (weight / scale[:, None]).round().clamp(-127, 127).to(torch.int8), scale


def int4_codes(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Asymmetric, in groups of inputs: codes uint8 [out, in] of 0 to 15, bf16 scales and minima [out, in / group].

    W ≈ code·scale + minimum; both are rounded to bf16 before the codes are chosen.
    """
    out, inputs = weight.shape
    grouped = weight.view(out, inputs // group, group)
    low = grouped.amin(-1).bfloat16()
    scale = ((grouped.amax(-1) - low.float()).clamp(min=1e-8) / 15).bfloat16()
    codes = ((grouped - low.float()[..., None]) / scale.float()[..., None]).round().clamp(0, 15).to(torch.uint8)
    return codes.view(out, inputs), scale, low
