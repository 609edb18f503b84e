"""`autotune effects`: the measured effect of each dimension on speed and quality, around the default and the winner."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from autotune.cli import output

COLUMNS = ("dimension", "knob", "value", "at_default", "kl_at_default", "at_winner", "kl_at_winner")
EPILOG = """\b
Run it after a search, with the same options. Resumes like a search.

Example: autotune effects --blocks 3 --format md
"""


@click.command(epilog=EPILOG)
@click.option("--model", help="Checkpoint folder. [default: the reference model in the package]")
@click.option("--workload", help="chat, long, shared, task, or a TOML file. [default: task]")
@click.option("--blocks", type=int, default=3, show_default=True, help="Interleaved blocks.")
@click.option("--db", help="SQLite file or database URL. [default: the platform's data folder]")
@click.option("--plan", "file", type=click.Path(path_type=Path), help="The search's plan file.")
@output.format_option
def effects(file: Path | None, blocks: int, form: str, **flags: Any) -> None:
    """Measure every knob value by itself: changed from the default, and changed from the winner."""
    with output.clear_errors():
        from autotune.cli.search import differing, study_of
        from autotune.effects import measure, table
        from autotune.plan import resolve

        with study_of(resolve(flags, os.environ, file)) as (tuner, setting):
            result = tuner.result()
            bases = {"default": result.default}
            if result.config != result.default:
                bases["winner"] = result.config
            for trial in measure(tuner, list(bases.values()), blocks):
                output.note(f"block {trial.block}  {trial.status:<8} {differing(trial.config, result.default)}")
            rows = table(setting.space, bases, tuner.stored("effects"), setting.objective)
        output.emit(_join(rows), COLUMNS, form, "effects")


def _join(effects: list[Any]) -> list[dict[str, Any]]:
    """One row a knob value, the two bases side by side."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for effect in effects:
        row = rows.setdefault(
            (effect.knob, str(effect.value)),
            {"dimension": effect.group, "knob": effect.knob, "value": str(effect.value)},
        )
        ratio = effect.ratio
        row[f"at_{effect.base}"] = (
            f"×{ratio.mean:.2f} [{ratio.low:.2f}, {ratio.high:.2f}] {effect.verdict}" if ratio else effect.status
        )
        row[f"kl_at_{effect.base}"] = effect.kl
    return sorted(rows.values(), key=lambda row: (row["dimension"], row["knob"]))
