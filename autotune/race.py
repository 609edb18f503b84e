"""The race of a confirmation: which finalists enter, which are dropped, and when all is said. Measures nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from autotune import stats
from autotune.judge import Judge
from autotune.objective import Objective
from autotune.outcome import Status
from search_spaces import Config
from tuning_db import Trial

LEAST = 5
"""Blocks before anything is dropped or decided: five pairs are the fewest that one-sided p < 0.05 can come of."""
DROP = 0.05
SETTLED = 0.99
"""Confidence of the interval that ends a race early: it is looked at after every block, so 95 % would err too often."""
ALIKE = 3
"""Finalists that may lie within the tie band of each other and differ in one knob."""

Values = Mapping[str, Mapping[int, float]]
"""{configuration key: {block: goodness}}, on the log scale."""


def enter(ranked: Sequence[tuple[float, Config]], limit: int, band: float = stats.BAND) -> list[Config]:
    """Of ``ranked`` (best first), at most ``limit`` finalists and no more than ALIKE near-copies of one another."""
    chosen: list[tuple[float, Config]] = []
    for value, config in ranked:
        near = [c for v, c in chosen if abs(v - value) <= math.log1p(band) and differing(c, config) == 1]
        if len(near) < ALIKE:
            chosen.append((value, config))
        if len(chosen) == limit:
            break
    return [config for _, config in chosen]


def finalists(rows: Sequence[Trial], judge: Judge, limit: int) -> list[Config]:
    """The best feasible configurations of the search's ``rows``, best first; of those given up where none is left."""
    good = [(value, trial) for trial in rows if (value := judge.feasible(trial)) is not None]
    if not good:
        pruned = [trial for trial in rows if trial.status == Status.PRUNED]
        good = [(value, trial) for trial in pruned if (value := judge.goodness(trial)) is not None][:1]
    good.sort(key=lambda row: (-row[0], row[1].config_key))
    return enter([(value, Config(trial.config)) for value, trial in good], limit)


def differing(left: Config, right: Config) -> int:
    """In how many knobs two configurations differ."""
    return sum(left.get(name) != right.get(name) for name in {*left, *right})


def alive(values: Values, finalists: Sequence[str], block: int) -> list[str]:
    """The finalists still worth measuring in ``block``, by what the blocks before it say.

    From the sixth block on, those are dropped that failed a block or are worse than the leader in a one-sided paired
    Wilcoxon test, p < 0.05.
    """
    if block <= LEAST:
        return list(finalists)
    whole = [key for key in finalists if len(values.get(key, {})) == block - 1]
    if not whole:
        return []
    leader = max(whole, key=lambda key: math.fsum(values[key].values()))
    return [key for key in whole if key == leader or not _behind(values[key], values[leader])]


def _behind(mine: Mapping[int, float], leader: Mapping[int, float]) -> bool:
    return stats.signed_rank([leader[block] - value for block, value in mine.items() if block in leader]) < DROP


def settled(values: Values, default: str, kept: Sequence[str], entered: int, band: float = stats.BAND) -> bool:
    """Whether more blocks could not change what is deployed.

    So it is when the leader's verdict against the default is clear at 99 % (widened for ``entered`` finalists), and
    every other finalist left is the leader's equal inside the tie band.
    """
    if not kept:
        return True
    leader = max(kept, key=lambda key: math.fsum(values[key].values()))
    confidence = 1 - (1 - SETTLED) / max(entered, 1)
    against = _ratio(values[leader], values.get(default, {}), confidence)
    if against is None or against.n < LEAST or stats.verdict(against, band) is stats.Verdict.UNCLEAR:
        return False
    others = [_ratio(values[key], values[leader], confidence) for key in kept if key != leader]
    return all(other is not None and stats.verdict(other, band) is stats.Verdict.SAME for other in others)


def _ratio(left: Mapping[int, float], right: Mapping[int, float], confidence: float) -> stats.Interval | None:
    pairs = [{block: math.exp(value) for block, value in side.items()} for side in (left, right)]
    return stats.ratio(pairs[0], pairs[1], True, confidence)


def values(rows: Sequence[Trial], name: str, before: int, objective: Objective) -> dict[str, dict[int, float]]:
    """{config key: {block: goodness}} of the confirming ``rows`` of round ``name`` in blocks below ``before``."""
    found: dict[str, dict[int, float]] = {}
    for trial in rows:
        value = objective.goodness(trial.metrics)
        mine = trial.provenance.get("round") == name and trial.block < before and trial.status == Status.OK
        if mine and value is not None:
            found.setdefault(trial.config_key, {})[trial.block] = value
    return found
