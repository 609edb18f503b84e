"""Replays confirmations: the tuner's own rule (`autotune.race`, `autotune.stats`) on recorded or simulated blocks.

A problem is a search that measured some configurations once, then a race of its best ones against the default. Recorded
blocks are drawn with replacement, one block for all contenders, as interleaving would; the truth is the table's mean.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from tables import Codes, Table

from autotune import race, stats
from search_spaces import Config

MEASURED, FINALISTS, BLOCKS = 60, 8, 15
NOISE, DRIFT = 0.02, 0.015
"""Standard deviations of simulated noise and of its AR(1) drift, for tables of one value (search.md B4)."""

Draw = Callable[[Codes, int], float | None]
"""Goodness of a configuration in a block of a replay, None where it fails."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What one confirmation said. Shares of 1: ``regret`` to the best of what was measured, ``claim`` is the claimed
    over the true ratio to the default minus 1, ``gain`` the true ratio minus 1."""

    verdict: stats.Verdict
    regret: float
    claim: float
    gain: float
    runs: int


def recorded(table: Table, seed: int) -> Draw:
    """Blocks of the table, drawn with replacement; a block that failed gives nothing."""
    most = max(map(len, table.blocks.values()))
    picks = [random.Random(f"{seed}/{block}").randrange(most) for block in range(BLOCKS + 1)]

    def draw(codes: Codes, block: int) -> float | None:
        values = table.blocks[codes]
        if len(values) < most:
            return None
        return table.goodness(values[random.Random(f"{seed}/{codes}").randrange(most) if block == 0 else picks[block]])

    return draw


def simulated(table: Table, seed: int) -> Draw:
    """The table's value with NOISE, and in blocks of a race DRIFT from block to block that all contenders share."""
    source, drift, level = np.random.default_rng(seed), [0.0], 0.0
    for _ in range(BLOCKS):
        level = 0.9 * level + DRIFT * math.sqrt(1 - 0.9**2) * source.standard_normal()
        drift.append(level)

    def draw(codes: Codes, block: int) -> float | None:
        true = mean(table, codes)
        noise = NOISE * float(np.random.default_rng([seed, block, *codes]).standard_normal())
        return None if true is None else true + noise + drift[block]

    return draw


def mean(table: Table, codes: Codes) -> float | None:
    """Mean goodness over blocks; None for a configuration that failed."""
    values = [table.goodness(v) for v in table.blocks[codes]]
    return statistics.fmean(values) if values else None


def confirm(table: Table, seed: int, draw: Draw) -> Decision:
    """One problem: MEASURED random configurations and the default once, then the race."""
    source = random.Random(seed)
    listed = [codes for codes in table.blocks if draw(codes, 1) is not None and codes != table.default]
    tried = source.sample(listed, min(MEASURED, len(listed)))
    ranked = sorted(((value, c) for c in tried if (value := draw(c, 0)) is not None), reverse=True)
    finalists = race.enter([(value, table.config(c)) for value, c in ranked], FINALISTS)
    decision, runs = contest(table.config(table.default), finalists, lambda c, block: draw(table.codes(c), block))
    chosen = next(c for c in (table.default, *tried) if table.config(c).key == decision.config_key)
    true = {codes: mean(table, codes) or 0.0 for codes in (table.default, *tried)}
    gain = math.exp(true[chosen] - true[table.default])
    claimed = decision.ratio.mean if chosen != table.default else 1.0
    regret = 1 - math.exp(true[chosen] - max(true.values()))
    return Decision(decision.verdict, regret, claimed / gain - 1, gain - 1, runs)


def contest(
    default: Config, finalists: Sequence[Config], draw: Callable[[Config, int], float | None]
) -> tuple[stats.Winner, int]:
    """The race as the tuner runs it, and how many runs it took. Raises ValueError when every finalist failed."""
    values: dict[str, dict[int, float]] = {}
    named = {config.key: config for config in finalists}
    runs = 0
    for block in range(1, BLOCKS + 1):
        kept = race.alive(values, list(named), block)
        if block > race.LEAST and race.settled(values, default.key, kept, len(named)):
            break
        for config in (default, *(named[key] for key in kept)):
            value = draw(config, block)
            runs += 1
            if value is not None:
                values.setdefault(config.key, {})[block] = value
    raw = {key: {b: math.exp(v) for b, v in found.items()} for key, found in values.items()}
    winner = stats.decide(raw, default.key, True)
    if winner is None:
        raise ValueError("every finalist failed in every block of the race")
    return winner, runs


def rule(table: Table, problems: int, source: Callable[[Table, int], Draw]) -> dict[str, float]:
    """Means over ``problems`` races, in percent."""
    found = [confirm(table, seed, source(table, seed)) for seed in range(problems)]
    return {
        "problems": problems,
        "regret": 100 * statistics.fmean(d.regret for d in found),
        "claim_bias": 100 * statistics.fmean(d.claim for d in found),
        "claim_error": 100 * statistics.fmean(abs(d.claim) for d in found),
        "worse_than_default": sum(d.gain < 0 for d in found),
        "runs": statistics.fmean(d.runs for d in found),
    }


def pair(table: Table, replays: int, factor: float) -> Mapping[str, int]:
    """Verdicts on the default against a twin of it that is ``factor`` times as good, over noisy replays.

    Twin and default draw their blocks independently from the table's recorded ones (simulated where it has one).
    """
    counts = dict.fromkeys(map(str, stats.Verdict), 0)
    default, twin = Config({"twin": False}), Config({"twin": True})
    values = [table.goodness(v) for v in table.blocks[table.default]]
    for seed in range(replays):
        source = random.Random(seed)

        def draw(config: Config, block: int, source: random.Random = source) -> float:
            noise = source.gauss(0, NOISE) if len(values) == 1 else 0.0
            return source.choice(values) + noise + (math.log(factor) if config == twin else 0.0)

        winner, _ = contest(default, [twin], draw)
        counts[str(winner.verdict)] += 1
    return counts
