"""`autotune space` and `autotune probe`: what may vary on this machine and why not more; what this machine is."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autotune.cli import output

if TYPE_CHECKING:
    from autotune.offer import Offer

COLUMNS = ("dimension", "knob", "values", "default", "removed", "meaning")
OVER = "out of memory"
EPILOG = """\b
--hardware names machines that need not be here, such as 4xA100-80GB, 8xA100-40GB or 4xA100-80GB-PCIe.
Nothing is launched.

Example: autotune space --engine vllm --hardware 4xA100-80GB --model glm-5.3-flash
"""


@click.command(epilog=EPILOG)
@click.option(
    "--model",
    help="Checkpoint folder, a config.json alone, or glm-5.3-flash. [default: the reference model in the package]",
)
@click.option("--engine", help="Engine: native, vllm, sglang or llamacpp. [default: native]")
@click.option("--hardware", default="", metavar="NAME", help="COUNTxDEVICE to narrow for. [default: this machine]")
@click.option("--workload", help="chat, long, shared, task, or a TOML file. [default: task]")
@click.option("--plan", "file", type=click.Path(path_type=Path), help="TOML file with [knobs] limits.")
@click.option("--db", help="Database whose failed trials exclude more. [default: the platform's data folder]")
@output.format_option
def space(file: Path | None, hardware: str, form: str, **flags: Any) -> None:
    """List the knobs that are left, every value that was removed with its reason, and which widths fit the memory."""
    with output.clear_errors():
        from autotune.offer import offer
        from autotune.plan import resolve

        found = offer(resolve(flags, os.environ, file), hardware)
        rows = _knobs(found)
        if form == "json":
            click.echo(json.dumps(_document(found, rows), indent=2, ensure_ascii=False))
            return
        output.emit(rows, COLUMNS[:4] if form == "table" else COLUMNS, form, "knobs")
        if form in ("table", "md"):
            _sections(found, form)
        output.note(f"{len(found.space.free())} free knobs, {_count(found)}")


def _knobs(found: Offer) -> list[dict[str, Any]]:
    return [
        {
            "dimension": knob.group,
            "knob": knob.name,
            "values": " ".join(map(str, knob.domain.values)),
            "default": str(knob.default),
            "removed": "; ".join(f"{r.value}: {r.reason}" for r in found.space.removals if r.knob == knob.name),
            "meaning": knob.sentence,
        }
        for knob in found.space.knobs
    ]


def _count(found: Offer) -> str:
    most = found.space.size()
    valid = f"about {_digits(found.share * most)} ({found.share:.1%}) break no rule"
    return f"at most {most:,} configurations, of which {valid}"


def _digits(value: float) -> str:
    return f"{value:.1e}" if value >= 1e6 else f"{value:,.0f}"


def _document(found: Offer, rows: list[dict[str, Any]]) -> dict[str, Any]:
    from dataclasses import asdict

    memory = found.memory
    return {
        "schema": output.SCHEMA,
        "engine": found.engine,
        "model": found.model.name,
        "hardware": asdict(found.machine) if found.machine is not None else None,
        "overhead": asdict(memory.overhead) if memory is not None else None,
        "knobs": rows,
        "removed": [{"knob": r.knob, "value": r.value, "reason": r.reason} for r in found.space.removals],
        "rules": [{"rule": r.name, "sentence": r.sentence} for r in found.space.rules],
        "learned": list(found.learned),
        "starts": [{"name": p.name, "sentence": p.sentence, "values": dict(p.values)} for p in found.starts],
        "configurations": {"at_most": found.space.size(), "valid_share": found.share},
        "fits": [asdict(fit) for fit in found.fits],
    }


def _sections(found: Offer, form: str) -> None:
    """What was removed, rules, what was learned, and the matrix of fits."""
    if form == "table" and found.space.removals:
        click.echo("\nremoved:")
        for gone in found.space.removals:
            click.echo(f"  {gone.knob}={gone.value}: {gone.reason}")
    click.echo("\nrules between knobs:")
    for rule in found.space.rules:
        if rule.sentence not in found.learned:
            click.echo(f"  {rule.name}: {rule.sentence}")
    if found.learned:
        click.echo("\nlearned from failed trials:")
        for sentence in found.learned:
            click.echo(f"  {sentence}")
    if found.starts:
        click.echo("\nmeasured first, beside the default:")
        for recipe in found.starts:
            click.echo(f"  {recipe.name}: {recipe.sentence}")
    if not found.fits or found.machine is None or found.memory is None:
        return
    usual = "8 sequences, 3 drafted tokens where there is a draft layer, gmu 0.95"
    click.echo(f"\nfits of {found.model.name} on {found.machine.label}")
    click.echo(f"{_overhead(found)}; {usual if found.engine == 'vllm' else 'all else as by default'}")
    click.echo("GiB of weights on the fullest device → tokens of KV cache, all replicas (* not allowed, see below)\n")
    layouts = list(dict.fromkeys(fit.layout for fit in found.fits))
    table: dict[str, dict[str, Any]] = {}
    for fit in found.fits:
        table.setdefault(fit.bits, {"bits": fit.bits})[fit.layout] = _fit(fit)
    output.emit(list(table.values()), ["bits", *layouts], form, "fits")
    for reason in dict.fromkeys(fit.reason for fit in found.fits if fit.reason not in ("", OVER)):
        click.echo(f"* {reason}")


def _overhead(found: Offer) -> str:
    """``6 GiB beside weights and cache a device (assumed: …)``."""
    assert found.memory is not None
    overhead = found.memory.overhead
    demand = found.memory.demand(found.space.default())
    source = f"learned from {overhead.trials} trials" if overhead.trials else "assumed: no trial was measured yet"
    total = (overhead.bytes(demand.features) + demand.graphs) / 2**30
    return f"{total:.3g} GiB a rank beside weights and cache ({source})"


def _fit(fit: Any) -> str:
    if fit.reason == OVER:
        return f"- ({fit.weight_bytes / 2**30:.1f})"
    tokens = f"{fit.kv_tokens / 1e6:.2f} M" if fit.kv_tokens >= 10_000 else f"{fit.kv_tokens} "
    return f"{fit.weight_bytes / 2**30:.1f} → {tokens}" + ("*" if fit.reason else "")


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
