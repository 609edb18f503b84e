"""Flattens a trial and its scenario into one row of named fields, and finds the field that a short name means."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any

from tuning_db.canonical import canonical
from tuning_db.errors import QueryError
from tuning_db.records import Scenario, Trial

Row = dict[str, Any]
"""Field names to strings, numbers, booleans or None."""

GROUPS = ("metrics", "config", "seconds", "hardware", "model", "workload", "engine", "objective", "counters")
"""Where a bare name is looked for, in this order, after the fields of the trial itself."""

PLAIN = ("stage", "status", "reason", "counted", "block", "seed", "started_at", "ended_at", "config_key")

ALIASES = {"gpu": "hardware", "cpu": "hardware", "trial": "id"}


def scenario_fields(scenario: Scenario) -> Row:
    """What every trial of the scenario shares: names and keys, then ``group.name`` for each of its facts."""
    machine = scenario.hardware
    return {
        "hardware": machine.label,
        "engine": scenario.engine,
        "model": scenario.model.get("name"),
        "workload": scenario.workload.get("name"),
        "objective": scenario.objective.get("name", scenario.objective.get("metric")),
        "scenario_key": scenario.key,
        "hardware_key": machine.key,
        **_leaves("hardware", machine.facts),
        **_leaves("model", scenario.model),
        **_leaves("workload", scenario.workload),
        **_leaves("engine", scenario.engine_build),
        **_leaves("objective", scenario.objective),
    }


def flatten(trial: Trial, shared: Row) -> Row:
    """One row: the trial's own fields, ``shared`` of its scenario, then ``group.name`` for each entry of a group."""
    return {
        "id": trial.id,
        **{name: getattr(trial, name) for name in PLAIN},
        **shared,
        **_leaves("metrics", trial.metrics),
        **_leaves("config", trial.config),
        **_leaves("seconds", trial.seconds),
        **_leaves("counters", trial.counters),
        **_leaves("effective", trial.effective),
        **_leaves("provenance", trial.provenance),
    }


def resolve(name: str, known: Collection[str]) -> str:
    """The whole name of the field that ``name`` means. Raises QueryError naming the nearest field."""
    for candidate in (name, ALIASES.get(name, ""), *(f"{group}.{name}" for group in GROUPS)):
        if candidate in known:
            return candidate
    short = {field.split(".", 1)[-1]: field for field in known}
    near = get_close_matches(name, [*known, *short], n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else "; `autotune query --format json` shows every field"
    raise QueryError(f"no trial has a field {name!r}{hint}")


def _leaves(prefix: str, facts: Mapping[str, Any]) -> Row:
    row = {}
    for name, value in facts.items():
        if isinstance(value, dict):
            row.update(_leaves(f"{prefix}.{name}", value))
        elif isinstance(value, list):
            row[f"{prefix}.{name}"] = canonical(value).decode()
        else:
            row[f"{prefix}.{name}"] = value
    return row
