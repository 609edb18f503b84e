"""What one knob does over the trials of a search, from pairs that differ in it alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

from autotune.judge import BOUND
from tuning_db import Trial


def effect(trials: list[Trial], knob: str) -> float:
    """Geometric mean of the speed ratio over pairs that differ in ``knob`` alone, above 1 in either direction.

    A trial that was given up counts at the speed that it could have had at best, and never against another such.
    """

    def rest(config: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in config.items() if name != knob}

    logs = [
        speed(a) - speed(b)
        for a, b in itertools.permutations(trials, 2)
        if rest(a.config) == rest(b.config) and str(a.config[knob]) < str(b.config[knob])
        if "ok" in (a.status, b.status)
    ]
    return math.exp(abs(math.fsum(logs) / len(logs))) if logs else 1.0


def speed(trial: Trial) -> float:
    """Natural logarithm of output tokens a second, of a pruned trial the most that it could still have reached."""
    return float(trial.counters[BOUND]) if trial.status == "pruned" else math.log(trial.metrics["output_tok_s"])
