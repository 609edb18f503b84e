"""The parts of a decoder that differ when several ranks share it; each exchanges what one rank lacks.

Knows no process: ranks and their exchanges come in as a `Mesh`. A decoder on one rank has none of these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from autotune.runtimes.native.model import Decoder
from autotune.runtimes.native.moe import Grouped, MoE
from autotune.runtimes.native.quant.linear import Embedding, Linear

if TYPE_CHECKING:
    from autotune.runtimes.native.collectives import Mesh


class Summed:
    """A weight split by its inputs: each rank's product is a part of the sum."""

    def __init__(self, part: Linear, mesh: Mesh) -> None:
        self.part, self.mesh = part, mesh
        self.kernel, self.nbytes = part.kernel, part.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self.mesh.sum(self.part(x))

    def dense(self) -> Tensor:
        return self.part.dense()


class Gathered(Summed):
    """A weight split by its outputs, all of which every rank needs: [T, D] → [T, vocabulary]."""

    def __call__(self, x: Tensor) -> Tensor:
        return self.mesh.gather(self.part(x))


class SplitEmbedding:
    """The rows of the vocabulary from ``first`` on; other ranks add those of the other tokens."""

    def __init__(self, part: Embedding, first: int, mesh: Mesh) -> None:
        self.part, self.first, self.mesh = part, first, mesh
        self.bits, self.nbytes, self.size = part.bits, part.nbytes, part.size
        self.rows = len(part.weight)

    def __call__(self, ids: Tensor) -> Tensor:
        local = ids - self.first
        mine = (local >= 0) & (local < self.rows)
        return self.mesh.sum(self.part(local.clamp(0, self.rows - 1)) * mine[:, None])


class SummedMoE(MoE):
    """A part of every expert on each rank: one sum for routed and shared ones together."""

    mesh: Mesh

    @classmethod
    def of(cls, part: MoE, mesh: Mesh, first: int) -> SummedMoE:
        """``part`` with the sum that it needs; its experts are those from ``first`` on."""
        kind = ExpertParallelMoE if mesh.place.layout.ep > 1 else SummedMoE
        made = kind(part.router, part.bias, part.experts, part.shared, part.top_k, part.scaling)
        made.mesh, made.first = mesh, first
        return made

    def __call__(self, x: Tensor) -> Tensor:
        return self.mesh.sum(super().__call__(x))


class ExpertParallelMoE(SummedMoE):
    """Only some of the experts, those from ``first`` on; the router, on every rank, chooses among all of them."""

    def mix(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        if isinstance(self.experts, Grouped):
            return super().mix(x, chosen, weights)
        out = self.shared(x)
        mine = (chosen >= self.first) & (chosen < self.first + len(self.experts))
        if not mine.any():
            return out
        token, place = mine.nonzero(as_tuple=True)
        expert, weight = chosen[token, place] - self.first, weights[token, place]
        order = expert.argsort(stable=True)
        token = token[order]
        counts = torch.bincount(expert, minlength=len(self.experts)).tolist()
        shares = zip(self.experts, torch.split(x[token], counts), strict=True)
        routed = torch.cat([one(rows) for one, rows in shares if len(rows)])
        return out.index_add(0, token, routed * weight[order, None])


class StagedDecoder(Decoder):
    """One pipeline stage: streams come from the stage before and go to the one after; the last one's logits to all."""

    mesh: Mesh

    def join(self, mesh: Mesh, first: int) -> Self:
        """Its exchanges, and the number of its first layer in the whole."""
        self.mesh, self.start = mesh, first
        return self

    def _enter(self, ids: Tensor) -> Tensor:
        if self.mesh.place.first:
            return super()._enter(ids)
        return self.mesh.receive(len(ids), self.config.hc_mult, self.config.hidden_size)

    def _leave(self, streams: Tensor) -> Tensor:
        if self.mesh.place.last:
            return super()._leave(streams)
        self.mesh.forward(streams)
        return streams

    def _logits(self, hidden: Tensor) -> Tensor:
        if self.mesh.place.last:
            return self.mesh.from_last(super()._logits(hidden))
        return self.mesh.from_last(torch.empty(len(hidden), self.config.vocab_size))
