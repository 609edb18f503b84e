"""`autotune search --target kernels`: draws the studies of every operator and ends with one row for each."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autotune.cli import output

if TYPE_CHECKING:
    from autotune.decision import Result
    from autotune.kernel_search import KernelSetting
    from autotune.plan import Plan
    from autotune.runtimes.native.kernels.tuning import Operator
    from autotune.tune import Tuner
    from tuning_db import Store

COLUMNS = ("operator", "default_s", "best_s", "ratio", "low", "high", "blocks", "verdict", "choice")


def run(plan: Plan, form: str) -> None:
    """Tune every operator of the plan's checkpoint that has a choice here."""
    from autotune.cli.search import log_folder, measuring
    from autotune.kernel_search import prepare, tuned

    setting = prepare(plan)
    start = time.monotonic()
    with measuring(setting.plan) as store:
        _announce(setting, store.where)
        rows = _rows(setting, store, log_folder("k1:kernels"))
        table = tuned(plan, store)
    output.emit(rows, COLUMNS, form, "kernels")
    better = sum(row["verdict"] == "better" for row in rows)
    output.note(
        f"{better} of {len(rows)} operators got faster; {time.monotonic() - start:.0f} s. "
        f"Engines here now look up {len(table)} operators; a search with them is one of another build."
    )
    output.note("next: autotune search")


def _rows(setting: KernelSetting, store: Store, logs: Path) -> list[dict[str, Any]]:
    from autotune.outcome import EngineError, Status

    rows: list[dict[str, Any]] = []
    without: set[tuple[str, int, int]] = set()
    live = output.Live()
    for number, operator in enumerate(setting.operators, 1):
        weight = (operator.dtype, operator.outputs, operator.inputs)
        if weight in without:
            continue
        live.show(f"{number}/{len(setting.operators)} {operator.key}")
        try:
            with setting.tuner(operator, store, logs) as tuner:
                if tuner.space.size() == 1:
                    without.add(weight)
                    continue
                rows.append(_tune(tuner, operator))
        except EngineError as error:
            if error.status != Status.UNSUPPORTED:
                raise
            without.add(weight)
            continue
        live.clear()
        output.note(_line(rows[-1]))
    live.clear()
    for dtype in sorted({dtype for dtype, _, _ in without}):
        count = sum(kind == dtype for kind, _, _ in without)
        output.note(f"{dtype}: {count} weights have no choice on this machine")
    return rows


def _tune(tuner: Tuner, operator: Operator) -> dict[str, Any]:
    """Search and confirm one operator; its row."""
    from autotune.decision import TuneError

    row: dict[str, Any] = {"operator": operator.key}
    try:
        for _ in tuner.search():
            pass
        if not tuner.finalists():
            return row | {"verdict": "default", "choice": _refused(tuner)}
        for _ in tuner.confirm():
            pass
        return row | _decided(tuner, tuner.result())
    except TuneError as error:
        if error.code != 3:
            raise
        return row | {"verdict": "failed", "choice": str(error).splitlines()[0]}


def _refused(tuner: Tuner) -> str:
    """Why no choice but the default was left."""
    failed = [trial for trial in tuner.stored("search") if trial.status != "ok"]
    return f"{failed[0].status}: {failed[0].reason.splitlines()[0]}" if failed else "there is no other choice"


def _decided(tuner: Tuner, result: Result) -> dict[str, Any]:
    from autotune.cli.standings import differing
    from search_spaces import Config

    best, ratio = result.winner.standings[0], result.winner.ratio
    mine = next(t for t in result.trials if t.config_key == best.config_key)
    return {
        "default_s": _median(result, result.default.key),
        "best_s": _median(result, best.config_key),
        "ratio": ratio.mean,
        "low": ratio.low,
        "high": ratio.high,
        "blocks": ratio.n,
        "verdict": str(best.verdict),
        "choice": differing(Config(mine.config), result.default),
        "backend": tuner.space.engine,
    }


def _median(result: Result, key: str) -> float:
    """Seconds of one configuration, the median over its blocks."""
    from statistics import median

    return median(trial.metrics["op_s"] for trial in result.trials if trial.config_key == key)


def _line(row: dict[str, Any]) -> str:
    if "ratio" not in row:
        return f"{row['operator']:<36} {row['verdict']}: {row['choice']}"
    times = f"{output.quantity(row['default_s'], 's'):>8} → {output.quantity(row['best_s'], 's'):>8}"
    ratio = f"×{row['ratio']:.2f} [{row['low']:.2f}, {row['high']:.2f}]"
    return f"{row['operator']:<36} {times}  {ratio:<22} {row['verdict']:<8} {row['choice']}"


def _announce(setting: KernelSetting, where: str) -> None:
    output.note(
        f"{len(setting.operators)} operators of {setting.model.name} on {setting.machine.label}, "
        f"{setting.plan.budget} trials each; database {where}"
    )


def show_plan(plan: Plan) -> None:
    """What would be tuned; measures nothing."""
    from autotune.kernel_search import prepare
    from search_spaces.kernels import SPACES

    setting = prepare(plan)
    for name, where in setting.plan.origin.items():
        click.echo(f"{name:<16} {getattr(setting.plan, name)!s:<28} {where}")
    click.echo(f"\n{len(setting.operators)} operators:")
    for operator in setting.operators:
        scenario = setting.scenario(operator)
        click.echo(f"  {operator.key:<36} weights from {scenario.workload['name']}")
    for space in SPACES.values():
        click.echo(f"\n{space.engine}: at most {space.size():,} choices")
        for knob in space.knobs:
            click.echo(f"  {knob.name:<8} {' '.join(map(str, knob.domain.values)):<34} {knob.sentence}")
