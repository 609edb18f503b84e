"""Kimi delta attention in fp32: prefill by chunks, one-token decode over a recurrent state. Knows no cache layout."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from autotune.runtimes.native.hyper import rms

Small = Mapping[str, Tensor]
"""fp32 tensors of one layer: dt_bias [H·d], rate [H, 1], taps [K, 3·H·d], o_norm [d]."""
SUB = 16
"""Positions whose decays are factorised around their middle: 8 × the gate's bound of 5 keeps exp() far inside fp32."""


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


def step(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token of B sequences. q, k, v, log_decay [B, H, d], beta [B, H], state [B, H, d, d] (key by value).

    Returns output [B, H, d] and the new state: S ← diag(exp g) S + β k (v − kᵀ diag(exp g) S)ᵀ, o = q̂ᵀ S / √d.
    """
    q, k = unit(q) * q.shape[-1] ** -0.5, unit(k)
    state = state * log_decay.exp()[..., None]
    delta = (v - (k[:, :, None] @ state)[:, :, 0]) * beta[..., None]
    state = state + k[..., None] * delta[:, :, None]
    return (q[:, :, None] @ state)[:, :, 0], state


def decays(forget: Tensor, small: Small, bound: float) -> Tensor:
    """Log decay of each channel, between ``bound`` and 0, from the raw forget gate [T, H, d]."""
    return bound * torch.sigmoid(small["rate"] * (forget + small["dt_bias"].view(forget.shape[1:])))


def gated(out: Tensor, gate: Tensor, small: Small, eps: float) -> Tensor:
    """RMS-normed output [T, H, d] times the sigmoid of its raw gate."""
    return rms(out, eps) * small["o_norm"] * gate.sigmoid()


def decode(
    window: Tensor, forget: Tensor, beta: Tensor, gate: Tensor, state: Tensor, small: Small, bounds: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """All of a decode step between the projections: convolution, gates, delta rule, gated norm.

    ``window`` [B, K, 3·H·d] holds the convolution's last inputs, ``forget``, ``gate`` [B, H·d] and ``beta`` [B, H] are
    raw, ``bounds`` are the gate's lower bound and rms_norm_eps. Returns [B, H·d] and the new state [B, H, d, d].
    """
    shape = state.shape[:3]
    q, k, v = F.silu((window * small["taps"]).sum(1)).view(shape[0], 3, *shape[1:]).unbind(1)
    out, state = step(q, k, v, decays(forget.view(shape), small, bounds[0]), beta.sigmoid(), state)
    return gated(out, gate.view(shape), small, bounds[1]).flatten(1), state


def pairs(left: Tensor, right: Tensor, decay: Tensor, *, diagonal: int) -> Tensor:
    """A[i, j] = Σ_d left[i]·right[j]·exp(decay[i] − decay[j]) below the diagonal, for [N, C, d] inputs.

    Within a sub-block of 16 both exponents are taken from its middle; between sub-blocks from the start of the later
    one, where both are ≤ 0, so no chunk size can overflow.
    """
    n, length, _ = left.shape
    out = left.new_zeros(n, length, length)
    for start in range(0, length, SUB):
        part = slice(start, min(start + SUB, length))
        middle = decay[:, (start + part.stop) // 2, None]
        near = (left[:, part] * (decay[:, part] - middle).exp()) @ (right[:, part] * (middle - decay[:, part]).exp()).mT
        out[:, part, part] = near.tril(diagonal)
        if start:
            edge = decay[:, start - 1, None]
            far = right[:, :start] * (edge - decay[:, :start]).exp()
            out[:, part, :start] = (left[:, part] * (decay[:, part] - edge).exp()) @ far.mT
    return out


def prefill(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, chunk: int
) -> tuple[Tensor, list[Tensor]]:
    """T tokens of one sequence. q, k, v, log_decay [T, H, d], beta [T, H], state [H, d, d].

    Returns output [T, H, d] and the states after each chunk, the last one after the last token. One triangular solve
    for all chunks together (the WY form of the delta rule), then a scan over chunk states.
    """
    length, heads, size = q.shape
    count = -(-length // chunk)
    pad = count * chunk - length

    def chunks(x: Tensor) -> Tensor:
        """[T, H, n] → [count · H, chunk, n]; padding has β = 0 and no decay, and changes no state."""
        x = F.pad(x, (0, 0, 0, 0, 0, pad)).view(count, chunk, heads, -1)
        return x.transpose(1, 2).reshape(count * heads, chunk, -1)

    q, k, v = chunks(unit(q) * size**-0.5), chunks(unit(k)), chunks(v)
    decay, beta = chunks(log_decay).cumsum(1), chunks(beta[..., None])
    whole, last = decay.exp(), decay[:, -1:]
    scaled = k * beta
    mixing = pairs(scaled, k, decay, diagonal=-1)
    inside = pairs(q, k, decay, diagonal=0)
    solved = torch.linalg.solve_triangular(
        mixing, torch.cat([v * beta, scaled * whole], -1), upper=False, unitriangular=True
    )
    parts = (solved[..., :size], solved[..., size:], q * whole, (k * (last - decay).exp()).mT, inside, last.exp().mT)
    outputs, states = [], []
    for fresh, stale, query, rest, within, end in zip(
        *(part.view(count, heads, *part.shape[1:]) for part in parts), strict=True
    ):
        new = torch.baddbmm(fresh, stale, state, alpha=-1)
        outputs.append(torch.baddbmm(torch.bmm(within, new), query, state))
        state = torch.baddbmm(state * end, rest, new)
        states.append(state)
    return torch.stack(outputs).transpose(1, 2).reshape(count * chunk, heads, size)[:length], states
