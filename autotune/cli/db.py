"""`autotune db`: looks after the tuning database itself: check, upgrade, back up, prune, vacuum."""

from __future__ import annotations

import click

from autotune.cli import output

db_option = click.option(
    "--db", "url", envvar="AUTOTUNE_DB", help="SQLite file or database URL. [default: the platform's data folder]"
)
EPILOG = """\b
Example: autotune db check
"""


@click.group(epilog=EPILOG)
def db() -> None:
    """Look after the tuning database: check, upgrade, back it up, prune, vacuum."""


@db.command(epilog="Example: autotune db upgrade --db postgresql://tuner@host/tuning")
@db_option
def upgrade(url: str | None) -> None:
    """Bring the database to this version's schema; an SQLite file is copied beside itself first."""
    with output.clear_errors():
        from tuning_db.upkeep import upgrade

        before, after = upgrade(url)
        same = f"schema {after}, the newest: nothing to do"
        output.note(same if before == after else f"schema {before} is now schema {after}")
