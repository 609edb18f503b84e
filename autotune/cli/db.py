"""`autotune db`: looks after the tuning database itself: check, back up, prune, vacuum, upgrade."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from autotune.cli import db_exchange, output

db_option = click.option(
    "--db", "url", envvar="AUTOTUNE_DB", help="SQLite file or database URL. [default: the platform's data folder]"
)
EPILOG = """\b
Example: autotune db check
"""


@click.group(epilog=EPILOG)
def db() -> None:
    """Look after the tuning database: check, back it up, prune, vacuum, upgrade; share it, and ask it in SQL."""


CHECK_EPILOG = """\b
Reads every page, reference, key and stored request; changes nothing. Exit code 1 when something is wrong.
A damaged file is never overwritten: --aside renames it, so that the next command makes a new one.

Example: autotune db check --quick
"""


@db.command(epilog=CHECK_EPILOG)
@click.option("--quick", is_flag=True, help="Leave out the stored requests and the content of indexes.")
@click.option("--aside", is_flag=True, help="Rename an SQLite file that is damaged to NAME.damaged-TIME.")
@db_option
def check(url: str | None, quick: bool, aside: bool) -> None:
    """Verify the database."""
    with output.clear_errors():
        from tuning_db import Damaged, upkeep

        try:
            health = upkeep.check(url, quick)
            problems, counts = health.problems, health.counts
        except Damaged as error:
            problems, counts = (str(error),), {}
        for problem in problems:
            output.note(problem)
        if not problems:
            click.echo("good: " + ", ".join(f"{count:,} {name}" for name, count in counts.items()))
            return
        if aside:
            output.note(f"put aside as {upkeep.put_aside(url)}; the next command makes a new database")
        output.fail(f"{len(problems)} problem(s) found", 1)


@db.command(epilog="Example: autotune db backup tuning-backup.db")
@click.argument("file", type=click.Path(path_type=Path))
@db_option
def backup(url: str | None, file: Path) -> None:
    """Copy an SQLite database to FILE, even while a search writes to it."""
    with output.clear_errors():
        from tuning_db import upkeep

        size = upkeep.backup(file, url)
        click.echo(f"{file}: {output.quantity(size, 'B')}, checked")


PRUNE_EPILOG = """\b
The confirming runs, which are the evidence of every decision, always stay, and so do their requests.

Example: autotune db prune --older 90d --dry-run
"""


@db.command(epilog=PRUNE_EPILOG)
@click.option("--older", required=True, metavar="DURATION", help="What ended longer ago than this, such as 90d or 12h.")
@click.option("--trials", is_flag=True, help="Delete whole search trials, not only their stored requests.")
@click.option("--dry-run", is_flag=True, help="Only say what would be deleted.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@db_option
def prune(url: str | None, older: str, trials: bool, dry_run: bool, yes: bool) -> None:
    """Delete the stored requests of old search trials, or those trials."""
    with output.clear_errors():
        import time

        from autotune.plan import seconds
        from tuning_db import upkeep

        asked: dict[str, Any] = {"before": time.time() - seconds(older), "whole": trials}
        found = upkeep.prune(url, **asked, dry_run=True)
        what = f"the requests of {found.samples:,} trials" + (f" and {found.trials:,} trials" if trials else "")
        if dry_run or not (found.samples or found.trials):
            click.echo(f"would delete {what}")
            return
        if not yes and not sys.stdin.isatty():
            output.fail(f"this would delete {what}; add --yes", 2)
        if not yes:
            click.confirm(f"Delete {what}?", abort=True)
        upkeep.prune(url, **asked)
        click.echo(f"deleted {what}; `autotune db vacuum` gives the space back")


@db.command(epilog="Example: autotune db vacuum")
@db_option
def vacuum(url: str | None) -> None:
    """Give back unused space and refresh the statistics that choose indexes."""
    with output.clear_errors():
        from tuning_db import upkeep

        before, after = upkeep.vacuum(url)
        click.echo(f"{output.quantity(before, 'B')} before, {output.quantity(after, 'B')} after")


UPGRADE_EPILOG = """\b
An SQLite file is copied beside itself first; opening it does the same by itself. Back PostgreSQL up with pg_dump.

Example: autotune db upgrade --db postgresql://tuner@host/tuning
"""


@db.command(epilog=UPGRADE_EPILOG)
@db_option
def upgrade(url: str | None) -> None:
    """Bring the database to the schema of this version."""
    with output.clear_errors():
        from tuning_db import upkeep

        before, after = upkeep.upgrade(url)
        same = f"schema {after}, the newest: nothing to do"
        click.echo(same if before == after else f"schema {before} is now schema {after}")


for command in (db_exchange.export, db_exchange.import_, db_exchange.merge, db_exchange.optuna, db_exchange.sql):
    db.add_command(command)
