"""The delta rule in WY form: one triangular solve for all chunks together, then a scan over their states, in fp32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from autotune.runtimes.native.kda import unit

SUB = 16
"""Positions whose decays are factorised around their middle: 8 × the gate's bound of 5 keeps exp() far inside fp32."""


def kda_prefill(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, chunk: int
) -> tuple[Tensor, list[Tensor]]:
    """T tokens of one sequence. q, k, v, log_decay [T, H, d], beta [T, H], state [H, d, d].

    Returns output [T, H, d] and the states after each chunk, the last one after the last token. One triangular solve
    for all chunks together (the WY form of the delta rule), then a scan over chunk states.
    """
    length, heads, size = q.shape
    count = -(-length // chunk)
    q, k, v, decay, beta = chunked(q, k, v, log_decay, beta, chunk)
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


def chunked(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, chunk: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Normed queries and keys, values, decays summed from the chunk's start, and β: [chunks · H, chunk, d or 1]."""
    length, heads, size = q.shape
    count = -(-length // chunk)

    def chunks(x: Tensor) -> Tensor:
        """[T, H, n] → [count · H, chunk, n]; padding has β = 0 and no decay, and changes no state."""
        x = F.pad(x, (0, 0, 0, 0, 0, count * chunk - length)).view(count, chunk, heads, -1)
        return x.transpose(1, 2).reshape(count * heads, chunk, -1)

    return (
        chunks(unit(q) * size**-0.5),
        chunks(unit(k)),
        chunks(v),
        chunks(log_decay).cumsum(1),
        chunks(beta[..., None]),
    )


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
