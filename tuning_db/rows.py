"""Turns records into table rows and back, and refuses what must not be stored. Knows no connection."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Row

from tuning_db.canonical import Encoded, cleaned, encoded, plain, quick
from tuning_db.errors import BadValue
from tuning_db.records import Hardware, Reference, Sample, Scenario, Trial
from tuning_db.timelines import pack

LONGEST_KEY = 80
"""Characters of a key or of another indexed word; PostgreSQL cannot index words without a bound."""

_ID = re.compile(r"[0-9a-f]{8,32}")
Values = dict[str, Any]


def hardware_row(hardware: Hardware) -> Values:
    """The ``hardware`` row. Raises BadValue for facts that JSON lacks."""
    facts = _plain(hardware.facts, "hardware.facts")
    return {
        "key": hardware.key,
        "loose": hardware.loose,
        "kind": _plain(hardware.kind, "hardware.kind"),
        "label": hardware.label,
        "host": _plain(hardware.host, "hardware.host"),
        "facts": facts,
    }


def scenario_row(scenario: Scenario, now: float) -> Values:
    """The ``scenarios`` row; ``now`` is a Unix time. Raises BadValue."""
    names = ("engine", "engine_build", "model", "workload", "objective")
    parts = {name: _plain(getattr(scenario, name), name) for name in names}
    return {
        "key": scenario.key,
        "measured_key": scenario.measured_key,
        "hardware_key": scenario.hardware.key,
        **parts,
        **{name: getattr(scenario, name) for name in ("engine_key", "model_key", "workload_key", "subject_key")},
        "created_at": now,
    }


def trial_row(trial: Trial) -> Values:
    """The ``trials`` row. Identity is stored as it is or refused with BadValue; free text from logs is cleaned."""
    if not _ID.fullmatch(trial.id):
        raise BadValue(f"trial id {trial.id!r} is not 8 to 32 lower-case hex digits; make ids with tuning_db.new_id()")
    if abs(trial.seed) >= 1 << 63 or abs(trial.block) >= 1 << 31:
        raise BadValue(f"trial {trial.id}: seed {trial.seed} or block {trial.block} is too large to store")
    name = f"trial {trial.id}: "
    check_short(name, scenario_key=trial.scenario_key, config_key=trial.config_key, stage=trial.stage)
    words = ("scenario_key", "stage", "config_key", "status", "block", "seed", "started_at", "ended_at")
    return {
        "id": trial.id,
        "counted": bool(trial.counted),
        **{field: _plain(getattr(trial, field), name + field) for field in words},
        "reason": _plain(cleaned(trial.reason), name + "reason"),
        "config": _json(trial.config, name + "config"),
        "metrics": _json(_numbers(trial.metrics, name + "metrics"), name + "metrics"),
        "seconds": _json(_numbers(trial.seconds, name + "seconds"), name + "seconds"),
        **{
            field: quick(value) or _json(cleaned(value), name + field)
            for field in ("effective", "counters", "provenance")
            for value in (getattr(trial, field),)
        },
    }


def samples_row(trial_id: str, samples: Sequence[Sample]) -> Values:
    """The ``samples`` row of one trial. Raises BadValue for a sample of another trial or a time that is not finite."""
    for sample in samples:
        if sample.trial_id != trial_id:
            raise BadValue(f"sample {sample.index} belongs to trial {sample.trial_id!r}, not to {trial_id!r}")
    try:
        return {"trial_id": trial_id, "count": len(samples), "blob": pack(samples)}
    except ValueError as error:
        raise BadValue(f"trial {trial_id}: {error}") from error


def reference_row(reference: Reference, now: float) -> Values:
    """The ``reference_blobs`` row; ``now`` is a Unix time. Raises BadValue."""
    check_short("reference ", key=reference.key, kind=reference.kind)
    return {
        "key": _plain(reference.key, "reference.key"),
        "kind": _plain(reference.kind, "reference.kind"),
        "facts": _plain(reference.facts, "reference.facts"),
        "blob": bytes(reference.blob),
        "created_at": now,
    }


def trial_record(row: Row[Any]) -> Trial:
    """The trial of a row that holds the columns of ``trials``."""
    values = dict(row._mapping)
    for name in ("metrics", "seconds"):
        values[name] = {key: float(value) for key, value in values[name].items()}
    return Trial(**values)


def scenario_record(row: Row[Any]) -> Scenario:
    """The scenario of a row that holds the columns of ``scenarios`` and the kind, facts and host of ``hardware``."""
    machine = Hardware(row.kind, row.facts, row.host)
    return Scenario(machine, row.engine, row.engine_build, row.model, row.workload, row.objective)


def check_short(name: str, **words: str) -> None:
    """Refuse with BadValue a word that is too long for an indexed column."""
    for field, word in words.items():
        if len(word) > LONGEST_KEY:
            raise BadValue(f"{name}{field} has {len(word)} characters; {LONGEST_KEY} are the most: {word[:40]!r}…")


def _plain(value: object, path: str) -> Any:
    try:
        return plain(value, path)
    except ValueError as error:
        raise BadValue(str(error)) from error


def _json(value: object, path: str) -> Encoded:
    try:
        return encoded(value, path)
    except ValueError as error:
        raise BadValue(str(error)) from error


def _numbers(values: Mapping[str, float], path: str) -> dict[str, float]:
    for name, value in values.items():
        if not isinstance(value, (int, float)):
            raise BadValue(f"{path}.{name} is {value!r}, not a number; leave out what was not measured")
    try:
        return {name: float(value) for name, value in values.items()}
    except OverflowError as error:
        raise BadValue(f"{path} holds an integer too large for a float") from error
