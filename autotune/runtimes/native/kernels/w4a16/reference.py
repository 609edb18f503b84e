"""The definition of the product and of the packing, in plain torch: unpack, dequantize, multiply in fp32.

Packing: row-major, two inputs a byte. Byte j of a group of G inputs holds input j in its low half and input j + G/2 in
its high half, so that the halves of a tile of bytes are two tiles of contiguous inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor


def matmul(x: Tensor, packed: Tensor, scale: Tensor, low: Tensor, dot: torch.dtype) -> Tensor:
    """fp32 [rows, out] of ``x`` [rows, in], ``packed`` uint8 [out, in / 2], ``scale`` and ``low`` [out, in / group].

    Activations and dequantized weights are rounded to ``dot``.
    """
    return x.to(dot).float() @ dense(packed, scale, low).to(dot).float().t()


def dense(packed: Tensor, scale: Tensor, low: Tensor) -> Tensor:
    """The weight code·scale + low in fp32 [out, in]."""
    codes = unpack(packed, scale.shape[-1]).float()
    return (codes * scale.float()[..., None] + low.float()[..., None]).flatten(1)


def pack(codes: Tensor, groups: int) -> Tensor:
    """uint8 [out, in / 2] of codes [out, in] in 0 to 15."""
    first, second = codes.view(len(codes), groups, 2, -1).unbind(2)
    return (first | second << 4).flatten(1)


def unpack(packed: Tensor, groups: int) -> Tensor:
    """The codes [out, groups, group]."""
    halves = packed.view(len(packed), groups, -1)
    return torch.cat([halves & 15, halves >> 4], -1)
