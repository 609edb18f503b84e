"""A read-only door for people who write SQL: one statement, which can read and cannot change anything.

SQLite is asked about every table and function before the statement runs; PostgreSQL gets it as a cursor, which takes
nothing but a query, in a read-only transaction.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

from tuning_db.errors import QueryError
from tuning_db.store import Store

_ALLOWED = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE})
_LOADS = frozenset({"load_extension", "readfile", "writefile", "edit", "fts3_tokenizer"})
_INSTRUCTIONS = 100_000
"""SQLite's steps between two looks at Ctrl-C."""


def read(store: Store, statement: str, limit: int) -> tuple[list[str], list[dict[str, Any]]]:
    """The columns and the first ``limit`` rows of one SQL query; bytes come as hex. Raises QueryError.

    Of two columns of one name the later is called ``name_2``.
    """
    if not statement.strip() or "\x00" in statement:
        raise QueryError("give one SQL query, such as 'SELECT status, count(*) FROM trials GROUP BY status'")
    with store.clear_errors(), store.engine.connect() as connection:
        raw: Any = connection.connection.driver_connection
        connection.detach()  # what is set here ends with the connection
        try:
            names, rows = (_sqlite if isinstance(raw, sqlite3.Connection) else _postgresql)(raw, statement, limit)
        except Exception as error:
            if type(error).__module__.partition(".")[0] not in ("sqlite3", "psycopg"):
                raise
            hint = "; this door only reads" if "not authorized" in str(error) else ""
            raise QueryError(f"SQL: {' '.join(str(error).split())}{hint}") from error
    columns: list[str] = []
    for name in names:
        same = sum(name == other for other in names[: len(columns)])
        columns.append(f"{name}_{same + 1}" if same else name)
    return columns, [dict(zip(columns, map(_shown, row), strict=True)) for row in rows]


def _sqlite(raw: sqlite3.Connection, statement: str, limit: int) -> tuple[list[str], Sequence[Sequence[Any]]]:
    raw.execute("PRAGMA query_only=ON")
    raw.set_authorizer(_may)
    raw.set_progress_handler(lambda: 0, _INSTRUCTIONS)
    cursor = raw.execute(statement)
    if cursor.description is None:
        raise QueryError("that is no query: it gives no rows")
    return [column[0] for column in cursor.description], cursor.fetchmany(limit)


def _may(action: int, first: str | None, second: str | None, database: str | None, trigger: str | None) -> int:
    is_safe = action in _ALLOWED or (action == sqlite3.SQLITE_FUNCTION and (second or "").lower() not in _LOADS)
    return sqlite3.SQLITE_OK if is_safe else sqlite3.SQLITE_DENY


def _postgresql(raw: Any, statement: str, limit: int) -> tuple[list[str], Sequence[Sequence[Any]]]:
    raw.execute("SET TRANSACTION READ ONLY")
    # A prepared statement is one statement: nothing can follow the query after a semicolon.
    raw.execute("DECLARE door NO SCROLL CURSOR FOR " + statement, prepare=True)
    cursor = raw.execute(f"FETCH FORWARD {int(limit)} FROM door")
    found = [column.name for column in cursor.description], cursor.fetchall()
    raw.rollback()
    return found


def _shown(value: Any) -> Any:
    if isinstance(value, (bytes, memoryview)):
        return bytes(value).hex()
    return value if isinstance(value, (str, int, float, bool, list, dict, type(None))) else str(value)
