"""What "best" means for a study: one metric with its direction, taken from the metric's own declaration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from autotune.metrics import METRICS


class ObjectiveError(ValueError):
    """An objective that cannot be optimized; the message names the nearest metric."""


@dataclass(frozen=True, slots=True)
class Objective:
    """One metric to improve."""

    metric: str

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            near = get_close_matches(self.metric, METRICS, 1)
            raise ObjectiveError(
                f"unknown metric {self.metric!r}"
                + (f"; did you mean {near[0]}?" if near else f"; one of {', '.join(METRICS)}")
            )
        if not METRICS[self.metric].better:
            raise ObjectiveError(
                f"metric {self.metric} has no better direction; choose one that has, such as output_tok_s"
            )

    @property
    def higher(self) -> bool:
        return METRICS[self.metric].better == "higher"

    def raw(self, metrics: Mapping[str, float]) -> float | None:
        """The metric's positive value, None where it was not measured."""
        value = metrics.get(self.metric)
        return value if value is not None and value > 0 else None

    def goodness(self, metrics: Mapping[str, float]) -> float | None:
        """Higher is better, on a log scale, so that ratios count alike at every size."""
        value = self.raw(metrics)
        if value is None:
            return None
        return math.log(value) if self.higher else -math.log(value)

    def identity(self) -> dict[str, str]:
        return {"metric": self.metric, "better": METRICS[self.metric].better}
