"""`autotune capacity`: the highest request rate, or concurrency, at which one configuration keeps its SLOs."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autotune.cli import output

if TYPE_CHECKING:
    from autotune.bench import Bench
    from autotune.capacity import Step
    from autotune.slo import Slo
    from search_spaces import Config

COLUMNS = ("load", "verdict", "findings")
EPILOG = """\b
The load is doubled until an SLO is missed, then bisected to 10 %, on one launch. A percentile is only met on as many
requests as MLPerf's early-stopping rule asks for; on fewer it is unproven. Exit code 3 where no load keeps them.

Example: autotune capacity best.json --slo 'ttft_p99<500ms' --workload chat
"""


@click.command(epilog=EPILOG)
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.option("--slo", multiple=True, required=True, metavar="LIMIT", help="A limit such as 'ttft_p99<500ms'; repeat.")
@click.option("--by", type=click.Choice(["rate", "concurrency"]), default="rate", show_default=True,
              help="What grows: requests a second that arrive at random, or conversations under way.")  # fmt: skip
@click.option(
    "--start", type=click.FloatRange(min=0, min_open=True), default=1.0, show_default=True, help="First load."
)
@click.option("--steps", type=click.IntRange(1, 50), default=10, show_default=True, help="Loads to try at most.")
@click.option("--conversations", type=click.IntRange(min=1), help="Of each load. [default: the workload's]")
@click.option("--workload", help="chat, long, shared, task, or a TOML file. [default: chat]")
@click.option("--model", help="Checkpoint folder. [default: FILE's, else the reference model]")
@click.option("--engine", help="Engine: native, vllm or llamacpp. [default: FILE's, else native]")
@click.option("--engine-command", metavar="COMMAND", help="How to run a server. [default: its usual name]")
@output.format_option
def capacity(
    file: Path | None, slo: tuple[str, ...], by: str, start: float, steps: int, conversations: int | None, form: str,
    **flags: Any,
) -> None:  # fmt: skip
    """Find the highest load at which the configuration in FILE (an export), or the default one, keeps every --slo."""
    with output.clear_errors():
        from autotune.capacity import highest, ladder
        from autotune.cli.search import log_folder, measuring
        from autotune.decision import TuneError
        from autotune.exporters.json_file import read
        from autotune.launches import Launches
        from autotune.plan import resolve
        from autotune.setting import make_bench, prepare
        from autotune.slo import parse

        given = read(file) if file is not None else None
        if given is not None:
            flags["engine"], flags["model"] = flags["engine"] or given.engine, flags["model"] or given.folder
        flags["workload"] = flags["workload"] or os.environ.get("AUTOTUNE_WORKLOAD") or "chat"
        slos, plan = [parse(text) for text in slo], resolve(flags, os.environ)
        with measuring(plan) as store:
            setting = prepare(plan, given.kernels if given is not None else None)
            config = setting.whole.complete(dict(given.config)) if given is not None else setting.space.default()
            with closing(Launches(setting.runtime, setting.whole)) as launches:
                bench = make_bench(setting, store, log_folder(setting.scenario.key), launches)
                count = conversations or bench.workload.conversations
                bench = replace(bench, quality=None, workload=replace(bench.workload, conversations=count))
                measure = _measure(bench, config, slos, by)
                found = []
                for step in ladder(measure, start, steps, whole=by == "concurrency"):
                    output.note(_line(step, by))
                    found.append(step)
        best = highest(found)
        output.emit([_row(step) for step in found], list(COLUMNS), form, "capacity")
        if best is None:
            raise TuneError(f"no {by} from {min(step.load for step in found):.3g} on keeps every SLO", 3)
        output.note(f"highest {by}: {best.load:.3g}" + ("" if best.proven else ", unproven on so few requests"))


def _measure(bench: Bench, config: Config, slos: list[Slo], by: str) -> Any:
    """What measures one load, each on prompts of its own."""
    from autotune.capacity import Step
    from autotune.slo import Run, judge

    seeds = iter(range(1_000_000))

    def measure(load: float) -> Step:
        rate, together = (load, 0) if by == "rate" else (0.0, int(load))
        tried = replace(bench, workload=replace(bench.workload, rate=rate, concurrency=together))
        outcome = tried.measure(config, next(seeds), "capacity", fresh=False)
        reason = "" if outcome.status == "ok" else outcome.reason
        reason = reason or outcome.disturbed
        findings = tuple(judge(slo, [Run(outcome.metrics, outcome.timelines)]) for slo in slos)
        return Step(load, findings, reason)

    return measure


def _line(step: Step, by: str) -> str:
    said = step.reason.splitlines()[0] if step.reason else "; ".join(f.sentence() for f in step.findings)
    return f"{by} {step.load:.4g}: {'kept' if step.kept else 'missed'}  [{said}]"


def _row(step: Step) -> dict[str, Any]:
    from autotune.slo import summary

    return {
        "load": step.load,
        "verdict": "failed" if step.reason else summary(step.findings),
        "findings": step.reason or "; ".join(finding.sentence() for finding in step.findings),
    }
