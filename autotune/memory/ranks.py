"""Adds up what each pipeline stage's ranks hold, and how many tokens of KV cache the fullest one leaves room for.

Knows no engine: `demands` says what an engine stores, `parts` what there is to store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from autotune.memory.parts import EXPERTS, WHOLE, Part
from autotune.runtimes.native.layout import partition

Stored = Callable[[Part, str], float]
"""Bytes a number of a part, whose weights belong to the layer named by the second argument, takes."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """``dp`` replicas of ``pp`` stages of ``tp`` ranks. Routed experts are split over ``experts`` ranks, the tokens of
    the KV cache over ``dcp``; the last stage has ``fewer`` layers than balance would give it."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    experts: int = 1
    dcp: int = 1
    fewer: int = 0

    @property
    def count(self) -> int:
        return self.tp * self.pp * self.dp

    def of(self, part: Part) -> int:
        """Ranks among which a part is split."""
        return 1 if part.split == WHOLE else self.experts if part.split == EXPERTS else self.tp


@dataclass(frozen=True, slots=True)
class Stage:
    """What each rank of one pipeline stage holds. ``kv``: bytes a cached token; ``state``: bytes a sequence's slot;
    ``groups``: bytes of weights by key of the bit vector, those of no group under ``""``."""

    weights: float
    kv: float
    state: float
    groups: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Slab:
    """One layer, or what stands at an end of the model: its parts and the cache bytes it needs on one rank."""

    name: str
    parts: tuple[Part, ...]
    kv: float = 0.0
    state: float = 0.0


def stages(front: Sequence[Slab], layers: Sequence[Slab], back: Sequence[Slab], ranks: Ranks, stored: Stored) \
        -> tuple[Stage, ...]:  # fmt: skip
    """The stages of one replica. Raises NotImplementedError where the layers do not go round."""
    sizes = [_bytes(slab, ranks, stored) for slab in layers]
    before, after = (sum(_bytes(slab, ranks, stored) for slab in ends) for ends in (front, back))
    cuts = list(partition(sizes, ranks.pp, before, after))
    if ranks.fewer and ranks.pp > 1:
        move = min(ranks.fewer, len(cuts[-1]) - 1)
        cuts[-2:] = [range(cuts[-2].start, cuts[-2].stop + move), range(cuts[-1].start + move, cuts[-1].stop)]
    found = []
    for index, cut in enumerate(cuts):
        held = [layers[i] for i in cut]
        held += front if index == 0 else ()
        held += back if index == len(cuts) - 1 else ()
        found.append(_stage(held, ranks, stored))
    return tuple(found)


def _stage(slabs: Sequence[Slab], ranks: Ranks, stored: Stored) -> Stage:
    groups: dict[str, float] = {}
    for slab in slabs:
        for part in slab.parts:
            key = f"{slab.name}.{part.group}" if slab.name and part.group else part.group
            groups[key] = groups.get(key, 0.0) + _part(slab, part, ranks, stored)
    kv, state = sum(slab.kv for slab in slabs), sum(slab.state for slab in slabs)
    return Stage(sum(groups.values()), kv, state, groups)


def _bytes(slab: Slab, ranks: Ranks, stored: Stored) -> float:
    return sum(_part(slab, part, ranks, stored) for part in slab.parts)


def _part(slab: Slab, part: Part, ranks: Ranks, stored: Stored) -> float:
    return part.weights * stored(part, slab.name) / ranks.of(part)


@dataclass(frozen=True, slots=True)
class Demand:
    """One configuration's memory. ``slots``: states that each stage's ranks keep; ``tokens``: KV tokens of a replica
    that the engine allocates, None where it takes what is left; ``graphs``, ``kept`` (checkpoints of states) and
    ``second`` (weights kept at a second width): bytes on each rank; ``features`` are what overhead is learned from."""

    ranks: Ranks
    stages: tuple[Stage, ...]
    slots: float
    tokens: int | None
    graphs: float = 0.0
    kept: float = 0.0
    second: float = 0.0
    features: Mapping[str, float] = field(default_factory=dict)

    @property
    def weights(self) -> float:
        """Bytes of weights on the rank that holds most of them."""
        return max(stage.weights for stage in self.stages)

    @property
    def cache(self) -> float:
        """Bytes of KV pool and states on the rank that holds most, without a pool where the engine fills what is
        left."""
        return max((self.tokens or 0) / self.ranks.dcp * s.kv + self.slots * s.state for s in self.stages)

    def rank(self, stage: Stage) -> float:
        """Bytes that are known on each rank of ``stage``, without overhead."""
        pool = (self.tokens or 0) / self.ranks.dcp * stage.kv
        return stage.weights + pool + self.slots * stage.state + self.graphs + self.kept + self.second

    def total(self) -> float:
        """Bytes that are known, all ranks together."""
        return sum(self.rank(stage) for stage in self.stages) * self.ranks.tp * self.ranks.dp

    def most(self) -> float:
        """Bytes that are known on the fullest rank."""
        return max(map(self.rank, self.stages))

    def room(self, device: float) -> float:
        """KV tokens of all replicas that fit devices of ``device`` usable bytes each; negative where nothing fits.

        Without latent attention a stage has no KV cache and bounds nothing.
        """
        left = [(device - self.rank(s) + (self.tokens or 0) / self.ranks.dcp * s.kv, s.kv) for s in self.stages]
        least = min(bytes_ for bytes_, _ in left)
        if least < 0:
            kv = max(s.kv for s in self.stages) or 1.0
            return least / kv
        bounds = [bytes_ / kv for bytes_, kv in left if kv > 0]
        return min(bounds, default=0.0) * self.ranks.dcp * self.ranks.dp
