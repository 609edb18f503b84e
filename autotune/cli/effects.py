"""`autotune effects`: the measured effect of each dimension on speed and quality, around the default and the winner."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autotune.cli import output

if TYPE_CHECKING:
    from autotune.effects import Effect
    from search_spaces import Config

COLUMNS = ("dimension", "change", "alone", "kl_alone", "taken_back", "kl_taken_back")
EPILOG = """\b
Run it after a search, with the same options. Resumes like a search. Columns: the winner's values of one
dimension alone on the default (speed ratio to the default with its 95 % interval, KL), and the winner with that
dimension taken back to the default (ratio to the winner, KL).

Example: autotune effects --format md
"""


@click.command(epilog=EPILOG)
@click.option("--model", help="Checkpoint folder. [default: the reference model in the package]")
@click.option("--workload", help="chat, long, shared, task, or a TOML file. [default: task]")
@click.option("--blocks", type=click.IntRange(1, 100), default=5, show_default=True, help="Interleaved blocks.")
@click.option("--values", is_flag=True, help="Every single knob value instead, around the default.")
@click.option("--db", help="SQLite file or database URL. [default: the platform's data folder]")
@click.option("--plan", "file", type=click.Path(path_type=Path), help="The search's plan file.")
@output.format_option
def effects(file: Path | None, blocks: int, values: bool, form: str, model: str, workload: str, db: str) -> None:
    """Measure what each dimension does: changed alone from the default, and taken back alone from the winner."""
    with output.clear_errors():
        from autotune.cli.search import study_of
        from autotune.cli.standings import differing
        from autotune.effects import by_dimension, by_value, measure, table
        from autotune.plan import resolve

        flags = {"model": model, "workload": workload, "db": db}
        with study_of(resolve(flags, os.environ, file)) as (tuner, setting):
            result = tuner.result()
            best = _best(result)
            space, default = setting.space, result.default
            changes = by_value(space, default) if values else by_dimension(space, default, best)
            for trial in measure(tuner, changes, blocks):
                output.note(f"block {trial.block}  {trial.status:<8} {differing(trial.config, default)}")
            found = table(changes, tuner.stored("effects"), setting.objective)
        output.emit(_join(found, default), COLUMNS, form, "effects")


def _best(result: Any) -> Config:
    """The leading finalist, proved better or not."""
    from search_spaces import Config

    first = result.winner.standings[0].config_key
    return Config(next(t.config for t in result.trials if t.config_key == first))


def _join(effects: list[Effect], default: Config) -> list[dict[str, Any]]:
    """One row a change, its two bases side by side."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for effect in effects:
        change = effect.change
        row = rows.setdefault((change.dimension, change.what), {"dimension": change.dimension, "change": change.what})
        side = "alone" if change.base == default else "taken_back"
        ratio = effect.ratio
        row[side] = f"×{ratio.mean:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]" if ratio else effect.status
        row[f"kl_{side}"] = effect.kl
    return list(rows.values())
