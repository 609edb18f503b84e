"""`autotune export` and `autotune serve`: this hardware's best configuration, written to a file and run from one."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autotune.cli import output

if TYPE_CHECKING:
    from autotune.exporters import Export
    from autotune.runtimes.native.llm import LLM
    from autotune.slo import Slo
    from tuning_db import Scenario, Store

EXPORT_EPILOG = """\b
Takes the latest confirmed search of this hardware that fits the options.
Exit code 3: there is none.

Example: autotune export -o best.json
"""


@click.command(epilog=EXPORT_EPILOG)
@click.option("-o", "--output", "file", default="-", show_default=True, help="File to write; - is standard output.")
@click.option(
    "--to", type=click.Choice(["json", "shell", "vllm-yaml"]), default="json", show_default=True, help="What to write."
)
@click.option("--hardware", help="Only this hardware: key prefix or part of its label. [default: this machine]")
@click.option("--model", envvar="AUTOTUNE_MODEL", help="Checkpoint folder. [default: the reference model]")
@click.option("--workload", envvar="AUTOTUNE_WORKLOAD", help="Only this workload: name or TOML file.")
@click.option("--engine", envvar="AUTOTUNE_ENGINE", help="Only this engine.")
@click.option("--objective", envvar="AUTOTUNE_OBJECTIVE", help="Only searches for this metric.")
@click.option("--slo", multiple=True, metavar="LIMIT", help="Decide under these SLOs. [default: the search's own]")
@click.option("--db", envvar="AUTOTUNE_DB", help="SQLite file or database URL. [default: the platform's data folder]")
def export(file: str, to: str, model: str | None, slo: tuple[str, ...], db: str | None, **only: str | None) -> None:
    """Write the best confirmed configuration, with the evidence for it."""
    with _clear_errors():
        from autotune.exporters import exporter
        from autotune.setting import reference_model
        from autotune.slo import parse
        from tuning_db import open_store

        with open_store(db, readonly=True) as store:
            found = latest(store, Path(model) if model else reference_model(), only, [parse(text) for text in slo])
        text = next(iter(exporter(to).render(found).values()))
        _write(file, text, executable=to == "shell")
        _summary(found, file)


def latest(store: Store, folder: Path, only: Mapping[str, str | None], slos: Sequence[Slo] = ()) -> Export:
    """The export of the latest decided confirmation of the model in ``folder``. Raises TuneError(code 3)."""
    from autotune import model as models
    from autotune.decision import TuneError, decided
    from autotune.exporters.gather import gather, plain

    identity = plain(models.served(folder).identity())
    fitting = _fitting(store.scenarios(), only)
    mine = [scenario for scenario in fitting if plain(scenario.model) == identity]
    rounds = [
        (max(trial.ended_at for trial in result.trials), result, scenario)
        for scenario in mine
        for result in decided(store.trials(scenario.key, stage="confirm"), scenario, store, slos)
    ]
    if not rounds:
        raise TuneError(_nothing(fitting, bool(mine), identity, folder, only), 3)
    _, result, scenario = max(rounds, key=lambda row: row[0])
    found = gather(result.winner, result.default.key, result.trials, scenario, folder.resolve())
    table = scenario.engine_build.get("kernels")
    if table is None:
        return found
    kept = store.reference(str(table))
    if kept is None:
        raise TuneError(f"the tuned kernels {table} of this search are not in the database; search again", 3)
    return replace(found, kernels=json.loads(kept.blob))


def _fitting(scenarios: list[Scenario], only: Mapping[str, str | None]) -> list[Scenario]:
    wanted, workload = only.get("hardware"), only.get("workload")
    key = wanted or _this_machine()
    name = _workload_name(workload) if workload else None

    def fits(scenario: Scenario) -> bool:
        machine = scenario.hardware
        return (
            not scenario.engine.startswith("kernels/")
            and (machine.key.startswith(key) or (bool(wanted) and key.lower() in machine.label.lower()))
            and only.get("engine") in (None, scenario.engine)
            and only.get("objective") in (None, scenario.objective.get("metric"))
            and name in (None, scenario.workload.get("name"))
        )

    return [scenario for scenario in scenarios if fits(scenario)]


def _this_machine() -> str:
    from autotune import hardware
    from tuning_db import Hardware

    found = hardware.probe()
    return Hardware(found.kind, found.facts).key


def _workload_name(name_or_file: str) -> str:
    from autotune.workload import load_workload

    return load_workload(name_or_file).name


def _nothing(
    fitting: list[Scenario], mine: bool, identity: Mapping[str, Any], folder: Path, only: Mapping[str, str | None]
) -> str:
    """Why there is nothing to export, and what to do about it."""
    name = identity.get("name")
    if mine:
        return f"no search of {name} has finished confirming; run the same `autotune search` again, it goes on"
    others = sorted({str(scenario.model.get("name")) for scenario in fitting})
    if others:
        return (
            f"nothing was measured for the model in {folder} ({name}), only for {', '.join(others)}; "
            "give its folder with --model"
        )
    where = f"hardware {only['hardware']!r}" if only.get("hardware") else "this machine"
    return f"nothing that fits was measured on {where}; run `autotune search` first, or look at `autotune query`"


def _write(file: str, text: str, executable: bool) -> None:
    """Whole or not at all: a full disk leaves what was there before."""
    from autotune.exporters import ExportError

    data = text.encode("utf-8", "surrogateescape")
    if file == "-":
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return
    path, new = Path(file), Path(f"{file}.{os.getpid()}.new")
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)  # a device or a pipe; a folder fails with its own reason
            return
        new.write_bytes(data)
        if executable:
            new.chmod(new.stat().st_mode | 0o111)
        new.replace(path)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise ExportError(f"cannot write {path}: {error.strerror}; give another file with -o") from None


def _summary(found: Export, file: str) -> None:
    evidence, ratio = found.evidence, found.evidence.ratio
    output.note(
        f"verdict: {evidence.verdict}, {evidence.metric} ×{ratio.mean:.3f} of the default "
        f"(interval {ratio.low:.3f} to {ratio.high:.3f}, {ratio.n} blocks)"
    )
    if evidence.verdict != "better":
        output.note("the default stays: nothing proved better.")
    if file != "-":
        output.note(f"next: autotune serve {file}" if file.endswith(".json") else f"wrote {file}")


SERVE_EPILOG = """\b
FILE is what `autotune export` wrote; without one, --model and --set give the
configuration, and knobs left out take their defaults.
GET /v1/config says what really runs. Ctrl-C and SIGTERM let running requests end.

Example: autotune serve best.json --port 8000
"""


@click.command(epilog=SERVE_EPILOG)
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="Port; 0 is a free one.")
@click.option("--model", type=click.Path(path_type=Path), help="Checkpoint folder. [default: the one in FILE]")
@click.option("--engine", type=click.Choice(["native"]), default="native", show_default=True, help="Engine to run.")
@click.option("--set", "pairs", multiple=True, metavar="KNOB=VALUE", help="One knob of the configuration; repeat.")
@click.option("--kernels", "table", help="Tuned kernels to use: a JSON file, or its text. [default: none]")
@click.option("--name", help="The model's name to clients. [default: its folder's]")
@click.option("--drain", type=click.FloatRange(min=0), default=30.0, show_default=True,
              help="Seconds that running requests may take to end.")  # fmt: skip
def serve(
    file: Path | None,
    host: str,
    port: int,
    model: Path | None,
    pairs: tuple[str, ...],
    table: str | None,
    name: str | None,
    drain: float,
    **only: str,
) -> None:
    """Serve a configuration: /v1/completions, /v1/models, /v1/config, /health and /metrics."""
    if file is not None and (pairs or table):
        raise click.UsageError("--set and --kernels change what FILE already gives; use one of them")
    if file is None and model is None:
        raise click.UsageError("give the FILE of an export, or --model FOLDER")
    with _clear_errors():
        from autotune.exporters.shell import ENVIRONMENT

        os.environ.update({k: os.environ.get(k, v) for k, v in ENVIRONMENT[only["engine"]].items()})
        _serve(host, port, lambda: _open(file, model, pairs, table), name, drain)


def _serve(host: str, port: int, load: Any, name: str | None, drain: float) -> None:
    """Take the port first: a busy one should be known before a long load."""
    from autotune.runtimes.native.config import CheckpointError
    from autotune.runtimes.native.serve import Options, ServeError, bind, is_loopback, serve

    try:
        with bind(host, port) as sock:
            if not is_loopback(host):
                output.note(f"warning: other machines can reach {host}, and nothing here asks for a password")
            llm: LLM = load()
            with llm:
                shown = name or llm.folder.resolve().name
                alive = serve(llm, sock, Options(shown, drain), lambda url: click.echo(f"serving {shown} on {url}/v1"))
    except CheckpointError as error:
        output.fail(str(error), 2)
    except ServeError as error:
        output.fail(str(error), 1)
    if not alive:
        output.fail("the engine failed while serving; see above", 1)


def _open(file: Path | None, model: Path | None, pairs: tuple[str, ...], table: str | None) -> LLM:
    if file is not None:
        from autotune.exporters.native import load_export

        return load_export(file, model)
    from autotune.runtimes.native.llm import LLM

    assert model is not None
    return LLM(model, chosen("native", pairs), _kernels(table) if table else None)


def _kernels(table: str) -> dict[str, dict[str, Any]]:
    """The tuned kernels in a JSON file, or in its text. Raises ExportError."""
    from autotune.exporters import ExportError
    from autotune.exporters.json_file import kernels

    try:
        return kernels(json.loads(table if table.lstrip().startswith("{") else Path(table).read_bytes()))
    except OSError as error:
        raise ExportError(f"cannot read --kernels {table}: {error.strerror}") from None
    except ValueError as error:
        raise ExportError(f"--kernels is no table of tuned kernels: {error}") from None


def chosen(engine: str, pairs: tuple[str, ...]) -> dict[str, Any]:
    """Knob values from ``knob=value`` words, each taken for the value that is written so. Raises SpaceError."""
    from search_spaces import SpaceError
    from search_spaces import load as load_space

    space = load_space(engine)
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, word = pair.partition("=")
        if not equals:
            raise SpaceError(f"--set {pair!r} wants knob=value, such as --set attention=sparse")
        knob = space.knob(name)
        spelled = {_word(value): value for value in knob.domain.values}
        if name in found:
            raise SpaceError(f"--set gives {name} twice")
        if word not in spelled and knob.admit is None:
            raise SpaceError(f"knob {name} cannot be {word!r}: it takes {', '.join(spelled)}")
        found[name] = spelled.get(word, word)
    return found


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@contextmanager
def _clear_errors() -> Iterator[None]:
    """`output.clear_errors`, and what only these two commands can meet."""
    with output.clear_errors():
        from autotune.exporters import ExportError

        try:
            yield
        except ExportError as error:
            output.fail(str(error), 2)
