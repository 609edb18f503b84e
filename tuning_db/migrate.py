"""Brings a database to the newest schema by Alembic. Knows the migrations folder; the store holds the locks."""

from __future__ import annotations

import uuid
from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection

from tuning_db.schema import SCHEMA_VERSION, meta, tool_version


def create(connection: Connection) -> None:
    """Build every table on an empty database, inside the caller's transaction."""
    command.upgrade(config(connection), "head")
    facts = {"created_by": tool_version(), "database_id": uuid.uuid4().hex}
    connection.execute(meta.insert(), [{"name": name, "value": value} for name, value in facts.items()])
    _mark(connection)


def upgrade(connection: Connection) -> None:
    """Bring a database of an older schema to the newest, inside the caller's transaction: all of it or nothing."""
    command.upgrade(config(connection), "head")
    _mark(connection)


def config(connection: Connection) -> Config:
    """Alembic's configuration for running the revisions of this package on an open connection."""
    found = Config()
    found.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    found.attributes["connection"] = connection
    return found


def _mark(connection: Connection) -> None:
    facts = {"schema_version": str(SCHEMA_VERSION), "schema_by": tool_version()}
    connection.execute(meta.delete().where(meta.c.name.in_(facts)))
    connection.execute(meta.insert(), [{"name": name, "value": value} for name, value in facts.items()])
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql(f"PRAGMA user_version={SCHEMA_VERSION}")
