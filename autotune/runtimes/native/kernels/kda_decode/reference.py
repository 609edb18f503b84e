"""One token of each sequence through convolution, gates, delta rule and gated norm, in fp32."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from autotune.runtimes.native.kda import Small, decays, gated, unit


def kda_decode(
    projected: tuple[Tensor, Tensor, Tensor, Tensor],
    pool: tuple[Tensor, Tensor],
    slots: Tensor,
    small: Small,
    bounds: tuple[float, float],
    core: Callable[..., tuple[Tensor, Tensor]] | None = None,
) -> Tensor:
    """A decode step of one layer between its projections: [B, H·d], changing the pool in place.

    ``projected`` are qkv [B, 3·H·d], raw forget gate [B, H·d], raw β [B, H] and raw output gate [B, H·d]; ``pool`` the
    convolution's last inputs [S, K - 1, 3·H·d] and the recurrent states [S, H, d, d] (key by value, fp32 or bf16) of
    which ``slots`` [B] are used, each once; ``small`` and ``bounds`` are those of `step`, which ``core`` replaces.
    """
    (qkv, forget, beta, gate), (conv, states) = projected, pool
    window = torch.cat([conv[slots], qkv[:, None]], 1)
    conv[slots] = window[:, 1:]
    out, state = (core or step)(window, forget, beta, gate, states[slots].float(), small, bounds)
    states[slots] = state.to(states.dtype)
    return out


def step(
    window: Tensor, forget: Tensor, beta: Tensor, gate: Tensor, state: Tensor, small: Small, bounds: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """All of a decode step between the projections: convolution, gates, delta rule, gated norm.

    ``window`` [B, K, 3·H·d] holds the convolution's last inputs, ``forget``, ``gate`` [B, H·d] and ``beta`` [B, H] are
    raw, ``bounds`` are the gate's lower bound and rms_norm_eps. Returns [B, H·d] and the new state [B, H, d, d].
    """
    shape = state.shape[:3]
    q, k, v = F.silu((window * small["taps"]).sum(1)).view(shape[0], 3, *shape[1:]).unbind(1)
    out, state = delta_rule(q, k, v, decays(forget.view(shape), small, bounds[0]), beta.sigmoid(), state)
    return gated(out, gate.view(shape), small, bounds[1]).flatten(1), state


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of B sequences. q, k, v, log_decay [B, H, d], beta [B, H], state [B, H, d, d] (key by value).

    Returns output [B, H, d] and the new state: S ← diag(exp g) S + β k (v − kᵀ diag(exp g) S)ᵀ, o = q̂ᵀ S / √d.
    """
    q, k = unit(q) * q.shape[-1] ** -0.5, unit(k)
    state = state * log_decay.exp()[..., None]
    delta = (v - (k[:, :, None] @ state)[:, :, 0]) * beta[..., None]
    state = state + k[..., None] * delta[:, :, None]
    return (q[:, :, None] @ state)[:, :, 0], state
