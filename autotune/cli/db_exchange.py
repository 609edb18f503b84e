"""`autotune db export|import|merge|sql|optuna`: what goes from one database to another, and to other tools."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from autotune.cli import output

if TYPE_CHECKING:
    from tuning_db import Store
    from tuning_db.exchange import Taken

db_option = click.option(
    "--db", "url", envvar="AUTOTUNE_DB", help="SQLite file or database URL. [default: the platform's data folder]"
)

EXPORT_EPILOG = """\b
One JSON document a line, with the schema version first and a digest last; the same records give the same bytes.

Example: autotune db export -o tuning.jsonl
"""


@click.command("export", epilog=EXPORT_EPILOG)
@click.option("-o", "--output", "file", default="-", show_default=True, help="File to write; - is standard output.")
@click.option("--samples/--no-samples", default=True, show_default=True, help="With every request's timeline.")
@db_option
def export(file: str, samples: bool, url: str | None) -> None:
    """Write every record as JSON Lines."""
    with output.clear_errors():
        from tuning_db import open_store
        from tuning_db.exchange import exported

        with open_store(url, readonly=True) as store, _written(file, store.where) as out:
            for line in exported(store, samples):
                out.write(line)


@click.command("import", epilog="Example: autotune db import tuning.jsonl")
@click.argument("files", nargs=-1, required=True)
@db_option
def import_(files: tuple[str, ...], url: str | None) -> None:
    """Add the records of exports (- is standard input): all of a file or nothing, and nothing twice."""
    with output.clear_errors():
        from tuning_db import open_store
        from tuning_db.exchange import read_lines, take

        with open_store(url) as store:
            for name in files:
                with _opened(name) as source:
                    _tell(name, take(store, read_lines(source), name))


MERGE_EPILOG = """\b
Databases of the same scenarios merge in any order, and again, to the same records.

Example: autotune db merge /mnt/node1/tuning.db /mnt/node2/tuning.db --db fleet.db
"""


@click.command("merge", epilog=MERGE_EPILOG)
@click.argument("others", nargs=-1, required=True)
@db_option
def merge(others: tuple[str, ...], url: str | None) -> None:
    """Add every record of other databases (files or URLs) to this one; they stay as they are."""
    with output.clear_errors():
        from tuning_db import open_store
        from tuning_db.exchange import merge

        with open_store(url) as store:
            for name in others:
                with open_store(name, readonly=True) as other:
                    _tell(other.where, merge(store, other))


SQL_EPILOG = """\b
Tables: trials, scenarios, hardware, samples, reference_blobs, claims, meta. Nothing can be changed through this door.

Example: autotune db sql "SELECT status, count(*) AS trials FROM trials GROUP BY status"
"""


@click.command("sql", epilog=SQL_EPILOG)
@click.argument("statement")
@click.option("--limit", type=click.IntRange(min=1), default=1000, show_default=True, help="Rows at most.")
@db_option
@output.format_option
def sql(statement: str, limit: int, url: str | None, form: str) -> None:
    """Answer one SQL query, read-only."""
    with output.clear_errors():
        from tuning_db import open_store
        from tuning_db.sql_door import read

        with open_store(url, readonly=True) as store:
            columns, rows = read(store, statement, limit + 1)
        output.emit(rows[:limit], columns, form, "rows")
        if len(rows) > limit:
            output.note(f"there are more than {limit} rows; --limit gives more")


OPTUNA_EPILOG = """\b
The file opens in optuna-dashboard and in optuna.load_study; failed trials are in it as failed ones.

Example: autotune db optuna --study glm -o glm.db && optuna-dashboard sqlite:///glm.db
"""


@click.command("optuna", epilog=OPTUNA_EPILOG)
@click.option("--study", required=True, metavar="NAME", help="The name of the study in the file.")
@click.option("-o", "--output", "file", type=click.Path(path_type=Path), help="File to write. [default: NAME.db]")
@click.option("--scenario", help="The scenario: its key or the beginning of it. [default: the one measured last]")
@click.option("--hardware", help="Only this hardware: key prefix, label or part of it.")
@click.option("--model", help="Only models whose name contains this.")
@click.option("--engine", help="Only this engine.")
@click.option("--objective", help="Metric, or several with commas between them. [default: the scenario's own]")
@db_option
def optuna(
    study: str, file: Path | None, scenario: str | None, objective: str | None, url: str | None, **only: str | None
) -> None:
    """Write one scenario's trials as an Optuna study."""
    with output.clear_errors():
        from autotune.objective import Objective
        from autotune.optuna_study import write
        from tuning_db import open_store

        target = file or Path(f"{study}.db")
        with open_store(url, readonly=True) as store:
            key = _scenario(store, scenario, only)
            question, trials = store.scenario(key), store.trials(key)
        aim = Objective(objective or str(question.objective.get("metric")))
        count = write(target, study, question, trials, aim)
        output.note(f"{target}: study {study!r}, {count} trials of {question.engine} on {question.hardware.label}")
        output.note(f"next: optuna-dashboard sqlite:///{target}")


def _scenario(store: Store, prefix: str | None, only: dict[str, str | None]) -> str:
    """The key of the scenario that fits and was measured last."""
    from autotune.decision import TuneError
    from tuning_db.query import select

    quoted = (prefix or "").replace("\\", "\\\\").replace("'", "\\'")
    where = f"scenario_key>='{quoted}' and scenario_key<'{quoted}~'" if prefix else None
    found = select(store, where, sort="-ended_at", limit=1, **only)
    if not found:
        raise TuneError("no trial fits; `autotune query` lists what was measured", 3)
    return str(found[0]["scenario_key"])


def _tell(name: str, taken: Taken) -> None:
    output.note(
        f"{name}: {taken.new_trials:,} of {taken.trials:,} trials and {taken.new_scenarios:,} of "
        f"{taken.scenarios:,} scenarios are new"
    )


@contextmanager
def _opened(name: str) -> Iterator[IO[bytes]]:
    if name == "-":
        yield sys.stdin.buffer
        return
    try:
        with Path(name).open("rb") as file:
            yield file
    except OSError as error:
        output.fail(f"cannot read {name}: {error.strerror}", 2)


@contextmanager
def _written(name: str, database: str) -> Iterator[Any]:
    """A private file that appears when it is whole, or standard output."""
    if name == "-":
        yield sys.stdout.buffer
        return
    path = Path(name)
    if path.exists() and Path(database).exists() and path.samefile(database):
        output.fail(f"{name} is the database itself; choose another file with -o", 2)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            yield file
        part.replace(path)
    except OSError as error:
        output.fail(f"cannot write {name}: {error.strerror}; choose another file with -o", 2)
    finally:
        part.unlink(missing_ok=True)
