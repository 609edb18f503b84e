"""The highest load that keeps the SLOs: doubled until one is missed, then bisected. Knows verdicts, no engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from autotune.slo import Finding, State

FINE = 0.1
"""Where the lowest load that failed is this much above the highest that did not, the answer is fine enough."""


@dataclass(frozen=True, slots=True)
class Step:
    """One load and what was found at it. ``reason`` says why nothing could be measured, empty where it could."""

    load: float
    findings: tuple[Finding, ...]
    reason: str = ""

    @property
    def kept(self) -> bool:
        """Whether no SLO was missed; on too few requests that is not yet proven, see `proven`."""
        return not self.reason and all(finding.state is not State.NOT_MET for finding in self.findings)

    @property
    def proven(self) -> bool:
        return not self.reason and all(finding.state is State.MET for finding in self.findings)


Measure = Callable[[float], Step]


def ladder(measure: Measure, start: float, most: int = 10, whole: bool = False) -> Iterator[Step]:
    """At most ``most`` steps from ``start`` on, upwards while the SLOs are kept and downwards while they are not.

    ``whole``: loads are whole numbers of 1 or more (concurrency), else any rate above 0. Ends when FINE is reached, or
    where the lowest whole load fails.
    """
    good, bad = 0.0, math.inf
    load = max(round(start), 1) if whole else start
    for _ in range(most):
        step = measure(load)
        yield step
        good, bad = (max(good, load), bad) if step.kept else (good, min(bad, load))
        between = math.sqrt(good * bad) if good and bad < math.inf else 2 * good if good else bad / 2
        following = round(between) if whole else between
        if following in (good, bad) or following == 0 or (good and bad <= good * (1 + FINE)):
            return
        load = following


def highest(steps: Sequence[Step]) -> Step | None:
    """The highest load at which no SLO was missed, below every load at which one was; None where there is none."""
    worst = min((step.load for step in steps if not step.kept), default=math.inf)
    return max((step for step in steps if step.kept and step.load < worst), key=lambda step: step.load, default=None)
