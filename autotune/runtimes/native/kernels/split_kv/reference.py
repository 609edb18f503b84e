"""Attends over each part of the context alone, then merges; the parts could run at the same time."""

from __future__ import annotations

import torch
from torch import Tensor

from autotune.runtimes.native.kernels.absorbed.reference import scored
from autotune.runtimes.native.kernels.latents import Latents, Scope
from autotune.runtimes.native.kernels.sparse.reference import gathered


def split_kv(query: Tensor, latents: Latents, scope: Scope, scale: float, splits: int, gather: bool) -> Tensor:
    """`sparse` if ``gather``, else `absorbed`, of a decode step (M = 1), in up to ``splits`` parts of the tokens read.

    A part without a visible token has a log-sum-exp of −∞ and weighs nothing.
    """
    slots, seen = gathered(latents, scope) if gather else (latents.slots, scope.mask(latents.length))
    outs, totals = [], []
    for part, visible in zip(slots.chunk(splits, 1), seen.chunk(splits, 2), strict=True):
        latent = latents.read(part)
        scores = scored(query, latent, visible, scale)
        total = scores.logsumexp(-1, keepdim=True)
        weights = (scores - total).exp().nan_to_num(0.0)
        outs.append((weights.flatten(1, 2) @ latent).view(query.shape))
        totals.append(total)
    return merge(torch.stack(outs), torch.stack(totals))


def merge(outs: Tensor, totals: Tensor) -> Tensor:
    """One result of normalised parts [N, …, R] and their log-sum-exps [N, …, 1]."""
    return (totals.softmax(0) * outs).sum(0)
