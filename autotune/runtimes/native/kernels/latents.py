"""What latent attention reads, rows behind a block table, and what each query may see of them. Computes no scores.

G sequences have M queries each: one sequence of many in prefill, many of one in a decode step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Latents:
    """Latents of G sequences in a shared pool of S tokens.

    ``rows`` [S, R] are fp32, bf16, fp16, or int8 with a bf16 ``scale`` [S, 1] (empty for other types).
    ``table`` [G, B] are the blocks of ``size`` tokens in order; ``slots`` [G, L] are the same places token by token,
    where L may exceed what a query sees. Entries beyond a sequence's end may be any valid block or slot.
    """

    rows: Tensor
    scale: Tensor
    table: Tensor
    size: int
    slots: Tensor

    @property
    def length(self) -> int:
        return self.slots.shape[1]

    def read(self, slots: Tensor) -> Tensor:
        """Latents at any shape of slots, in fp32."""
        found = self.rows[slots].float()
        return found * self.scale[slots] if self.rows.dtype is torch.int8 else found


@dataclass(frozen=True, slots=True)
class Scope:
    """What each query may look at: tokens up to its own position [G, M], and of those, if ``pools`` are given, only
    the chosen pools of ``kpool`` tokens and the unfinished pool at the end.

    ``pools`` [G, M, K] are pool numbers within the sequence and ``real`` [G, M, K] which of them are a choice; a pool
    that ends after the position is never real. Without them the scope is causal.
    """

    positions: Tensor
    kpool: int
    pools: Tensor | None = None
    real: Tensor | None = None

    def picked(self, length: int) -> Tensor:
        """[G, M, length // kpool]: which pools were chosen."""
        assert self.pools is not None and self.real is not None
        shape = (*self.positions.shape, length // self.kpool)
        return torch.zeros(shape, dtype=torch.bool, device=self.pools.device).scatter_(2, self.pools, self.real)

    def mask(self, length: int) -> Tensor:
        """[G, M, length]: True where a query may look."""
        tokens = torch.arange(length, device=self.positions.device)
        positions = self.positions[..., None]
        causal = tokens <= positions
        if self.pools is None:
            return causal
        picked = F.pad(self.picked(length).repeat_interleave(self.kpool, 2), (0, length % self.kpool))
        return causal & (picked | (tokens >= (positions + 1) // self.kpool * self.kpool))

    def tokens(self, length: int) -> tuple[Tensor, Tensor]:
        """The chosen tokens and those after the last complete pool, [G, M, (K + 1) · kpool − 1], and which are real."""
        assert self.pools is not None and self.real is not None
        inside = torch.arange(self.kpool, device=self.pools.device)
        tokens = (self.pools[..., None] * self.kpool + inside).flatten(2)
        tail = (self.positions[..., None] + 1) // self.kpool * self.kpool + inside[:-1]
        real = torch.cat([self.real.repeat_interleave(self.kpool, 2), tail <= self.positions[..., None]], 2)
        return torch.cat([tokens, tail], 2).clamp(max=length - 1), real
