"""Whether the machine can be trusted: the default against itself, its drift through a study, disturbed runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autotune import stats
from autotune.metrics import Timeline

WIDEST = 0.25
"""A tie band wider than this would call everything equal; the machine is too noisy to tune on."""


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """The default's second run against its first (A/A): ``band`` is the tie band from now on."""

    ratio: stats.Interval
    band: float

    def sentence(self) -> str:
        found = self.ratio
        text = f"A/A check of the default: ×{found.mean:.3f} [{found.low:.3f}, {found.high:.3f}] of itself"
        if self.band <= stats.BAND:
            return f"{text}, tie band {self.band:.0%}"
        return f"{text}: the interval leaves out 1, so differences up to {self.band:.1%} count as ties from now on"


def self_check(first: Sequence[Timeline], second: Sequence[Timeline]) -> SelfCheck | None:
    """Compare two runs of the default on the same prompts, request by request; None without two common requests.

    The tie band stays 2 % when the ratio's 95 % interval contains 1, else it widens to the ratio's far end.
    """
    mine = {(t.conversation, t.turn): t.e2e for t in second if not t.fault}
    pairs = [
        math.log(theirs / other)
        for t in first
        if not t.fault and (theirs := t.e2e or 0.0) > 0 and (other := mine.get((t.conversation, t.turn)) or 0.0) > 0
    ]
    if len(pairs) < 2:
        return None
    logs = stats.interval(pairs)
    found = stats.Interval(math.exp(logs.mean), math.exp(logs.low), math.exp(logs.high), logs.n)
    if found.low <= 1 + 1e-9 and found.high >= 1 - 1e-9:
        return SelfCheck(found, stats.BAND)
    far = max(found.high, 1 / found.low) - 1
    return SelfCheck(found, min(max(far, stats.BAND), WIDEST))


@dataclass(frozen=True, slots=True)
class Drift:
    """The default's goodness through a study: ``change`` is its last value over its first, ``spread`` the largest over
    the smallest, ``seconds`` from first to last of ``n`` readings."""

    change: float
    spread: float
    seconds: float
    n: int

    def sentence(self, band: float = stats.BAND) -> str:
        length = f"{self.seconds / 60:.0f} min" if self.seconds >= 120 else f"{self.seconds:.0f} s"
        text = f"the default went ×{self.change:.3f} over {length} ({self.n} readings, spread {self.spread - 1:.1%})"
        if self.spread - 1 <= 2 * band:
            return text
        return text + ": the machine drifts or is noisy; only interleaved confirmation compares fairly"


def drift(readings: Sequence[tuple[float, float]]) -> Drift | None:
    """From (Unix time, goodness) of each run of the default; None below two."""
    if len(readings) < 2:
        return None
    ordered = sorted(readings)
    values = [value for _, value in ordered]
    return Drift(
        math.exp(values[-1] - values[0]),
        math.exp(max(values) - min(values)),
        ordered[-1][0] - ordered[0][0],
        len(values),
    )
