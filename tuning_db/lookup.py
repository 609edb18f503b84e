"""Finds what was confirmed for this machine, or for the nearest one, and names every difference. Knows no statistics.

Only confirming trials that ended well are returned, and a configuration with a counted confirmation that failed is left
out altogether. Nothing is substituted silently: a match that is not exact carries its tier and its differences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from tuning_db.records import Hardware, Scenario, Trial
from tuning_db.store import Store

TIERS = ("exact", "stale", "near", "far")
"""Nearest first: the same in all things; other versions only; a machine alike or another question; another machine."""

VERSIONS = ("hardware.driver", "hardware.cuda", "hardware.kernel", "engine.")
"""Beginnings of the facts that say which software ran. A difference in nothing else makes a match stale."""

ABSENT = "(absent)"


@dataclass(frozen=True, slots=True)
class Difference:
    """One fact in which a stored scenario is not what was asked for."""

    field: str
    want: Any
    have: Any


@dataclass(frozen=True, slots=True)
class Match:
    """A scenario with confirmed trials: how near it is (``tier``), what differs, and the trials that ended well."""

    tier: str
    differs: tuple[Difference, ...]
    scenario: Scenario
    trials: tuple[Trial, ...]


@dataclass(frozen=True, slots=True)
class Best:
    """The best configuration of a match: ``value`` is the median goodness over ``trials``, its confirming runs."""

    match: Match
    config: Mapping[str, Any]
    config_key: str
    value: float
    trials: tuple[Trial, ...]


def matches(
    store: Store,
    wanted: Scenario | Hardware,
    *,
    engine: str | None = None,
    model: str | None = None,
    workload: str | None = None,
) -> list[Match]:
    """Every scenario with confirmed trials, nearest first, and the newest first among equals.

    A whole scenario is compared fact by fact, and its engine and model name must be the same; given hardware alone,
    only machines are compared. ``engine``, ``model`` and ``workload`` keep the scenarios of exactly that name.
    """
    if isinstance(wanted, Scenario):
        engine, model = wanted.engine, wanted.model.get("name", model)
    found = []
    for scenario in store.scenarios():
        names = (scenario.engine, scenario.model.get("name"), scenario.workload.get("name"))
        if any(want not in (None, have) for want, have in zip((engine, model, workload), names, strict=True)):
            continue
        trials = confirmed(store, scenario.key)
        if trials:
            differs = differences(wanted, scenario)
            found.append(Match(_tier(wanted, scenario, differs), differs, scenario, trials))
    return sorted(found, key=lambda m: (TIERS.index(m.tier), len(m.differs), -max(t.ended_at for t in m.trials)))


def best(
    store: Store,
    wanted: Scenario | Hardware,
    goodness: Callable[[Mapping[str, float]], float | None],
    **names: str | None,
) -> Best | None:
    """The best confirmed configuration of the nearest match (look at its ``tier``), or None when there is none.

    ``goodness`` maps metrics to a number, larger is better, or None when the objective is not met.
    """
    for match in matches(store, wanted, **names):
        runs: dict[str, list[Trial]] = {}
        for trial in match.trials:
            runs.setdefault(trial.config_key, []).append(trial)
        judged = [(_median([goodness(trial.metrics) for trial in trials]), trials) for trials in runs.values()]
        good = [(value, trials) for value, trials in judged if value is not None]
        if good:
            value, trials = max(good, key=lambda pair: pair[0])
            return Best(match, trials[0].config, trials[0].config_key, value, tuple(trials))
    return None


def confirmed(store: Store, scenario_key: str) -> tuple[Trial, ...]:
    """The confirming trials that ended well, without any of a configuration that once failed its confirmation."""
    rows = [trial for trial in store.trials(scenario_key, stage="confirm") if trial.counted]
    failed = {trial.config_key for trial in rows if trial.status != "ok"}
    return tuple(trial for trial in rows if trial.config_key not in failed)


def differences(wanted: Scenario | Hardware, have: Scenario) -> tuple[Difference, ...]:
    """Every fact that is not the same, by name. An unknown fact differs from another machine's unknown fact."""
    if isinstance(wanted, Hardware):
        ours, theirs = _machine(wanted), _machine(have.hardware)
    else:
        ours, theirs = _facts(wanted), _facts(have)
    return tuple(
        Difference(name, ours.get(name, ABSENT), theirs.get(name, ABSENT))
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name, ABSENT) != theirs.get(name, ABSENT)
    )


def _tier(wanted: Scenario | Hardware, have: Scenario, differs: tuple[Difference, ...]) -> str:
    machine = wanted if isinstance(wanted, Hardware) else wanted.hardware
    if not differs:
        return "exact"
    if all(difference.field.startswith(VERSIONS) for difference in differs):
        return "stale"
    return "near" if machine.loose == have.hardware.loose else "far"


def _facts(scenario: Scenario) -> dict[str, Any]:
    parts = {
        "engine": scenario.engine_build,
        "model": scenario.model,
        "workload": scenario.workload,
        "objective": scenario.objective,
    }
    named = {f"{part}.{name}": value for part, facts in parts.items() for name, value in facts.items()}
    return {**_machine(scenario.hardware), **named}


def _machine(hardware: Hardware) -> dict[str, Any]:
    return {"hardware.kind": hardware.kind, **{f"hardware.{name}": v for name, v in hardware.known().items()}}


def _median(values: list[float | None]) -> float | None:
    good = [value for value in values if value is not None]
    return median(good) if len(good) == len(values) else None
