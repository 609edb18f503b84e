"""Flattens a trial and its scenario into one row of named fields, and finds the field that a short name means."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from tuning_db.canonical import canonical
from tuning_db.errors import QueryError
from tuning_db.records import Scenario, Trial

Row = dict[str, Any]
"""Field names to strings, numbers, booleans or None."""

GROUPS = ("metrics", "config", "seconds", "hardware", "model", "workload", "engine", "objective", "counters")
"""Where a bare name is looked for, in this order, after the fields of the trial itself."""

ALIASES = {"gpu": "hardware", "cpu": "hardware", "trial": "id"}


def flatten(trial: Trial, scenario: Scenario) -> Row:
    """One row: the trial's own fields, names of its scenario, then ``group.name`` for every entry of each group."""
    row: Row = {
        "id": trial.id,
        "hardware": scenario.hardware.label,
        "engine": scenario.engine,
        "model": scenario.model.get("name"),
        "workload": scenario.workload.get("name"),
        "objective": scenario.objective.get("name", scenario.objective.get("metric")),
    }
    for name in ("stage", "status", "reason", "counted", "block", "seed", "started_at", "ended_at", "config_key"):
        row[name] = getattr(trial, name)
    row["scenario_key"] = trial.scenario_key
    row["hardware_key"] = scenario.hardware.key
    groups: dict[str, Mapping[str, Any]] = {
        "metrics": trial.metrics,
        "config": trial.config,
        "seconds": trial.seconds,
        "hardware": scenario.hardware.facts,
        "model": scenario.model,
        "workload": scenario.workload,
        "engine": scenario.engine_build,
        "objective": scenario.objective,
        "counters": trial.counters,
        "effective": trial.effective,
        "provenance": trial.provenance,
    }
    for group, facts in groups.items():
        row.update(_leaves(group, facts))
    return row


def resolve(name: str, known: Collection[str]) -> str:
    """The whole name of the field that ``name`` means. Raises QueryError naming the nearest field."""
    for candidate in (name, ALIASES.get(name, ""), *(f"{group}.{name}" for group in GROUPS)):
        if candidate in known:
            return candidate
    short = {field.split(".", 1)[-1]: field for field in known}
    near = get_close_matches(name, [*known, *short], n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else "; `autotune query --format json` shows every field"
    raise QueryError(f"no trial has a field {name!r}{hint}")


def _leaves(prefix: str, facts: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in facts.items():
        if isinstance(value, Mapping):
            yield from _leaves(f"{prefix}.{name}", value)
        elif isinstance(value, (list, tuple)):
            yield f"{prefix}.{name}", canonical(value).decode()
        else:
            yield f"{prefix}.{name}", value
