"""What measured rows allow one to say: intervals, ratios, four verdicts, the winner of a confirmation."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

BAND = 0.02
"""Differences inside ±2 % are called equal: the spread between identical launches is of that size (search.md D5)."""


class Verdict(StrEnum):
    """How a candidate stands against the default."""

    BETTER = "better"
    WORSE = "worse"
    SAME = "same"
    UNCLEAR = "unclear"


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its confidence interval from ``n`` observations. With n < 2 the interval is unbounded."""

    mean: float
    low: float
    high: float
    n: int


@lru_cache(maxsize=256)
def t_quantile(p: float, df: int) -> float:
    """Student's t quantile for 0.5 < p < 1 by bisection on the integrated density (no SciPy needed); error < 1e-6."""
    if not 0.5 < p < 1 or df < 1:
        raise ValueError(f"t_quantile(p={p}, df={df}): wants 0.5 < p < 1 and df >= 1")
    scale = math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(df)

    def tail(t: float) -> float:
        # With x = sqrt(df) tan(a) the density is scale * sqrt(df)/sqrt(pi) * cos(a)^(df-1): smooth and bounded.
        start, steps = math.atan(t / math.sqrt(df)), 400
        width = (math.pi / 2 - start) / steps
        total = (
            sum((4 if i % 2 else 2) * math.cos(start + i * width) ** (df - 1) for i in range(1, steps))
            + math.cos(start) ** (df - 1)
            + (1.0 if df == 1 else 0.0)
        )
        return scale * math.sqrt(df / math.pi) * total * width / 3

    low, high = 0.0, 1e6
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if tail(middle) > 1 - p else (low, middle)
    return (low + high) / 2


def interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Mean and two-sided t interval of independent observations."""
    n = len(values)
    if n == 0:
        raise ValueError("an interval needs at least one value")
    mean = math.fsum(values) / n
    if n < 2:
        return Interval(mean, -math.inf, math.inf, n)
    spread = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1) / n)
    half = t_quantile(0.5 + confidence / 2, n - 1) * spread
    return Interval(mean, mean - half, mean + half, n)


def ratio(
    candidate: Mapping[int, float], default: Mapping[int, float], higher: bool, confidence: float = 0.95
) -> Interval | None:
    """How many times better ``candidate`` is than ``default``, paired by block: geometric mean and interval.

    Values are positive. Above 1 is better whichever way the metric points. None without a common block.
    """
    blocks = sorted(candidate.keys() & default.keys())
    if not blocks:
        return None
    sign = 1.0 if higher else -1.0
    logs = interval([sign * math.log(candidate[b] / default[b]) for b in blocks], confidence)
    return Interval(math.exp(logs.mean), math.exp(logs.low), _exp(logs.high), logs.n)


def verdict(found: Interval, band: float = BAND) -> Verdict:
    """Same when the interval lies inside the tie band; better or worse when it excludes 1 and its mean is outside.

    A mean inside the band is a tie, which goes to the default, however narrow the interval.
    """
    if found.low >= 1 / (1 + band) and found.high <= 1 + band:
        return Verdict.SAME
    if found.low > 1 and found.mean > 1 + band:
        return Verdict.BETTER
    if found.high < 1 and found.mean < 1 / (1 + band):
        return Verdict.WORSE
    return Verdict.UNCLEAR


def signed_rank(differences: Sequence[float]) -> float:
    """One-sided exact Wilcoxon signed-rank p-value that the differences tend to be above 0; zeros are dropped.

    Exact distribution by dynamic programming over doubled ranks (ties get mid-ranks). 1.0 with no difference left.
    """
    values = sorted((d for d in differences if d != 0), key=abs)
    if not values:
        return 1.0
    ranks: list[int] = []
    for value in values:
        first = next(i for i, other in enumerate(values) if abs(other) == abs(value))
        last = max(i for i, other in enumerate(values) if abs(other) == abs(value))
        ranks.append(first + last + 2)
    seen = sum(rank for rank, value in zip(ranks, values, strict=True) if value > 0)
    ways = {0: 1}
    for rank in ranks:
        for total, count in list(ways.items()):
            ways[total + rank] = ways.get(total + rank, 0) + count
    return float(sum(count for total, count in ways.items() if total >= seen) / 2 ** len(ranks))


def incomplete_beta(x: float, a: float, b: float) -> float:
    """The regularized incomplete beta function I_x(a, b) for 0 <= x <= 1 and a, b > 0; relative error < 1e-9.

    Continued fraction by Lentz's method (Abramowitz and Stegun 26.5.8), mirrored where it converges slowly.
    """
    if not 0 <= x <= 1 or a <= 0 or b <= 0:
        raise ValueError(f"incomplete_beta({x}, {a}, {b}): wants 0 <= x <= 1, a > 0 and b > 0")
    if x in (0.0, 1.0):
        return float(x)
    if x > (a + 1) / (a + b + 2):
        return 1 - incomplete_beta(1 - x, b, a)
    tiny = 1e-300
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    c, d = 1.0, 1 / _away(1 - (a + b) * x / (a + 1), tiny)
    total = d
    for m in range(1, 10_000):
        for step in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / _away(1 + step * d, tiny)
            c = _away(1 + step / c, tiny)
            total *= c * d
        if abs(c * d - 1) < 1e-12:
            break
    return front * total / a


def _away(value: float, tiny: float) -> float:
    """``value``, kept from being 0, which a later division could not take."""
    return value if abs(value) > tiny else tiny


@dataclass(frozen=True, slots=True)
class Standing:
    """One finalist of a confirmation: its ratio to the default over the blocks in which both ran."""

    config_key: str
    ratio: Interval
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Winner:
    """The decision of a confirmation. ``config_key`` is the default's when nothing proved better.

    ``standings`` are best first; ``runner`` is the best finalist even when it did not prove better.
    """

    config_key: str
    ratio: Interval
    verdict: Verdict
    standings: tuple[Standing, ...]


def decide(
    blocks: Mapping[str, Mapping[int, float]],
    default_key: str,
    higher: bool,
    band: float = BAND,
    barred: Collection[str] = (),
) -> Winner | None:
    """Decide from the values of confirming runs: {config key: {block: value}}, the default among them.

    Intervals are widened for the number of finalists (Bonferroni), because the best of several is picked from the
    same blocks. A configuration that is ``barred`` (it broke an SLO) never wins; where the default is, the best
    finalist does whatever its verdict. None when the default shares no block with any finalist, or all are barred.
    """
    default = blocks.get(default_key, {})
    finalists = {key: values for key, values in blocks.items() if key != default_key}
    confidence = 1 - 0.05 / max(len(finalists), 1)
    standings = []
    for key, values in finalists.items():
        found = ratio(values, default, higher, confidence)
        if found is not None:
            standings.append(Standing(key, found, verdict(found, band)))
    if not standings:
        return None
    most = max(s.ratio.n for s in standings)
    # One dropped early never wins on few blocks.
    standings.sort(key=lambda s: (s.config_key in barred, s.ratio.n < most, -s.ratio.mean))
    first = standings[0]
    if default_key in barred:
        if first.config_key in barred:
            return None
        return Winner(first.config_key, first.ratio, first.verdict, tuple(standings))
    wins = first.verdict is Verdict.BETTER and first.config_key not in barred
    return Winner(first.config_key if wins else default_key, first.ratio, first.verdict, tuple(standings))


def _exp(value: float) -> float:
    return math.inf if value > 700 else math.exp(value)
