"""`autotune query --best`: what was confirmed for this or a named machine, and how near to it; measures nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autotune.cli import output

if TYPE_CHECKING:
    from autotune.slo import Slo
    from tuning_db import Hardware, Store
    from tuning_db.lookup import Best

COLUMNS = ("tier", "distance", "engine", "model", "workload", "hardware", "metric", "value", "runs", "slo", "differs")


def show(
    db: str | None, form: str, limit: int, objective: str | None, slos: Sequence[str], only: Mapping[str, str]
) -> None:
    """Print one row for each engine, model and workload that somebody confirmed; exit code 3 when there is none."""
    from autotune.slo import parse
    from tuning_db import open_store

    limits = tuple(parse(text) for text in slos)
    with open_store(db, readonly=True) as store:
        machine = _machine(store, only.get("hardware"))
        rows, here = [], not only.get("hardware")
        subjects = _subjects(store, only)
        builds = {engine: _build(engine, store) if here else None for engine in {names[0] for names in subjects}}
        for engine in sorted(engine for engine, build in builds.items() if here and build is None):
            output.note(f"{engine}: its build here is unknown, so only the machine is compared")
        for engine, model, workload in subjects:
            names = {"engine": engine, "model": model, "workload": workload, "build": builds[engine]}
            row = _row(store, machine, objective, limits, names)
            rows += [row] if row else []
    if not rows:
        output.fail(f"nothing was confirmed that answers for {machine.label}; `autotune search` measures it", 3)
    rows.sort(key=lambda row: (row["rank"], row["distance"]))
    for row in rows[:limit]:
        del row["rank"]
        if row["tier"] != "exact":
            output.note(
                f"{row['engine']} {row['workload']}: {row['tier']}, not measured here: {'; '.join(row['differs'])}"
            )
        if row["refused"]:
            output.note(
                f"{row['engine']} {row['workload']}: {row['refused']} faster configurations do not meet the SLO"
            )
    columns = [name for name in COLUMNS if name != "slo" or limits]
    output.emit(_short(rows[:limit], form), [*columns, "config"], form, "best")


def _machine(store: Store, text: str | None) -> Hardware:
    from autotune.hardware import probe
    from tuning_db import Hardware

    if text is None:
        found = probe()
        return Hardware(found.kind, found.facts)
    known = store.machines(text)
    if not known:
        labels = ", ".join(dict.fromkeys(machine.label for machine in store.machines())) or "none yet"
        output.fail(f"no hardware is called {text!r}; the database knows {labels}", 2)
    if len(known) > 1:
        keys = ", ".join(f"{machine.key[:11]} ({machine.label})" for machine in known[:8])
        output.fail(f"{text!r} fits several machines: {keys}; give the beginning of a key", 2)
    return known[0]


def _subjects(store: Store, only: Mapping[str, str]) -> list[tuple[str, str | None, str | None]]:
    """The (engine, model, workload) names to answer for: kernels only when their engine is named."""
    engine = only.get("engine")
    return [
        names
        for names in store.subjects()
        if (names[0] == engine if engine else not names[0].startswith("kernels/"))
        and only.get("model", "").lower() in (names[1] or "").lower()
        and only.get("workload", "").lower() in (names[2] or "").lower()
    ]


def _build(engine: str, store: Store) -> Mapping[str, Any] | None:
    """The build of an engine as it would run here now; None for one that is not on this machine."""
    from dataclasses import replace

    from autotune import kernel_search, setting
    from autotune.outcome import EngineError
    from autotune.plan import resolve
    from search_spaces import SpaceError

    try:
        plan = replace(resolve({"engine": engine}, os.environ), only="", knobs={})
        return setting.engine_build(plan, kernel_search.prepare(plan).table(store))
    except (SpaceError, EngineError):
        return None


def _row(
    store: Store, machine: Hardware, objective: str | None, limits: Sequence[Slo], names: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The answer for one engine, model and workload; None when nothing was confirmed or meets the limits."""
    from autotune.judge import Judge
    from autotune.objective import Objective
    from autotune.slo import summary
    from tuning_db.lookup import matches

    nearest = next(matches(store, machine, **names), None)
    if nearest is None:
        return None
    wanted = Objective(objective or str(nearest.scenario.objective["metric"]))
    judge = Judge(wanted, limits, store)
    found = store.best(
        machine, wanted.goodness, lambda trials: all(f.violation == 0 for f in judge.findings(trials)), **names
    )
    if found is None:
        return None
    return {**_facts(found, wanted.metric), "slo": summary(judge.findings(found.trials))}


def _facts(found: Best, metric: str) -> dict[str, Any]:
    from autotune.objective import Objective
    from tuning_db.distance import TIERS

    scenario, objective = found.match.scenario, Objective(metric)
    values = sorted(value for trial in found.trials if (value := objective.raw(trial.metrics)) is not None)
    return {
        "tier": found.match.tier,
        "rank": TIERS.index(found.match.tier),
        "distance": found.match.distance,
        "engine": scenario.engine,
        "model": scenario.model.get("name"),
        "workload": scenario.workload.get("name"),
        "hardware": scenario.hardware.label,
        "metric": metric,
        "value": values[len(values) // 2],
        "runs": len(found.trials),
        "differs": [difference.sentence() for difference in found.match.differs],
        "refused": found.refused,
        "scenario": scenario.key,
        "config_key": found.config_key,
        "config": dict(found.config),
        "trials": [trial.id for trial in found.trials],
        "measured_at": max(trial.ended_at for trial in found.trials),
    }


def _short(rows: list[dict[str, Any]], form: str) -> list[dict[str, Any]]:
    """For people: the value in its own unit, and how many facts differ."""
    if form not in ("table", "md"):
        return rows
    return [
        {
            **row,
            "value": output.cell(row["value"], row["metric"]),
            "distance": f"{row['distance']:g}",
            "differs": ", ".join(text.split(" ")[0] for text in row["differs"]) or "nothing",
            "config": " ".join(f"{name}={value}" for name, value in row["config"].items()),
        }
        for row in rows
    ]
