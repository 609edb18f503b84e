"""Gathers the chosen latents of some queries at a time and attends over them."""

from __future__ import annotations

import torch
from torch import Tensor

from autotune.runtimes.native.kernels.absorbed.reference import attend
from autotune.runtimes.native.kernels.latents import Latents, Scope

ROWS = 64
"""Queries whose gathered latents are held at once."""


def sparse(query: Tensor, latents: Latents, scope: Scope, scale: float) -> Tensor:
    """`absorbed` for a scope with pools, reading nothing else."""
    slots, seen = gathered(latents, scope)
    rows = query.flatten(0, 1)[:, None]
    parts = [
        attend(rows[i : i + ROWS], latents.read(slots[i : i + ROWS]), seen[i : i + ROWS], scale)
        for i in range(0, len(rows), ROWS)
    ]
    return torch.cat(parts).view(query.shape)


def gathered(latents: Latents, scope: Scope) -> tuple[Tensor, Tensor]:
    """Slots [G · M, n] that each query may look at, and which of them are real [G · M, 1, n]."""
    tokens, seen = scope.tokens(latents.length)
    slots = latents.slots.gather(1, tokens.flatten(1)).view(tokens.shape)
    return slots.flatten(0, 1), seen.flatten(0, 1)[:, None]
