"""`autotune search`: draws a study while `tune` runs it, and ends with the decision and the next command to type."""

from __future__ import annotations

import itertools
import os
import shlex
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from autotune.cli import output
from autotune.cli.standings import differing, report

if TYPE_CHECKING:
    from autotune.bench import Bench
    from autotune.ladder import Rung
    from autotune.plan import Plan
    from autotune.setting import Setting
    from autotune.tune import Tuner
    from tuning_db import Store, Trial

EPILOG = """\b
The same command resumes an interrupted search and ends at exactly the budget.
Every option can also stand in the plan file, or in AUTOTUNE_<OPTION>.

Example: autotune search --budget 200 --workload task
"""


@click.command(epilog=EPILOG)
@click.option(
    "--target",
    type=click.Choice(["engine", "kernels"]),
    help="What to tune: the engine's knobs, or the "
    "meta-parameters of its kernels, operator by operator. [default: engine]",
)
@click.option("--only", metavar="TEXT", help="Only the kernels whose name contains this, such as int8 or 512x256/1.")
@click.option(
    "--budget",
    type=int,
    help="Counted search trials in all, over every run of this command; with --target "
    "kernels for each operator. [default: 200, kernels 24]",
)
@click.option("--model", help="Checkpoint folder. [default: the reference model in the package]")
@click.option("--engine", help="Engine to tune: native, vllm, sglang or llamacpp. [default: native]")
@click.option(
    "--engine-command",
    metavar="COMMAND",
    help="How to run a server, as in 'docker run …' or a path. [default: its usual name]",
)
@click.option(
    "--bits",
    type=click.Choice(["ladder", "groups"]),
    help="Search widths as one knob, a ladder of allocations that `autotune bits` shows, or one for each kind of "
    "weight. [default: ladder]",
)
@click.option(
    "--sampler",
    type=click.Choice(["gp", "tpe"]),
    help="What chooses: a Gaussian process over valid configurations, or Optuna's TPE. [default: gp]",
)
@click.option("--workload", help="chat, long, shared, task, or a TOML file. [default: task]")
@click.option(
    "--objective",
    help="Metric to improve, or several with commas between them (latency, throughput, quality, memory and cost are "
    "words for one). [default: tasks_per_min for task, else output_tok_s]",
)
@click.option(
    "--max-kl", type=float, help="Quality gate: mean KL to the full-width model, nats a token. [default: 0.02]"
)
@click.option("--max-perplexity", type=float, help="Quality gate: perplexity factor to it. [default: 1.01]")
@click.option(
    "--slo", multiple=True, metavar="LIMIT", help="A constraint such as 'ttft_p99<500ms'; may be given several times."
)
@click.option(
    "--time", metavar="DURATION", help="End this run of the command after 2h, 30m or 90s. [default: no limit]"
)
@click.option("--precision", type=float, help="Repeat each measurement until its interval is this narrow, as 0.02.")
@click.option(
    "--finalists", type=int, help="Most configurations re-measured against the default. [default: 8, kernels 2]"
)
@click.option("--blocks", type=int, help="Most interleaved blocks of that re-measurement. [default: 15, kernels 5]")
@click.option("--seed", type=int, help="Seed of prompts and sampler. [default: 0]")
@click.option("--db", help="SQLite file or database URL. [default: the platform's data folder]")
@click.option(
    "--plan", "file", type=click.Path(path_type=Path), help="TOML file with these options and [knobs] limits."
)
@click.option(
    "--dry-run", is_flag=True, help="Show the resolved plan, the space and what was removed from it; measure nothing."
)
@output.format_option
def search(file: Path | None, dry_run: bool, form: str, **flags: Any) -> None:
    """Find the best configuration: default first, search, then confirm the finalists against the default."""
    with output.clear_errors():
        from autotune.plan import resolve
        from autotune.setting import prepare

        plan = resolve(flags, os.environ, file)
        if plan.target == "kernels":
            from autotune.cli import kernels

            kernels.show_plan(plan) if dry_run else kernels.run(plan, form)
            return
        if plan.only:
            raise click.UsageError("--only names kernels; give --target kernels too")
        if dry_run:
            _show_plan(prepare(plan))
            return
        _run(plan, form)


def _run(plan: Plan, form: str) -> None:
    with study_of(plan) as (tuner, setting):
        _announce(setting, tuner.store.where)
        _draw(tuner, setting)
        result = tuner.result()
        report(result, setting, form)
        drift = tuner.drift()
        if drift is not None:
            output.note(drift.sentence(result.band))
        output.note("next: " + next_command(plan))


@contextmanager
def study_of(plan: Plan) -> Iterator[tuple[Tuner, Setting]]:
    """A plan's tuner, on an engine with whatever kernels were tuned here; see `measuring`."""
    from autotune import hints, kernel_search, ladder
    from autotune.launches import Launches
    from autotune.plan import seconds
    from autotune.setting import make_bench, prepare
    from autotune.slo import parse
    from autotune.tune import Study, Tuner
    from search_spaces.presets import starts

    with measuring(plan) as store:
        setting = prepare(plan, kernel_search.tuned(plan, store))
        key = store.ensure(setting.scenario)
        with closing(Launches(setting.runtime, setting.space)) as launches:
            bench = make_bench(setting, store, log_folder(key), launches)
            setting, rungs = _laddered(setting, bench, store)
            candidates = [*hints.stored(store, setting.scenario, setting.space, setting.objective),
                          *ladder.candidates(setting.space, rungs, plan.max_kl),
                          *hints.presets(setting.space, starts(setting.space))]  # fmt: skip
            study = Study(
                key, setting.objective, plan.budget, plan.seed, plan.finalists, plan.blocks,
                slos=tuple(map(parse, plan.slo)), seconds=seconds(plan.time), candidates=tuple(candidates),
                sampler=plan.sampler,
            )  # fmt: skip
            yield Tuner(study, replace(bench, space=setting.space), store), setting


def _laddered(setting: Setting, bench: Bench, store: Store) -> tuple[Setting, Sequence[Rung]]:
    """``setting`` with all widths as one knob, and its rungs; as it is where no ladder is wanted or possible."""
    from autotune import ladder
    from autotune.outcome import EngineError
    from autotune.setting import StoreCache

    plan = setting.plan
    if plan.bits != "ladder" or (why := ladder.possible(setting)):
        if plan.bits == "ladder" and plan.origin["bits"] != "default":
            output.note(f"widths are searched by group: {why}")
        return setting, ()
    try:
        rungs = ladder.build(setting, bench, StoreCache(store), output.note)
    except EngineError as error:
        output.note(f"no ladder of bit widths, so they are searched by group: {error}")
        return setting, ()
    return replace(setting, space=ladder.narrowed(setting.space, rungs)), rungs


@contextmanager
def measuring(plan: Plan) -> Iterator[Store]:
    """The plan's database, with this process alone on the machine and signals turned into a clean ending."""
    from tuning_db import open_store

    with _interruptible() as stopped, open_store(plan.db or None) as store, _alone():
        try:
            yield store
        except KeyboardInterrupt:
            output.note(
                f"\ninterrupted ({stopped()}); every finished trial is kept. The same command goes on from here."
            )
            raise SystemExit(130) from None


def _draw(tuner: Tuner, setting: Setting) -> None:
    """One permanent line a trial, one live line with the estimate."""
    live, plan, objective = output.Live(), setting.plan, setting.objective
    default = setting.space.default()
    base: float | None = None
    best: float | None = None
    done = 0
    for trial in tuner.stored("search"):
        done += 1
        base, best = _standing(trial, default.key, objective, base, best)
    if done:
        output.note(f"{done} of {plan.budget} trials are already in the database.")
    start, first = time.monotonic(), done
    for trial in itertools.chain(tuner.screen(), _checked(tuner), tuner.search()):
        counts = trial.stage == "search"
        done += counts and trial.counted
        base, best = _standing(trial, default.key, objective, base, best)
        live.clear()
        output.note(
            f"{f'{done:>4}/{plan.budget}' if counts else trial.stage:<8}  {_line(trial, default, objective, base)}"
        )
        each = (time.monotonic() - start) / max(done - first, 1)
        minutes = each * (plan.budget - done) / 60
        live.show(f"search {done}/{plan.budget} · best {_against(best, base)} · {minutes:.1f} min left")
    live.clear()
    if tuner.ending is not None:
        output.note(tuner.ending.sentence)
    finalists = tuner.finalists()
    if finalists:
        output.note(f"confirming {len(finalists)} finalists against the default, at most {plan.blocks} blocks")
    for trial in tuner.confirm():
        live.clear()
        output.note(f"block {trial.block}  {_line(trial, default, objective, None)}")


def _checked(tuner: Tuner) -> Iterator[Trial]:
    """Say what the A/A check found, between screen and search; yields nothing."""
    check = tuner.self_check()
    if check is not None:
        output.note(check.sentence())
    yield from ()


def _standing(
    trial: Trial, default_key: str, objective: Any, base: float | None, best: float | None
) -> tuple[float | None, float | None]:
    value = objective.goodness(trial.metrics)
    if value is None or trial.status != "ok":
        return base, best
    if trial.config_key == default_key:
        base = value
    return base, value if best is None else max(best, value)


def _against(value: float | None, base: float | None) -> str:
    import math

    return f"×{math.exp(value - base):.2f} of the default" if value is not None and base is not None else "-"


def _line(trial: Trial, default: Mapping[str, Any], objective: Any, base: float | None) -> str:
    value = objective.raw(trial.metrics)
    seconds = sum(trial.seconds.values())
    shown = f"{output.cell(value, objective.metric):>9}" if value is not None else f"{'-':>9}"
    good = objective.goodness(trial.metrics)
    factor = _against(good, base).split(" ")[0] if base is not None else ""
    reason = "" if trial.status == "ok" else f"  [{trial.reason.splitlines()[0] if trial.reason else ''}]"
    for note in (trial.provenance.get("candidate"), *trial.provenance.get("notes", ())):
        reason += f"  [{note}]" if note else ""
    return f"{trial.status:<9} {shown} {factor:>6} {seconds:5.1f} s  {differing(trial.config, default)}{reason}"


def next_command(plan: Plan) -> str:
    """What exports this search: it needs the model and the database again unless they are found without a flag."""
    words = ["autotune", "export", "-o", "best.json"]
    for key in ("model", "db"):
        where = plan.origin[key]
        if where != "default" and not where.startswith("AUTOTUNE_"):
            words += [f"--{key}", str(getattr(plan, key))]
    for slo in plan.slo:
        words += ["--slo", slo]
    return shlex.join(words)


def _announce(setting: Setting, url: str) -> None:
    space = setting.space
    output.note(
        f"{setting.model.name} on {setting.scenario.hardware.label}, engine {setting.plan.engine}, "
        f"workload {setting.workload.name}, objective {setting.objective.metric}"
    )
    output.note(f"{len(space.free())} free knobs, at most {space.size():,} configurations; database {url}")
    table = setting.scenario.engine_build.get("kernels")
    if table is not None:
        output.note(f"the engine runs with tuned kernels ({table}); their table is part of its build")


def _show_plan(setting: Setting) -> None:
    plan, space = setting.plan, setting.space
    for name, where in plan.origin.items():
        click.echo(f"{name:<16} {getattr(plan, name)!s:<28} {where}")
    click.echo(f"\nspace: {len(space.free())} free knobs, at most {space.size():,} configurations")
    for knob in space.knobs:
        click.echo(f"  {knob.group:<10} {knob.name:<20} {' '.join(map(str, knob.domain.values))}")
    for removal in space.removals:
        click.echo(f"  removed    {removal.knob}={removal.value}: {removal.reason}")
    click.echo("\ncommand of the default:\n  " + " ".join(setting.runtime.command(space.default())))


def log_folder(scenario_key: str) -> Path:
    """Where the engine's logs of a scenario go."""
    import platformdirs

    folder = Path(platformdirs.user_log_dir("autotune")) / scenario_key[3:11]
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def _alone() -> Iterator[None]:
    """Two searches on one machine would measure each other: the second is refused."""
    import fcntl

    import platformdirs

    path = Path(platformdirs.user_data_dir("autotune")) / "measuring.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+")
    except OSError as error:
        output.fail(f"cannot write {path}: {error.strerror}; set XDG_DATA_HOME to a folder you own", 2)
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            output.fail(
                f"another search (process {file.read().strip()}) is measuring on this machine; wait for it to end", 1
            )
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


@contextmanager
def _interruptible() -> Iterator[Any]:
    """SIGTERM ends the search as Ctrl-C does; a second signal ends the process at once (its engine dies with it)."""
    seen: list[str] = []

    def handle(number: int, frame: FrameType | None) -> None:
        seen.append(signal.Signals(number).name)
        if len(seen) > 1:
            os._exit(130)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: seen[0] if seen else "interrupt"
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
