"""Two widths of one model by context length: which decoder computes a position. Knows no requests and no formats.

A position's width depends only on how many tokens lie before it, so what the cache holds for a prefix does not depend
on who computed it, when, or in which pieces: reuse, preemption and chunking stay exact.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from autotune.runtimes.native.capture import Steps
from autotune.runtimes.native.inspect import packed_parts
from autotune.runtimes.native.model import Decoder, Layer, Widths
from autotune.runtimes.native.moe import MoE
from autotune.runtimes.native.quant.linear import Linear
from search_spaces import Value
from search_spaces.bits import layer_groups


@dataclass(frozen=True, slots=True)
class Lengths:
    """``short`` computes the positions below ``start``, ``long`` (None: there is one width) those from there on."""

    short: Decoder
    long: Decoder | None = None
    start: int = 0

    @property
    def decoders(self) -> tuple[Decoder, ...]:
        return (self.short,) if self.long is None else (self.short, self.long)

    def at(self, position: int) -> Decoder:
        return self.short if self.long is None or position < self.start else self.long

    def pieces(self, start: int, count: int, rows: int = 1 << 30) -> Iterator[tuple[int, int]]:
        """(start, count) of consecutive pieces of at most ``rows`` positions, none of which needs two decoders."""
        end = start + count
        while start < end:
            stop = min(end, start + rows)
            if self.long is not None and start < self.start:
                stop = min(stop, self.start)
            yield start, stop - start
            start = stop

    def steps(self, make: Callable[[Decoder], Steps]) -> Steps | SplitSteps:
        """Decode steps over all decoders; ``make`` gives those of one."""
        return make(self.short) if self.long is None else SplitSteps(make(self.short), make(self.long), self.start)


class SplitSteps:
    """A decode step as two groups of sequences, each through its own decoder. See `capture.Steps`."""

    def __init__(self, short: Steps, long: Steps, start: int) -> None:
        self.short, self.long, self.start = short, long, start

    def __call__(self, rows: Tensor) -> Tensor:
        late = rows[:, 2] >= self.start
        if not late.any():
            return self.short(rows)
        if late.all():
            return self.long(rows)
        early = self.short(rows[~late])
        logits = early.new_empty(len(rows), early.shape[1])
        logits[~late] = early  # copied before the second group may reuse the memory
        logits[late] = self.long(rows[late])
        return logits

    def reset(self) -> None:
        self.short.reset()
        self.long.reset()

    def counters(self) -> dict[str, float]:
        other = self.long.counters()
        return {name: value + other[name] for name, value in self.short.counters().items()}


@dataclass(frozen=True, slots=True)
class Makers:
    """Build, at other widths, a layer by its number in the whole model, and the output projection."""

    layer: Callable[[Widths, int], Layer]
    head: Callable[[Widths], Linear]


def by_length(short: Decoder, widths: Widths, config: Mapping[str, Value], make: Makers) -> Lengths:
    """The decoders that ``bits_long`` asks for; ``short`` has been built at ``widths`` and has its pools."""
    if not config.get("bits_long"):
        return Lengths(short)
    return Lengths(short, widen(short, widths, int(config["bits_long"]), make), int(config["bits_long_from"]))


def widen(short: Decoder, widths: Widths, bits: int, make: Makers) -> Decoder:
    """A second decoder whose weights have at least ``bits``, over the same pools, embedding, norms and fp32 parts.

    Groups that have that width already are shared, not copied.
    """
    wide = replace(widths, bits={key: max(width, bits) for key, width in widths.bits.items()})
    config, layers = short.config, []
    for index, layer in enumerate(short.layers, short.start):
        groups = layer_groups(config.mlps[index])
        changed = {group for group in groups if _differs(f"{index}.{group}", widths, wide)}
        if changed:
            layer = _merged(layer, make.layer(wide, index), changed)
        layers.append(layer)
    return short.with_weights(layers, make.head(wide) if _differs("lm_head", widths, wide) else short.head)


def _differs(key: str, widths: Widths, wide: Widths) -> bool:
    return widths.bits[key] != wide.bits[key]


def _merged(old: Layer, new: Layer, changed: set[str]) -> Layer:
    """``old`` with the groups ``changed`` of ``new``; everything else is the same object."""
    attention, mlp = old.attention, old.mlp
    if "attention" in changed:
        attention = copy.copy(old.attention)
        attention.parts = old.attention.parts | {name: new.attention.parts[name] for name in packed_parts(attention)}
    if "dense" in changed:
        mlp = new.mlp
    elif changed != {"attention"}:
        assert isinstance(old.mlp, MoE) and isinstance(new.mlp, MoE)
        mlp = copy.copy(old.mlp)
        mlp.experts = (new.mlp if "experts" in changed else old.mlp).experts
        mlp.shared = (new.mlp if "shared" in changed else old.mlp).shared
    return Layer(attention, mlp, old.hc)
