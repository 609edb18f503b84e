"""Service level objectives: parsed from text such as ``ttft_p99<500ms``, and judged on stored requests.

Knows what a request count can prove; knows nothing of where the requests were kept.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from functools import lru_cache

from autotune.metrics import FAMILIES, METRICS, Timeline, observed, percentile
from autotune.stats import incomplete_beta, interval

RISK = 0.01
"""MLPerf's 1 − c: how likely a percentile that fails its limit may be to pass the early-stopping count."""
SCALES: Mapping[str, tuple[str, float]] = {
    "s": ("s", 1.0), "ms": ("s", 1e-3), "us": ("s", 1e-6), "µs": ("s", 1e-6), "min": ("s", 60.0), "h": ("s", 3600.0),
    "B": ("B", 1.0), "KiB": ("B", 2.0**10), "MiB": ("B", 2.0**20), "GiB": ("B", 2.0**30),
    "KB": ("B", 1e3), "MB": ("B", 1e6), "GB": ("B", 1e9), "%": ("1", 0.01),
}  # fmt: skip
_FORM = re.compile(r"\s*([A-Za-z_][\w.]*)\s*(<=|>=|<|>)\s*([0-9.eE+-]+)\s*([A-Za-zµ%/]*)\s*")
_PERCENTILE = re.compile(rf"({'|'.join(FAMILIES)})_p(\d+(?:\.\d+)?)")


class SloError(ValueError):
    """An SLO that cannot be understood; the message names what was wrong and what to write instead."""


class State(StrEnum):
    """What the requests say: ``unproven`` is inside the limit so far, on too few requests to claim it."""

    MET = "met"
    NOT_MET = "not met"
    UNPROVEN = "unproven"


@dataclass(frozen=True, slots=True)
class Slo:
    """One limit on one metric; ``below`` says whether the metric must stay below it. SI units."""

    metric: str
    below: bool
    limit: float
    text: str

    @property
    def percentile(self) -> tuple[str, float] | None:
        """(family, share) of a percentile over requests, such as ("ttft", 0.99); None for any other metric."""
        found = _PERCENTILE.fullmatch(self.metric)
        return (found[1], float(found[2]) / 100) if found else None

    def excess(self, value: float) -> float:
        """How far ``value`` is past the limit, relative to it; 0 or less inside."""
        if self.below:
            return value / self.limit - 1 if self.limit > 0 else value
        return self.limit / value - 1 if value > 0 else math.inf


@dataclass(frozen=True, slots=True)
class Run:
    """One measurement: its metrics and its requests."""

    metrics: Mapping[str, float]
    timelines: Sequence[Timeline]


@dataclass(frozen=True, slots=True)
class Finding:
    """An SLO judged: the measured ``value``, the requests behind it and how many were over the limit.

    ``needed``: the fewest requests that prove a percentile with that many over (0 where no count is asked for).
    """

    slo: Slo
    state: State
    value: float | None
    count: int
    over: int = 0
    needed: int = 0

    @property
    def violation(self) -> float:
        """Above 0 exactly when the SLO is not met, the more the further from its limit; at most 100."""
        if self.state is not State.NOT_MET:
            return 0.0
        excess = self.slo.excess(self.value) if self.value is not None else 1.0
        return min(max(excess, 1e-6), 100.0)

    def sentence(self) -> str:
        """Such as ``ttft_p99<500ms: unproven, 0 of 36 requests over; 459 would prove it``."""
        if self.value is None:
            return f"{self.slo.text}: {self.state}, never measured"
        if self.slo.percentile is None:
            return f"{self.slo.text}: {self.state}, measured {self.value:.4g}"
        more = f"; {self.needed} would prove it" if self.state is State.UNPROVEN else ""
        return f"{self.slo.text}: {self.state}, {self.over} of {self.count} over{more}"


def parse(text: str) -> Slo:
    """``metric<limit[unit]`` (or ``>``, ``<=``, ``>=``). Raises SloError."""
    found = _FORM.fullmatch(text)
    if found is None:
        raise SloError(f"SLO {text!r} is not of the form metric<limit, such as ttft_p99<500ms or output_tok_s>100")
    name, sign, digits, unit = found.groups()
    metric = _metric(name, text)
    try:
        number = float(digits)
    except ValueError:
        raise SloError(f"SLO {text!r}: {digits!r} is not a number") from None
    better = METRICS[metric].better if metric in METRICS else "lower"
    below = sign.startswith("<")
    if better and below != (better == "lower"):
        raise SloError(
            f"SLO {text!r}: {better} {metric} is better, so write {metric}{'<' if not below else '>'}{digits}"
        )
    kind = METRICS[metric].unit if metric in METRICS else "s"
    scale = 1.0
    if unit:
        means, scale = SCALES.get(unit, ("", 0.0))
        if means != kind and unit != kind:
            fits = ", ".join(u for u, (k, _) in SCALES.items() if k == kind) or kind
            raise SloError(f"SLO {text!r}: {metric} has no unit {unit!r}; write {fits}")
        scale = scale or 1.0
    limit = number * scale
    if not math.isfinite(limit) or limit < 0:
        raise SloError(f"SLO {text!r}: the limit must be a number of at least 0")
    return Slo(metric, below, limit, re.sub(r"\s+", "", text))


def _metric(name: str, text: str) -> str:
    found = _PERCENTILE.fullmatch(name)
    if found and not 0 < float(found[2]) < 100:
        raise SloError(f"SLO {text!r}: a percentile lies between 0 and 100, such as {found[1]}_p99")
    if found or name in METRICS:
        return name
    near = get_close_matches(name, METRICS, 1, 0.5)
    raise SloError(f"SLO {text!r}: unknown metric {name!r}; " + (
        f"did you mean {near[0]}?" if near else "metrics are such as ttft_p99, tpot_p90, e2e_p99, output_tok_s, kl_mean"
    ))  # fmt: skip


def proves(share: float, count: int, over: int) -> bool:
    """Whether ``count`` requests, ``over`` of them over the limit, prove that ``share`` of all stay within it.

    MLPerf's early stopping: I(share; count − over, over + 1) ≤ 0.01, which is how likely so few would be over if the
    share were no better than asked for.
    """
    return over < count and incomplete_beta(share, count - over, over + 1) <= RISK


@lru_cache(maxsize=4096)
def needed(share: float, over: int) -> int:
    """The fewest requests that prove ``share`` with ``over`` of them over the limit."""
    low, high = over, over + 1
    while not proves(share, high, over):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if proves(share, middle, over) else (middle, high)
    return high


def judge(slo: Slo, runs: Sequence[Run]) -> Finding:
    """An SLO against one configuration's runs, pooled.

    A percentile is judged on requests, a failed one counting as over the limit. Any other metric is judged on the
    mean over runs; where several runs' 95 % interval reaches across the limit it is unproven.
    """
    return _percentile(slo, runs) if slo.percentile else _mean(slo, runs)


def _percentile(slo: Slo, runs: Sequence[Run]) -> Finding:
    assert slo.percentile is not None
    family, share = slo.percentile
    values = [value for run in runs for value in observed(family, run.timelines)]
    failed = sum(_failed(family, run.timelines) for run in runs)
    if not values and not failed:
        known = [run.metrics[slo.metric] for run in runs if slo.metric in run.metrics]
        value = max(known, default=None)
        kept = value is None or slo.excess(value) <= 0
        return Finding(slo, State.UNPROVEN if kept else State.NOT_MET, value, 0, 0, needed(share, 0))
    over, count = sum(value > slo.limit for value in values) + failed, len(values) + failed
    measured = percentile([*values, *([math.inf] * failed)], 100 * share) if not failed else None
    if measured is None:
        measured = percentile(values, 100 * share) if values else None
    if over > (1 - share) * count + 1e-9:
        return Finding(slo, State.NOT_MET, measured, count, over, needed(share, over))
    state = State.MET if proves(share, count, over) else State.UNPROVEN
    return Finding(slo, state, measured, count, over, needed(share, over))


def _failed(family: str, timelines: Sequence[Timeline]) -> int:
    bad = [t for t in timelines if t.fault]
    return len({t.conversation for t in bad}) if family == "task" else len(bad)


def _mean(slo: Slo, runs: Sequence[Run]) -> Finding:
    values = [run.metrics[slo.metric] for run in runs if slo.metric in run.metrics]
    if not values:
        return Finding(slo, State.UNPROVEN, None, 0)
    found = interval(values)
    if slo.excess(found.mean) > 0:
        return Finding(slo, State.NOT_MET, found.mean, len(values))
    worst = found.high if slo.below else found.low
    proven = len(values) < 2 or slo.excess(worst) <= 0
    return Finding(slo, State.MET if proven else State.UNPROVEN, found.mean, len(values))


def summary(findings: Sequence[Finding]) -> str:
    """One word for several: not met before unproven before met; empty without any SLO."""
    states = {finding.state for finding in findings}
    return next((str(s) for s in (State.NOT_MET, State.UNPROVEN, State.MET) if s in states), "")
