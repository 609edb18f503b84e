"""What hyper-connections (see `kernels.hyper`) and the norms around them share, in fp32."""

from __future__ import annotations

import torch
from torch import Tensor


def rms(x: Tensor, eps: float) -> Tensor:
    """x divided by its root mean square over the last dimension."""
    return x * inverse_rms(x, eps)


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / √(mean of squares + eps), [..., 1]; the squares are never written to memory."""
    scale: Tensor = (torch.linalg.vecdot(x, x) / x.shape[-1] + eps).rsqrt()
    return scale[..., None]


def write(streams: Tensor, output: Tensor, post: Tensor, mix: Tensor) -> Tensor:
    """The block's ``output`` [T, D] spread over the mixed streams: [T, N, D]."""
    return torch.bmm(mix.mT, streams).addcmul_(post[:, :, None], output[:, None])
