"""`autotune query` and `autotune show`: read the database; measure and change nothing."""

from __future__ import annotations

import os
from typing import Any

import click

from autotune.cli import output

BASE = ("id", "stage", "status", "engine", "model", "hardware", "workload")
USUAL = ("tasks_per_min", "output_tok_s", "ttft_p50", "kl_mean", "weight_bytes", "op_s")
db_option = click.option(
    "--db", envvar="AUTOTUNE_DB", help="SQLite file or database URL. [default: the platform's data folder]"
)


def complete_field(context: click.Context, parameter: click.Parameter, typed: str) -> list[str]:
    """The fields of the database that go on from the last word typed; nothing where there is no database."""
    import re

    from tuning_db import StoreError, open_store
    from tuning_db.query import Fields

    before, start = re.fullmatch(r"(.*[\s(,]-?|-?)(.*)", typed, re.DOTALL).groups()  # type: ignore[union-attr]
    try:
        with open_store(context.params.get("db") or os.environ.get("AUTOTUNE_DB"), readonly=True) as store:
            fields = Fields(store)
            fields.widen()
    except StoreError:
        return []
    short = [name.split(".", 1)[-1] for name in fields.known]
    names = dict.fromkeys([*short, *fields.known] if "." not in start else fields.known)
    return [before + name for name in sorted(names) if name.startswith(start)]


QUERY_EPILOG = """\b
Filters: any field, metric or knob with a unit, and / or / parentheses.

Example: autotune query 'tasks_per_min>100 and kv_dtype=int8' --sort -tasks_per_min --limit 5

Example: autotune query --group kv_dtype --columns tasks_per_min,kl_mean

Example: autotune query --best --slo 'ttft_p99<500ms'
"""


@click.command(epilog=QUERY_EPILOG)
@click.argument("where", required=False, shell_complete=complete_field)
@click.option("--hardware", help="Only this hardware: key prefix, label or part of it.")
@click.option("--model", help="Only models whose name contains this.")
@click.option("--engine", help="Only this engine.")
@click.option("--stage", type=click.Choice(["search", "confirm", "effects"]), help="Only this stage.")
@click.option(
    "--sort",
    shell_complete=complete_field,
    help="Field to sort by; a leading - sorts downwards. [default: newest first]",
)
@click.option("--limit", type=click.IntRange(min=1), default=20, show_default=True, help="Rows at most.")
@click.option(
    "--pareto",
    metavar="METRICS",
    help="Only the Pareto front of these metrics (commas between them; latency, throughput, quality, memory and cost "
    "are words for one), over the trials that ended well.",
)
@click.option(
    "--best",
    is_flag=True,
    help="Instead of trials, the best confirmed configuration for this machine, or the one of --hardware: exact, else "
    "near, else stale (older software), else far, with everything that differs.",
)
@click.option("--objective", help="With --best: the metric to judge by. [default: the one it was searched with]")
@click.option("--slo", multiple=True, metavar="LIMIT", help="With --best: a limit such as 'ttft_p99<500ms'.")
@click.option(
    "--group",
    metavar="FIELD",
    shell_complete=complete_field,
    help="One row for each value of this field: how many trials, and of each metric the best and the mean.",
)
@click.option("--columns", shell_complete=complete_field, help="Fields to print, separated by commas.")
@db_option
@output.format_option
def query(
    where: str | None, pareto: str | None, group: str | None, columns: str | None, form: str, best: bool, **flags: Any
) -> None:
    """List trials by hardware, model, engine and metric; with --best, what to deploy here."""
    db, sort, limit, objective, slo = (flags.pop(name) for name in ("db", "sort", "limit", "objective", "slo"))
    if (objective or slo) and not best:
        raise click.UsageError("--objective and --slo belong to --best")
    wanted = {name: value for name, value in flags.items() if value}
    with output.clear_errors():
        if best:
            from autotune.cli.best import show as show_best

            show_best(db, form, limit, objective, slo, wanted)
            return
        from tuning_db import open_store
        from tuning_db.query import pick, select

        if group and (pareto or sort):
            raise click.UsageError("--group puts the largest group first; give it without --pareto and --sort")
        named = columns.split(",") if columns else []
        with open_store(db, readonly=True) as store:
            if group:
                rows = _grouped(store, group, named or list(USUAL), where, wanted)[:limit]
                output.emit(rows, list(rows[0]) if rows else [group], form, "groups")
                return
            front: tuple[str, ...] = ()
            if pareto:
                rows, front = _front(store, pareto, where, limit, wanted)
            else:
                rows = select(store, where, sort=sort or "-ended_at", limit=limit, **wanted)
        names = named or _columns(rows, front)
        machine = form in ("json", "jsonl") and not columns
        output.emit(rows if machine else pick(rows, names), names, form, "trials")


def _columns(rows: list[dict[str, Any]], front: tuple[str, ...] = ()) -> list[str]:
    """The fixed fields and the usual metrics that any row has, those of a front first."""
    names = dict.fromkeys((*front, *USUAL))
    return [*BASE, *(name for name in names if any(f"metrics.{name}" in row for row in rows))]


def _front(
    store: Any, pareto: str, where: str | None, limit: int, wanted: dict[str, str]
) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """The rows that ended well and no other beats, by scenario, best of the first metric first, with the metrics."""
    from autotune.metrics import METRICS
    from autotune.objective import Objective, front
    from tuning_db.query import by_id, points

    names = Objective(pareto).metrics
    found = points(store, names, where, **wanted)
    sign = -1 if METRICS[names[0]].better == "higher" else 1
    kept: list[str] = []
    for key in dict.fromkeys(row["scenario_key"] for row in found):
        mine = {r["id"]: {n: r[f"metrics.{n}"] for n in names} for r in found if r["scenario_key"] == key}
        kept += sorted(front(mine, names), key=lambda ident, mine=mine: sign * mine[ident][names[0]])  # type: ignore[misc]
    return by_id(store, kept[:limit]), names


def _grouped(
    store: Any, by: str, metrics: list[str], where: str | None, wanted: dict[str, str]
) -> list[dict[str, Any]]:
    """The groups with the best and the mean of each metric that any has."""
    from autotune.metrics import METRICS
    from tuning_db import QueryError
    from tuning_db.query import Fields, group

    fields, known = Fields(store), []
    for name in metrics:
        try:
            known.append(fields.find(name).name)
        except QueryError:
            if metrics != list(USUAL):
                raise
    rows = []
    for found in group(store, by, known, where, **wanted):
        row = {name: found[name] for name in (by, "trials", "ok")}
        for whole in known:
            name = whole.removeprefix("metrics.")
            lower = name not in METRICS or METRICS[name].better != "higher"
            row |= {
                f"{name}_best": found[f"{whole}_min" if lower else f"{whole}_max"],
                f"{name}_mean": found[f"{whole}_mean"],
            }
        rows.append(row)
    return rows


SHOW_EPILOG = """\b
Example: autotune show 0199
"""


@click.command(epilog=SHOW_EPILOG)
@click.argument("trial_id", metavar="ID")
@click.option("--samples", is_flag=True, help="Also every request's timeline.")
@db_option
@click.option("--format", "form", type=click.Choice(["table", "json"]), default="table", show_default=True)
def show(trial_id: str, samples: bool, db: str | None, form: str) -> None:
    """Show one trial whole; ID may be any unambiguous prefix."""
    with output.clear_errors():
        from tuning_db import open_store

        with open_store(db, readonly=True) as store:
            trial = store.trial(trial_id)
            scenario = store.scenario(trial.scenario_key)
            timelines = store.samples(trial.id)
        document = _document(trial, scenario, timelines if samples else None)
        if form == "json":
            import json

            click.echo(json.dumps({"schema": output.SCHEMA, **document}, indent=2, ensure_ascii=False))
            return
        for section, content in document.items():
            if isinstance(content, dict):
                click.echo(f"{section}:")
                for name, value in content.items():
                    click.echo(f"  {name:<24} {output.cell(value, name)}")
            elif isinstance(content, list):
                click.echo(f"{section}: {len(content)}")
                for item in content:
                    click.echo(f"  {output.cell(item)}")
            else:
                click.echo(f"{section + ':':<12} {output.cell(content)}")


def _document(trial: Any, scenario: Any, timelines: Any) -> dict[str, Any]:
    from dataclasses import asdict
    from datetime import UTC, datetime

    document: dict[str, Any] = {
        "id": trial.id,
        "stage": trial.stage,
        "status": trial.status,
        "reason": trial.reason,
        "ended": datetime.fromtimestamp(trial.ended_at, UTC).isoformat(timespec="seconds"),
        "hardware": {"label": scenario.hardware.label, "key": scenario.hardware.key, **scenario.hardware.facts},
        "engine": {"name": scenario.engine, **scenario.engine_build},
        "model": dict(scenario.model),
        "workload": dict(scenario.workload),
        "objective": dict(scenario.objective),
        "config": dict(trial.config),
        "effective": dict(trial.effective),
        "metrics": dict(trial.metrics),
        "counters": dict(trial.counters),
        "seconds": dict(trial.seconds),
        "provenance": {**trial.provenance, "seed": trial.seed, "block": trial.block},
    }
    if timelines is not None:
        document["samples"] = [asdict(sample) for sample in timelines]
    return document
