"""How many bits each weight group gets under a byte budget: an exact knapsack, and switches judged by whole-model KL.

Knows no engine: costs come in, widths go out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Costs = Mapping[str, Mapping[int, tuple[float, float]]]
"""{group: {width: (bytes on each rank that holds it, KL in nats a token that it alone is predicted to cost)}}."""
Widths = dict[str, int]
Floats = NDArray[np.float64]
Measure = Callable[[Mapping[str, int]], Floats]
"""Whole-model KL of an allocation, a mean for each piece of the text: pieces are compared pair by pair."""
STATES = 50_000
"""Partial sums that are kept apart; beyond, bytes are rounded up to this many steps of the budget."""
RESAMPLES = 2000


def size(costs: Costs, widths: Mapping[str, int], stages: Mapping[str, int] | None = None) -> float:
    """Bytes on the rank that holds most. ``stages``: the pipeline stage of each group; without, there is one."""
    held: dict[int, float] = {}
    for group, width in widths.items():
        stage = stages[group] if stages else 0
        held[stage] = held.get(stage, 0.0) + costs[group][width][0]
    return max(held.values())


def predicted(costs: Costs, widths: Mapping[str, int]) -> float:
    """The sum of what each group alone costs, in nats a token."""
    return sum(costs[group][width][1] for group, width in widths.items())


def allocate(costs: Costs, budget: float, stages: Mapping[str, int] | None = None) -> Widths | None:
    """The widths of least predicted KL that put at most ``budget`` bytes on any rank; None where none fit.

    A stage's ranks hold its own groups alone, so each stage is a knapsack of its own. Each is solved exactly by dynamic
    programming over undominated partial sums (Nemhauser and Ullmann 1969) while these stay below STATES.
    """
    found: Widths = {}
    for stage in sorted(set(stages.values())) if stages else [0]:
        part = _knapsack({g: c for g, c in costs.items() if not stages or stages[g] == stage}, budget)
        if part is None:
            return None
        found |= part
    return {group: found[group] for group in costs}


def _knapsack(costs: Costs, budget: float) -> Widths | None:
    sums, total = np.zeros(1), np.zeros(1)
    trail: list[tuple[list[int], NDArray[np.intp], NDArray[np.intp]]] = []
    for choices in costs.values():
        widths = sorted(choices)
        sizes, kls = (np.array([choices[w][i] for w in widths]) for i in (0, 1))
        every_size, every_kl = (sums[:, None] + sizes).ravel(), (total[:, None] + kls).ravel()
        if len(every_size) > STATES:
            step = budget / STATES
            every_size = np.ceil(every_size / step - 1e-9) * step
        order = np.lexsort((every_kl, every_size))
        order = order[every_size[order] <= budget * (1 + 1e-12)]
        if not len(order):
            return None
        least = np.minimum.accumulate(every_kl[order])
        order = order[np.concatenate([[True], least[1:] < least[:-1]])]
        sums, total = every_size[order], every_kl[order]
        trail.append((widths, order // len(widths), order % len(widths)))
    at, found = int(np.argmin(total)), dict[str, int]()
    for group, (widths, before, choice) in zip(reversed(list(costs)), reversed(trail), strict=True):
        found[group] = widths[int(choice[at])]
        at = int(before[at])
    return {group: found[group] for group in costs}


@dataclass(frozen=True, slots=True)
class Refined:
    """``widths`` with the KL measured by piece, after ``evaluations`` whole-model measurements in all."""

    widths: Widths
    kl: Floats
    evaluations: int


def refine(
    costs: Costs, budget: float, measure: Measure, limit: int, stages: Mapping[str, int] | None = None
) -> Refined | None:
    """From the knapsack's answer, take every level switch that measures better, most promising first.

    Beside the switches stand the knapsack's answers with one group held at another width, since allocations far from
    each other can be predicted to cost nearly the same. Ends after ``limit`` measurements, or when no switch is better.
    None where nothing fits the budget.
    """
    start = allocate(costs, budget, stages)
    if start is None:
        return None
    known: dict[tuple[int, ...], Floats] = {}

    def kl(widths: Widths) -> Floats:
        key = tuple(widths.values())
        if key not in known:
            known[key] = measure(widths)
        return known[key]

    far = list(pinned(costs, start, budget, stages))
    now, here = start, kl(start)
    moved = True
    while moved and len(known) < limit:
        moved = False
        near = switches(costs, now, budget, stages)
        for other in sorted([*near, *far], key=lambda widths: predicted(costs, widths)):
            if len(known) >= limit:
                break
            if tuple(other.values()) not in known and better(here, kl(other)):
                now, here, moved = other, kl(other), True
                break
    return Refined(now, here, len(known))


def switches(
    costs: Costs, now: Mapping[str, int], budget: float, stages: Mapping[str, int] | None = None
) -> Iterator[Widths]:
    """Allocations within the budget in which one group is wider and at most two others are narrower than ``now``.

    Every change is one step.
    """
    up, down = ({g: w for g in costs if (w := _step(costs[g], now[g], by)) is not None} for by in (1, -1))
    found: dict[tuple[int, ...], Widths] = {}
    for group, width in up.items():
        for first in (None, *down):
            for second in (None, *down) if first is not None else (None,):
                narrower = {g: down[g] for g in (first, second) if g is not None and g != group}
                made = {**now, group: width, **narrower}
                if size(costs, made, stages) <= budget:
                    found.setdefault(tuple(made.values()), made)
    yield from found.values()


def pinned(
    costs: Costs, now: Mapping[str, int], budget: float, stages: Mapping[str, int] | None = None
) -> Iterator[Widths]:
    """The best allocations in which one group has a given width other than ``now``'s."""
    for group, choices in costs.items():
        for width in choices:
            held = allocate({**costs, group: {width: choices[width]}}, budget, stages) if width != now[group] else None
            if held is not None:
                yield held


def _step(choices: Mapping[int, Any], width: int, by: int) -> int | None:
    widths = sorted(choices)
    at = widths.index(width) + by
    return widths[at] if 0 <= at < len(widths) else None


def better(now: Floats, other: Floats) -> bool:
    """Whether ``other`` is lower: a paired bootstrap over pieces leaves 0 out of its 95 % interval (one: lower)."""
    change = other - now
    if len(change) < 2:
        return bool(change.mean() < 0)
    draws = np.random.default_rng(0).integers(0, len(change), (RESAMPLES, len(change)))
    return bool(np.quantile(change[draws].mean(1), 0.975) < 0)
