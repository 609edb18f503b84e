"""Random caches of latents with ragged sequences in shuffled blocks, for the tests of latent attention."""

from __future__ import annotations

import torch
from torch import Tensor

from autotune.runtimes.native.kernels.latents import Latents, Scope

STORED = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.int8}


def cached(lengths: list[int], rank: int, stored: str = "fp32", size: int = 8) -> Latents:
    """One sequence for each length, in blocks of ``size`` tokens; slots that nobody owns hold NaN where they can."""
    source = torch.Generator().manual_seed(sum(lengths) + rank)
    longest = max(lengths)
    blocks = -(-longest // size)
    order = torch.randperm(blocks * len(lengths) + 1, generator=source)
    table = order[1:].view(len(lengths), blocks)
    rows = torch.randn(len(order) * size, rank, generator=source)
    scale = torch.empty(0, 1, dtype=torch.bfloat16)
    if stored == "int8":
        scale = (rows.abs().amax(1, keepdim=True) / 126).bfloat16()
        rows = (rows / scale).round()
    else:
        rows[order[0] * size : (order[0] + 1) * size] = torch.nan
    slots = (table[:, :, None] * size + torch.arange(size)).flatten(1)[:, :longest]
    return Latents(rows.to(STORED[stored]), scale, table, size, slots)


def scope(positions: list[list[int]], kpool: int = 4, choose: int = 0) -> Scope:
    """Causal, or with ``choose`` different pools of each query, some of which are beyond its position."""
    at = torch.tensor(positions)
    if not choose:
        return Scope(at, kpool)
    source = torch.Generator().manual_seed(int(at.sum()))
    pools = (int(at.max()) + 1) // kpool
    picks = torch.stack([torch.randperm(pools, generator=source)[:choose] for _ in range(at.numel())])
    picks = picks.view(*at.shape, -1)
    return Scope(at, kpool, picks, picks * kpool + kpool - 1 <= at[..., None])


def queries(where: Scope, heads: int, rank: int) -> Tensor:
    """[G, M, H, R]."""
    source = torch.Generator().manual_seed(heads * rank)
    return torch.randn(*where.positions.shape, heads, rank, generator=source)
