"""Looks after a whole database: upgrade, check, vacuum, prune and backup. Knows no single trial."""

from __future__ import annotations

from pathlib import Path

from tuning_db import postgres, sqlite_file
from tuning_db.schema import SCHEMA_VERSION
from tuning_db.store import located


def upgrade(url: str | Path | None = None) -> tuple[int, int]:
    """Bring a database to the newest schema; (schema before, schema after). Raises StoreError."""
    where = located(url)
    if isinstance(where, str):
        return postgres.upgrade(where)
    before = sqlite_file.check(where) if where.is_file() else 0
    sqlite_file.open_path(where, readonly=False).dispose()
    return before, SCHEMA_VERSION
