"""The kernel of `absorbed` over the tokens of the chosen pools and the tail, found through the block table."""

from __future__ import annotations

from torch import Tensor

from autotune.runtimes.native.kernels.absorbed.triton import GATHER, TILES, default, launch, specimen
from autotune.runtimes.native.kernels.latents import Latents, Scope


def sparse(query: Tensor, latents: Latents, scope: Scope, scale: float) -> Tensor:
    """See the reference."""
    return launch(default(query, latents), query, latents, scope, scale, (GATHER, 1))[0][0]


SPECIMENS = [specimen(tile, GATHER, 1, stored) for stored, tile in TILES.items()]
