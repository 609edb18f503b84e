"""Brings a database to the newest schema by Alembic. Knows the migrations folder; the store holds the locks."""

from __future__ import annotations

import uuid
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection

from tuning_db.schema import SCHEMA_VERSION, meta


def tool_version() -> str:
    """The version of the installed distribution, or ``unknown``."""
    try:
        return version("autotune")
    except PackageNotFoundError:
        return "unknown"


def create(connection: Connection) -> None:
    """Build every table on an empty database, inside the caller's transaction."""
    _run(connection)
    facts = {"created_by": tool_version(), "database_id": uuid.uuid4().hex}
    connection.execute(meta.insert(), [{"name": name, "value": value} for name, value in facts.items()])
    _mark(connection)


def upgrade(connection: Connection) -> None:
    """Bring a database of an older schema to the newest, inside the caller's transaction: all of it or nothing."""
    _run(connection)
    _mark(connection)


def _run(connection: Connection) -> None:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def _mark(connection: Connection) -> None:
    facts = {"schema_version": str(SCHEMA_VERSION), "schema_by": tool_version()}
    connection.execute(meta.delete().where(meta.c.name.in_(facts)))
    connection.execute(meta.insert(), [{"name": name, "value": value} for name, value in facts.items()])
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql(f"PRAGMA user_version={SCHEMA_VERSION}")
