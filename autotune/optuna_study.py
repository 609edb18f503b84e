"""Writes the trials of a scenario as a standard Optuna storage, for optuna-dashboard and Optuna's plots.

Knows how a knob becomes a distribution and a status a state; nothing here is read back by the tuner.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from autotune.metrics import METRICS
from autotune.objective import Objective
from autotune.outcome import Status
from tuning_db import Scenario, StoreError, Trial

WIDE = 8.0
"""A range of positive sizes at least this many times its smallest is drawn on a log scale."""
LONGEST = 2000
"""Characters of an attribute; Optuna's storage keeps 2048."""


@dataclass(frozen=True, slots=True)
class Knob:
    """How one knob is shown: numbers on an axis, anything else as one of the values seen."""

    distribution: BaseDistribution
    coded: bool = False

    def value(self, value: Any) -> Any:
        return _code(value) if self.coded else value


def write(path: Path, name: str, scenario: Scenario, trials: Sequence[Trial], objective: Objective) -> int:
    """Write a new file with one study; the number of trials in it. Raises StoreError for a file that is there.

    Values are raw SI units in each metric's own direction. Every status but ok becomes FAIL (or PRUNED), with its
    reason in the trial's attributes, since it has no value for the objective or one that does not count.
    """
    if path.exists():
        raise StoreError(f"{path} is there already; choose another file with -o")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        _fill(part, name, scenario, trials, objective)
        part.replace(path)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror}; choose another file with -o") from error
    finally:
        part.unlink(missing_ok=True)
    return len(trials)


def _fill(part: Path, name: str, scenario: Scenario, trials: Sequence[Trial], objective: Objective) -> None:
    storage = optuna.storages.RDBStorage(f"sqlite:///{part}")
    # Optuna writes a trial in some fifty statements; the file is kept only when whole, so none waits for the disk.
    sqlalchemy.event.listen(storage.engine, "connect", lambda raw, _: raw.execute("PRAGMA synchronous=OFF"))
    storage.engine.dispose()
    try:
        ways = {"higher": StudyDirection.MAXIMIZE, "lower": StudyDirection.MINIMIZE}
        directions = [ways[METRICS[metric].better] for metric in objective.metrics]
        study = optuna.create_study(storage=storage, study_name=name, directions=directions)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study.set_metric_names(list(objective.metrics))
        for key, value in _about(scenario).items():
            study.set_user_attr(key, _attribute(value))
        knobs = {knob: _knob([t.config[knob] for t in trials if knob in t.config]) for knob in _names(trials)}
        study.add_trials([_frozen(trial, knobs, objective) for trial in trials])
    finally:
        storage.remove_session()
        storage.engine.dispose()


def _frozen(trial: Trial, knobs: Mapping[str, Knob], objective: Objective) -> FrozenTrial:
    params = {name: knobs[name].value(value) for name, value in trial.config.items()}
    values = [trial.metrics.get(metric) for metric in objective.metrics]
    state = _state(trial, values)
    about = {name: getattr(trial, name) for name in ("id", "stage", "status", "reason", "block", "seed", "counted")}
    groups = {"": trial.metrics, "seconds.": trial.seconds, "counters.": trial.counters}
    facts = {f"{prefix}{name}": value for prefix, group in groups.items() for name, value in group.items()}
    frozen = optuna.trial.create_trial(
        state=state,
        values=values if state == TrialState.COMPLETE else None,  # type: ignore[arg-type]
        params=params,
        distributions={name: knobs[name].distribution for name in params},
        user_attrs={name: _attribute(value) for name, value in {**about, **facts}.items()},
    )
    frozen.datetime_start = datetime.fromtimestamp(trial.started_at)
    frozen.datetime_complete = datetime.fromtimestamp(trial.ended_at)
    return frozen


def _state(trial: Trial, values: Sequence[float | None]) -> TrialState:
    if trial.status == Status.PRUNED:
        return TrialState.PRUNED
    whole = trial.status == Status.OK and all(value is not None for value in values)
    return TrialState.COMPLETE if whole else TrialState.FAIL


def _names(trials: Sequence[Trial]) -> list[str]:
    return list(dict.fromkeys(name for trial in trials for name in trial.config))


def _knob(values: Sequence[Any]) -> Knob:
    kinds = {type(value) for value in values}
    if kinds == {int} and len(set(values)) > 1 and max(map(abs, values)) < 1 << 53:
        return Knob(IntDistribution(min(values), max(values), log=_is_wide(values)))
    if kinds <= {int, float} and len(set(values)) > 1 and max(map(abs, values)) < 1e300:
        return Knob(FloatDistribution(float(min(values)), float(max(values)), log=_is_wide(values)))
    # Optuna takes 1, 1.0 and True for one choice; text tells any two values apart.
    choices = sorted(dict.fromkeys(map(_code, values)))
    coded = kinds != {str} and kinds != {bool}
    return Knob(CategoricalDistribution(choices if coded else sorted(set(values))), coded)


def _is_wide(values: Sequence[float]) -> bool:
    return min(values) > 0 and max(values) / min(values) >= WIDE


def _code(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def _attribute(value: Any) -> Any:
    """A JSON value that fits; a number that JSON lacks, or a long text, as the beginning of its text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    text = json.dumps(value)
    return value if len(text) <= LONGEST else str(value)[: LONGEST // 12] + "…"


def _about(scenario: Scenario) -> dict[str, Any]:
    return {
        "scenario_key": scenario.key,
        "hardware": scenario.hardware.label,
        "hardware_key": scenario.hardware.key,
        "engine": scenario.engine,
        "model": scenario.model.get("name"),
        "workload": scenario.workload.get("name"),
    }
