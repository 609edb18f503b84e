"""What is stored of one measurement: the Trial of an Outcome, with who measured it and when. Knows no stage."""

from __future__ import annotations

import os
import time
from typing import Any

from autotune import __version__
from autotune.judge import BOUND
from autotune.objective import Objective
from autotune.outcome import Outcome
from search_spaces import Config
from tuning_db import Trial, host_digest, new_id


def described(outcome: Outcome, config: Config, objective: Objective) -> Trial:
    """The trial of an outcome that ended just now; its scenario and stage stay empty."""
    ended = time.time()
    counters = dict(outcome.counters)
    if outcome.bound is not None:
        bound = objective.goodness({objective.metric: outcome.bound})
        counters |= {BOUND: bound} if bound is not None else {}
    about: dict[str, Any] = {"autotune": __version__, "host": host_digest(), "pid": os.getpid()}
    about |= {"failure": outcome.failure} if outcome.failure else {}
    notes = [*outcome.notes, *([outcome.disturbed] if outcome.disturbed else [])]
    return Trial(
        id=new_id(),
        scenario_key="",
        stage="",
        config=dict(config),
        config_key=config.key,
        status=str(outcome.status),
        reason=outcome.reason,
        metrics=dict(outcome.metrics),
        seconds=dict(outcome.seconds),
        effective=dict(outcome.effective),
        counters=counters,
        started_at=ended - sum(outcome.seconds.values()),
        ended_at=ended,
        provenance={**about, "notes": notes} if notes else about,
        counted=outcome.counted,
    )
