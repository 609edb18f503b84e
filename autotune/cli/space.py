"""`autotune space` and `autotune probe`: what may vary on this machine and why not more; what this machine is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from autotune.cli import output


@click.command(epilog="\b\nExample: autotune space --format md\n")
@click.option("--model", help="Checkpoint folder. [default: the reference model in the package]")
@click.option("--engine", help="Engine. [default: native]")
@click.option("--workload", help="chat, long, shared, task, or a TOML file. [default: task]")
@click.option("--plan", "file", type=click.Path(path_type=Path), help="TOML file with [knobs] limits.")
@output.format_option
def space(file: Path | None, form: str, **flags: Any) -> None:
    """List the knobs that are left on this machine, and every value that was removed with its reason."""
    with output.clear_errors():
        from autotune.plan import resolve
        from autotune.setting import prepare

        found = prepare(resolve(flags, os.environ, file)).space
        rows = [
            {
                "dimension": knob.group,
                "knob": knob.name,
                "values": " ".join(map(str, knob.domain.values)),
                "default": str(knob.default),
                "removed": "; ".join(f"{r.value}: {r.reason}" for r in found.removals if r.knob == knob.name),
                "meaning": knob.sentence,
            }
            for knob in found.knobs
        ]
        output.emit(rows, ["dimension", "knob", "values", "default", "removed", "meaning"], form, "knobs")
        output.note(f"{len(found.free())} free knobs, at most {found.size():,} configurations")


@click.command(epilog="\b\nExample: autotune probe\n")
@output.format_option
def probe(form: str) -> None:
    """Show the facts by which this machine is known in the database."""
    with output.clear_errors():
        from autotune import hardware
        from tuning_db import Hardware

        found = hardware.probe()
        known = Hardware(found.kind, found.facts)
        rows = [{"fact": "key", "value": known.key}, {"fact": "label", "value": known.label}]
        rows += [{"fact": name, "value": value} for name, value in found.facts.items()]
        output.emit(rows, ["fact", "value"], form, "facts")
        for line in found.notes:
            output.note(line)
