"""The definition of the product, in plain torch: dequantize, then multiply in fp32."""

from __future__ import annotations

import torch
from torch import Tensor


def matmul(x: Tensor, codes: Tensor, scale: Tensor, dot: torch.dtype) -> Tensor:
    """fp32 [rows, out] of ``x`` [rows, in], ``codes`` int8 [out, in] and ``scale`` fp32 [out].

    ``dot`` is the type that the activations are rounded to.
    """
    return x.to(dot).float() @ dense(codes, scale).t()


def dense(codes: Tensor, scale: Tensor) -> Tensor:
    """The weight in fp32 [out, in]."""
    return codes.float() * scale[:, None]
