"""Scores and sums over whole latents, in fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from autotune.runtimes.native.kernels.latents import Latents, Scope


def absorbed(query: Tensor, latents: Latents, scope: Scope, scale: float) -> Tensor:
    """``query`` [G, M, H, R], already times W_uk → the weighted latents of each head, fp32 [G, M, H, R].

    o = softmax(scale · q Cᵀ) C over the latents C in the query's scope, which always has at least one token
    (the absorbed form of multi-head latent attention, DeepSeek-AI, 2024, "DeepSeek-V2").
    """
    return attend(query, latents.read(latents.slots), scope.mask(latents.length), scale)


def attend(query: Tensor, latent: Tensor, seen: Tensor, scale: float) -> Tensor:
    """The same for ``latent`` [G, L, R] and ``seen`` [G, M, L]."""
    scores = scored(query, latent, seen, scale)
    return (scores.softmax(-1).flatten(1, 2) @ latent).view(query.shape)


def scored(query: Tensor, latent: Tensor, seen: Tensor, scale: float) -> Tensor:
    """[G, M, H, L], −∞ where a query may not look."""
    groups, rows, heads, _ = query.shape
    scores = (query.flatten(1, 2) * scale) @ latent.mT
    return scores.view(groups, rows, heads, -1).masked_fill_(~seen[:, :, None], -torch.inf)
