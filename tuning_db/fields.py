"""Flattens a trial and its scenario into one row of named fields, and finds where the field of a name is stored."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from tuning_db.canonical import canonical
from tuning_db.errors import QueryError
from tuning_db.records import Scenario, Trial

Row = dict[str, Any]
"""Field names to strings, numbers, booleans or None."""

Path = tuple[str, ...]
"""The keys that lead from a JSON column to a value."""

GROUPS = ("metrics", "config", "seconds", "hardware", "model", "workload", "engine", "objective", "counters")
"""Where a bare name is looked for, in this order, after the fields of the trial itself."""

PLAIN = ("stage", "status", "reason", "counted", "block", "seed", "started_at", "ended_at", "config_key")

ALIASES = {"gpu": "hardware", "cpu": "hardware", "trial": "id"}

COLUMNS: Mapping[str, tuple[str, str]] = {
    **{name: ("trials", name) for name in ("metrics", "config", "seconds", "counters", "effective", "provenance")},
    **{name: ("scenarios", name) for name in ("model", "workload", "objective")},
    "engine": ("scenarios", "engine_build"),
    "hardware": ("hardware", "facts"),
}
"""The table and the JSON column of each group."""


@dataclass(frozen=True, slots=True)
class Field:
    """Where a field is stored: a column, or with ``paths`` the first of these places in a JSON column that is there.

    ``numeric`` says that every value looked at is a number.
    """

    name: str
    table: str
    column: str
    paths: tuple[Path, ...] = ()
    numeric: bool = False


_FIXED = {
    **{name: Field(name, "trials", name) for name in ("id", *PLAIN, "scenario_key")},
    **{name: Field(name, "trials", name, numeric=True) for name in ("block", "seed", "started_at", "ended_at")},
    "engine": Field("engine", "scenarios", "engine"),
    "hardware_key": Field("hardware_key", "scenarios", "hardware_key"),
    "hardware": Field("hardware", "hardware", "label"),
    "model": Field("model", "scenarios", "model", (("name",),)),
    "workload": Field("workload", "scenarios", "workload", (("name",),)),
    "objective": Field("objective", "scenarios", "objective", (("name",), ("metric",))),
}


def fixed() -> dict[str, Field]:
    """The fields that every trial has."""
    return dict(_FIXED)


def learn(known: dict[str, Field], trial: Trial, scenario: Scenario) -> None:
    """Add to ``known`` every field of the trial and its scenario."""
    parts: dict[str, Mapping[str, Any]] = {name: getattr(trial, name) for name in COLUMNS if hasattr(trial, name)}
    parts |= {name: getattr(scenario, name) for name in ("model", "workload", "objective")}
    parts |= {"engine": scenario.engine_build, "hardware": scenario.hardware.facts}
    for group, facts in parts.items():
        for path, value in _leaves(facts):
            name = ".".join((group, *path))
            numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
            before = known.get(name)
            if before is None:
                known[name] = Field(name, *COLUMNS[group], (path,), numeric)
            elif path not in before.paths or (before.numeric and not numeric and value is not None):
                paths = dict.fromkeys((*before.paths, path))
                known[name] = Field(name, *COLUMNS[group], tuple(paths), before.numeric and numeric)


def candidates(name: str) -> tuple[str, ...]:
    """The whole names that ``name`` may stand for, the likeliest first."""
    return (name, *([ALIASES[name]] if name in ALIASES else []), *(f"{group}.{name}" for group in GROUPS))


def guesses(name: str) -> list[Field]:
    """The places where a field may be that no looked-at trial has; a dot may be part of a key or lead into it."""
    found = []
    for whole in candidates(name):
        group, dot, rest = whole.partition(".")
        if dot and rest and group in COLUMNS:
            paths = dict.fromkeys(((rest,), tuple(rest.split("."))))
            found.append(Field(whole, *COLUMNS[group], tuple(paths)))
    return found


def unknown(name: str, known: Collection[str]) -> QueryError:
    """The error for a name that no trial has, with the nearest one."""
    short = {field.split(".", 1)[-1]: field for field in known}
    near = get_close_matches(name, [*known, *short, *ALIASES], n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else "; `autotune query --format json` shows every field"
    return QueryError(f"no trial has a field {name!r}{hint}")


def resolve(name: str, known: Collection[str]) -> str:
    """The whole name of the field that ``name`` means. Raises QueryError naming the nearest field."""
    for candidate in candidates(name):
        if candidate in known:
            return candidate
    raise unknown(name, known)


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
        **_named("hardware", machine.facts),
        **_named("model", scenario.model),
        **_named("workload", scenario.workload),
        **_named("engine", scenario.engine_build),
        **_named("objective", scenario.objective),
    }


def flatten(trial: Trial, shared: Row) -> Row:
    """One row: the trial's own fields, ``shared`` of its scenario, then ``group.name`` for each entry of a group."""
    return {
        "id": trial.id,
        **{name: getattr(trial, name) for name in PLAIN},
        **shared,
        **_named("metrics", trial.metrics),
        **_named("config", trial.config),
        **_named("seconds", trial.seconds),
        **_named("counters", trial.counters),
        **_named("effective", trial.effective),
        **_named("provenance", trial.provenance),
    }


def shown(value: Any) -> Any:
    """A stored value as it stands in a row: a list as its canonical JSON."""
    return canonical(value).decode() if isinstance(value, list) else value


def _named(group: str, facts: Mapping[str, Any]) -> Row:
    return {".".join((group, *path)): shown(value) for path, value in _leaves(facts)}


def _leaves(facts: Mapping[str, Any], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    for name, value in facts.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*path, name))
        else:
            yield (*path, name), value
