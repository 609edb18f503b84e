"""Manifold-constrained hyper-connections (Xie et al., 2026) in fp32: how a block reads and writes its streams."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms(x: Tensor, eps: float) -> Tensor:
    """x divided by its root mean square over the last dimension."""
    return x * inverse_rms(x, eps)


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / √(mean of squares + eps), [..., 1]; the squares are never written to memory."""
    scale: Tensor = (torch.linalg.vecdot(x, x) / x.shape[-1] + eps).rsqrt()
    return scale[..., None]


def read(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm: Tensor, sizes: tuple[int, float, float]
) -> tuple[Tensor, Tensor, Tensor]:
    """``streams`` [T, N, D] → block input [T, D] (normed), write weights [T, N], doubly stochastic mix [T, N, N].

    ``fn`` [(2 + N)·N, N·D]; ``scale`` [(2 + N)·N], already spread over its three parts; ``sizes`` are the Sinkhorn
    iterations, hc_eps and rms_norm_eps. Cast none of it down: bf16 here gives garbage.
    """
    iterations, eps, norm_eps = sizes
    count = streams.shape[1]
    flat = streams.flatten(1)
    mixed = F.linear(flat, fn) * inverse_rms(flat, norm_eps)
    mixed = torch.addcmul(base, mixed, scale)
    gates = torch.sigmoid(mixed[:, : 2 * count])
    pre, post = gates[:, :count] + eps, 2 * gates[:, count:]
    mix = torch.softmax(mixed[:, 2 * count :].view(-1, count, count), -1) + eps
    mix = mix / (mix.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        mix = mix / (mix.sum(-1, keepdim=True) + eps)
        mix = mix / (mix.sum(-2, keepdim=True) + eps)
    collapsed = torch.bmm(pre[:, None], streams)[:, 0]
    return rms(collapsed, norm_eps) * norm, post, mix


def write(streams: Tensor, output: Tensor, post: Tensor, mix: Tensor) -> Tensor:
    """The block's ``output`` [T, D] spread over the mixed streams: [T, N, D]."""
    return torch.bmm(mix.mT, streams).addcmul_(post[:, :, None], output[:, None])
