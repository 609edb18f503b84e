"""What "best" means for a study: one metric with its direction, or several taken together in equal parts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from autotune.metrics import METRICS

WORDS: Mapping[str, str] = {
    "latency": "e2e_p50",
    "throughput": "output_tok_s",
    "quality": "kl_mean",
    "memory": "peak_bytes",
    "cost": "device_s_per_ktok",
}
"""Plain words for the metric that stands for each aim."""
FLOORS: Mapping[str, float] = {"kl_mean": 1e-4}
"""Below this a lower value is no better: it is inside the error of its own measurement, and its logarithm is not."""


class ObjectiveError(ValueError):
    """An objective that cannot be optimized; the message names the nearest metric."""


@dataclass(frozen=True, slots=True)
class Objective:
    """One metric to improve, or several separated by commas (a word of `WORDS` stands for its metric).

    Several are made one number by the mean of their logarithms, each in its better direction: 10 % in one is worth
    10 % in another, whatever their units.
    """

    metric: str

    def __post_init__(self) -> None:
        names = [WORDS.get(name.strip(), name.strip()) for name in self.metric.split(",") if name.strip()]
        for name in names or [""]:
            _check(name)
        object.__setattr__(self, "metric", ",".join(dict.fromkeys(names)))

    @property
    def metrics(self) -> tuple[str, ...]:
        return tuple(self.metric.split(","))

    @property
    def higher(self) -> bool:
        return len(self.metrics) > 1 or METRICS[self.metric].better == "higher"

    def raw(self, metrics: Mapping[str, float]) -> float | None:
        """The metric's positive value, None where it was not measured. Of several: their joint figure."""
        if len(self.metrics) > 1:
            good = self.goodness(metrics)
            return math.exp(good) if good is not None else None
        return _positive(self.metric, metrics)

    def goodness(self, metrics: Mapping[str, float]) -> float | None:
        """Higher is better, on a log scale, so that ratios count alike at every size."""
        total = 0.0
        for name in self.metrics:
            value = _positive(name, metrics)
            if value is None:
                return None
            total += math.log(value) if METRICS[name].better == "higher" else -math.log(value)
        return total / len(self.metrics)

    def identity(self) -> dict[str, str]:
        return {"metric": self.metric, "better": "higher" if self.higher else "lower"}


def _check(name: str) -> None:
    if name not in METRICS:
        near = get_close_matches(name, [*METRICS, *WORDS], 1)
        raise ObjectiveError(
            f"unknown metric {name!r}"
            + (f"; did you mean {near[0]}?" if near else f"; one of {', '.join([*WORDS, *METRICS])}")
        )
    if not METRICS[name].better:
        raise ObjectiveError(f"metric {name} has no better direction; choose one that has, such as output_tok_s")


def _positive(name: str, metrics: Mapping[str, float]) -> float | None:
    value = metrics.get(name)
    if value is not None and name in FLOORS:
        value = max(value, FLOORS[name])
    return value if value is not None and value > 0 else None


def front(points: Mapping[str, Mapping[str, float]], names: tuple[str, ...]) -> list[str]:
    """The keys of the points that no other dominates (as good in all ``names`` and better in one), in given order.

    A point without one of the metrics is not on the front. Raises ObjectiveError for an unknown metric.
    """
    for name in names:
        _check(name)
    signs = {name: 1.0 if METRICS[name].better == "higher" else -1.0 for name in names}
    whole = {k: tuple(signs[n] * m[n] for n in names) for k, m in points.items() if all(n in m for n in names)}
    return [key for key, mine in whole.items() if not any(_dominates(other, mine) for other in whole.values())]


def _dominates(left: tuple[float, ...], right: tuple[float, ...]) -> bool:
    return left != right and all(a >= b for a, b in zip(left, right, strict=True))
