"""Manifold-constrained hyper-connections (Xie et al., 2026): a block's input, and how its output will be written."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from autotune.runtimes.native.hyper import inverse_rms, rms


def hyper(
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
