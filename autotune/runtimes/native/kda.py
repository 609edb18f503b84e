"""The parts of Kimi delta attention that prefill and decode share, in fp32. Knows no state and no cache layout."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from autotune.runtimes.native.hyper import rms

Small = Mapping[str, Tensor]
"""fp32 tensors of one layer: dt_bias [H·d], rate [H, 1], taps [K, 3·H·d], o_norm [d]."""


def unit(x: Tensor) -> Tensor:
    """L2-normalised over the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def convolve(x: Tensor, before: Tensor, taps: Tensor) -> tuple[Tensor, Tensor]:
    """Causal depthwise convolution and SiLU of one sequence: ``x`` [T, C], ``before`` [K-1, C], ``taps`` [K, C].

    Returns [T, C] and the padded input [T + K - 1, C], whose last K-1 rows are the next ``before``.
    """
    padded = torch.cat([before, x])
    length, total = x.shape[0], padded[: x.shape[0]] * taps[0]
    for i in range(1, taps.shape[0]):
        total = torch.addcmul(total, padded[i : i + length], taps[i])
    return F.silu(total), padded


def decays(forget: Tensor, small: Small, bound: float) -> Tensor:
    """Log decay of each channel, between ``bound`` and 0, from the raw forget gate [T, H, d]."""
    return bound * torch.sigmoid(small["rate"] * (forget + small["dt_bias"].view(forget.shape[1:])))


def gated(out: Tensor, gate: Tensor, small: Small, eps: float) -> Tensor:
    """RMS-normed output [T, H, d] times the sigmoid of its raw gate."""
    return rms(out, eps) * small["o_norm"] * gate.sigmoid()
