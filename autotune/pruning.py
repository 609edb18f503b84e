"""Whether a run under way can still win: its finished requests against the incumbent's on the same prompts.

Every rule bounds what the whole run could still reach, so nothing that could win is given up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from autotune.metrics import Timeline, observed, percentile
from autotune.stats import signed_rank

RATES = ("tasks_per_min", "output_tok_s", "total_tok_s", "requests_s")
MARGIN = 1.5
"""A run is given up only when the best it can still reach is this much worse than the incumbent. The incumbent is the
luckiest of many single launches, so a smaller margin would give up what a second launch shows to be its equal."""
OPTIMISM = 0.5
"""The rest of the work is granted at twice the incumbent's speed, so that a slow start may be made up for."""
ALPHA = 0.05
LEAST = 5
"""Requests before the first test: five pairs are the fewest that one-sided p < 0.05 can come of."""


class Watch(Protocol):
    """Sees every finished request of a run. ``bound`` is the best value that the objective could still have."""

    def add(self, timeline: Timeline) -> None: ...

    def done(self) -> bool: ...

    def reason(self) -> str: ...

    def bound(self) -> float: ...


class Hopeless:
    """Compares with ``incumbent``, all requests of the best run so far, whose ``metric`` is ``value``.

    For a rate: the time that the run took so far plus the optimistic rest, backed by a one-sided signed-rank test of
    the paired request times; or time alone once it exceeds the incumbent's whole run. For a latency: what is already
    over the limit decides the percentile or mean whatever comes.
    """

    def __init__(self, metric: str, value: float, incumbent: Sequence[Timeline], margin: float = MARGIN) -> None:
        self._metric, self._value, self._margin = metric, value, margin
        self._theirs = {(t.conversation, t.turn): t for t in incumbent if not t.fault}
        self._ends = sorted(t.token_times[-1] for t in self._theirs.values())
        self._mine: list[Timeline] = []
        self._worse = 1.0
        family, _, what = metric.rpartition("_")
        self._family, self._what = family, what
        self._total = len(observed(family, list(self._theirs.values()))) if metric not in RATES else 0

    @staticmethod
    def judges(metric: str) -> bool:
        """Whether partial samples bound this metric at all."""
        family, _, what = metric.rpartition("_")
        latency = family in ("ttft", "itl", "tpot", "e2e") and (what == "mean" or what.startswith("p"))
        return metric in RATES or latency

    def add(self, timeline: Timeline) -> None:
        if timeline.fault or not self._ends:
            return
        self._mine.append(timeline)
        self._worse = max(self._rate() if self._metric in RATES else self._latency(), self._worse)

    def done(self) -> bool:
        return self._worse > self._margin

    def bound(self) -> float:
        return self._value / self._worse if self._metric in RATES else self._value * self._worse

    def reason(self) -> str:
        return (
            f"hopeless after {len(self._mine)} of {len(self._theirs)} requests: "
            f"at best {self._worse:.2f} times worse than the best so far"
        )

    def _rate(self) -> float:
        """How many times longer than the incumbent's the whole run takes at best; 1 where that is not significant."""
        whole, elapsed = self._ends[-1], max(t.token_times[-1] for t in self._mine)
        if elapsed > self._margin * whole:
            return elapsed / whole
        count = min(len(self._mine), len(self._ends))
        pairs = [
            math.log(mine / theirs)
            for t in self._mine
            if (other := self._theirs.get((t.conversation, t.turn))) is not None
            and (mine := t.e2e or 0.0) > 0
            and (theirs := other.e2e or 0.0) > 0
        ]
        best = (elapsed + OPTIMISM * (whole - self._ends[count - 1])) / whole
        if len(pairs) < LEAST or best <= self._margin or signed_rank(pairs) >= ALPHA:
            return 1.0
        return best

    def _latency(self) -> float:
        """How many times the incumbent's value the final one is at least."""
        seen, limit = observed(self._family, self._mine), self._margin * self._value
        if self._what == "mean":
            return math.fsum(seen) / max(self._total, len(seen)) / self._value
        # As many zeros as observations are to come: the least that the percentile can end at.
        best = percentile([0.0] * max(self._total - len(seen), 0) + seen, float(self._what[1:]))
        return best / self._value if best > limit else 1.0
