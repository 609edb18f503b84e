"""Looks after a whole database: upgrade, check, vacuum, prune, backup, and putting a damaged file aside."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Column, Table, func, select, text

from tuning_db import postgres, rows, sqlite_file
from tuning_db.errors import StoreError
from tuning_db.records import Hardware
from tuning_db.schema import SCHEMA_VERSION, claims, samples, scenarios, trials
from tuning_db.schema import hardware as machines
from tuning_db.store import Store, located
from tuning_db.timelines import unpack

BATCH = 1000
"""Rows of one short transaction: a prune never holds writers up for long."""


@dataclass(frozen=True, slots=True)
class Health:
    """What a check found: the rows of each table and a sentence for each problem, none when all is well."""

    counts: dict[str, int]
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Pruned:
    """What a prune took away, or would take."""

    trials: int
    samples: int


def upgrade(url: str | Path | None = None) -> tuple[int, int]:
    """Bring a database to the newest schema; (schema before, schema after). Raises StoreError."""
    where = located(url)
    if isinstance(where, str):
        return postgres.upgrade(where)
    before = sqlite_file.check(where) if where.is_file() else 0
    sqlite_file.open_path(where, readonly=False).dispose()
    return before, SCHEMA_VERSION


def check(url: str | Path | None = None, quick: bool = False) -> Health:
    """Verify every page, reference, key and (unless ``quick``) sample blob; counts are rows by table.

    Raises StoreError for a database that cannot be opened at all.
    """
    where = located(url)
    with Store.open(url, readonly=True) as store:
        problems = [*(_pages(where, quick) if isinstance(where, Path) else ()), *_keys(store)]
        problems += [] if quick else _blobs(store)
        tables = (machines, scenarios, trials, samples, claims)
        counts = {t.name: int(store.rows(select(func.count()).select_from(t))[0][0]) for t in tables}
    return Health(counts, tuple(problems))


def put_aside(url: str | Path | None = None) -> Path:
    """Rename a damaged SQLite file, with its log, so that a new one can be made; the new name. Raises StoreError."""
    where = located(url)
    if isinstance(where, str):
        raise StoreError("only an SQLite file can be put aside; PostgreSQL looks after its own files")
    with sqlite_file.locked(where):
        target = sqlite_file.free_name(where, "damaged")
        for ending in ("", "-wal", "-shm"):
            part = where.with_name(where.name + ending)
            if part.exists():
                part.rename(target.with_name(target.name + ending))
    return target


def vacuum(url: str | Path | None = None) -> tuple[int, int]:
    """Give back unused space and refresh the planner's statistics; (bytes before, bytes after). Raises StoreError."""
    with Store.open(url) as store:
        before = _size(store)
        with store.clear_errors(), store.engine.connect() as connection:
            raw = connection.connection.driver_connection
            if isinstance(raw, sqlite3.Connection):
                _vacuum_file(raw, store)
            else:
                connection.execution_options(isolation_level="AUTOCOMMIT").execute(text("VACUUM (ANALYZE)"))
        return before, _size(store)


def prune(url: str | Path | None = None, *, before: float, whole: bool = False, dry_run: bool = False) -> Pruned:
    """Delete the samples, or the ``whole`` trials, that ended before a Unix time and are no evidence of a decision.

    Confirming trials and their samples always stay, and so do scenarios. Raises StoreError.
    """
    old = (trials.c.stage != "confirm", trials.c.ended_at < before)
    with Store.open(url, readonly=dry_run) as store:
        blobs = select(samples.c.trial_id).join(trials).where(*old)
        found = [row[0] for row in store.rows(select(trials.c.id).where(*old))] if whole else []
        packed = [row[0] for row in store.rows(blobs)]
        if not dry_run:
            _delete(store, samples, samples.c.trial_id, packed)
            _delete(store, trials, trials.c.id, found)
            with store.unit(write=True) as connection:
                connection.execute(claims.delete().where(claims.c.leased_until < before))
    return Pruned(len(found), len(packed))


def backup(target: Path, url: str | Path | None = None) -> int:
    """Copy an SQLite database, even while others write to it, to a new private file, and check it; its bytes."""
    where = located(url)
    if isinstance(where, str):
        raise StoreError("back a PostgreSQL database up with its own `pg_dump`, or use `autotune db export`")
    if not where.is_file():
        raise StoreError(f"there is no tuning database at {where}; name one with --db")
    sqlite_file.copy(where, target)
    sqlite_file.check(target)
    return target.stat().st_size


def _delete(store: Store, table: Table, key: Column[str], found: list[str]) -> None:
    for start in range(0, len(found), BATCH):
        with store.unit(write=True) as connection:
            connection.execute(table.delete().where(key.in_(found[start : start + BATCH])))


def _vacuum_file(raw: sqlite3.Connection, store: Store) -> None:
    try:
        raw.executescript("PRAGMA wal_checkpoint(TRUNCATE); VACUUM; ANALYZE; PRAGMA wal_checkpoint(TRUNCATE);")
    except sqlite3.Error as error:
        raise sqlite_file.explain(error, Path(store.where)) from error


def _size(store: Store) -> int:
    if store.engine.dialect.name == "sqlite":
        return Path(store.where).stat().st_size
    return int(store.rows(select(func.pg_database_size(func.current_database())))[0][0])


def _pages(path: Path, quick: bool) -> Iterator[str]:
    with sqlite_file.reading(path) as raw:
        for (line,) in raw.execute("PRAGMA quick_check" if quick else "PRAGMA integrity_check"):
            if line != "ok":
                yield f"damaged: {line}"
        for table, row, parent, _ in raw.execute("PRAGMA foreign_key_check"):
            yield f"row {row} of {table} refers to a row of {parent} that is not there"


def _keys(store: Store) -> Iterator[str]:
    for row in store.rows(select(machines)):
        machine = Hardware(row.kind, row.facts, row.host)
        if (machine.key, machine.loose) != (row.key, row.loose):
            yield f"hardware {row.key} ({row.label}) is not what its key says; its facts give {machine.key}"
    names = ("key", "measured_key", "engine_key", "model_key", "workload_key", "subject_key")
    for row in store.rows(select(scenarios, machines.c.kind, machines.c.facts, machines.c.host).join(machines)):
        scenario = rows.scenario_record(row)
        wrong = [name for name in names if getattr(scenario, name) != getattr(row, name)]
        if wrong:
            yield f"scenario {row.key} is not what its {wrong[0]} says; its facts give {getattr(scenario, wrong[0])}"


def _blobs(store: Store) -> Iterator[str]:
    after = ""
    while True:
        query = select(samples).where(samples.c.trial_id > after).order_by(samples.c.trial_id).limit(BATCH)
        batch = store.rows(query)
        for row in batch:
            try:
                count = len(unpack(row.trial_id, row.blob))
            except ValueError as error:
                yield str(error)
                continue
            if count != row.count:
                yield f"trial {row.trial_id} has {count} samples and says {row.count}"
        if len(batch) < BATCH:
            return
        after = batch[-1].trial_id
