"""Exports a database as JSON Lines, imports such lines, and merges databases: a union of records by identity.

Trials never change, so a union is the same in any order. What two machines may know differently has one rule each: of
two counted search trials of one configuration the older one counts, of two hosts and of two times the smaller stays.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import IO, Any

from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    Index,
    LargeBinary,
    MetaData,
    Select,
    Table,
    Text,
    and_,
    cast,
    exc,
    exists,
    false,
    func,
    or_,
    select,
    true,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite

from tuning_db.errors import Refused
from tuning_db.exchange_lines import LONGEST_LINE, Values, Writer, checked, encoded
from tuning_db.schema import Json, hardware, reference_blobs, samples, scenarios, tool_version, trials
from tuning_db.store import Store

BATCH = 20_000
"""Trials of one short transaction: an import never holds a search up for long."""

_BULK = {"cache_size": -65536, "wal_autocheckpoint": 65536}
"""SQLite's settings for many rows at once: 64 MiB of indexes in memory, and 256 MiB of log between two checkpoints."""

_aside = MetaData()
_incoming = Table(
    "incoming_trials",
    _aside,
    *(Column(c.name, Text() if c.type is Json else c.type, primary_key=c.primary_key) for c in trials.c),
    Column("samples_count", samples.c["count"].type),
    Column("samples_blob", LargeBinary),
    prefixes=["TEMPORARY"],
)
_references = Table(
    "incoming_references",
    _aside,
    *(Column(c.name, c.type, primary_key=c.primary_key) for c in reference_blobs.c),
    prefixes=["TEMPORARY"],
)


@dataclass(frozen=True, slots=True)
class Taken:
    """How many trials and scenarios an import read, and how many of them were new."""

    trials: int
    new_trials: int
    scenarios: int
    new_scenarios: int


def exported(store: Store, with_samples: bool = True) -> Iterator[bytes]:
    """The lines of an export, the same for the same records wherever they are stored. Raises StoreError."""
    writer = Writer(tool_version())
    yield writer.head()
    with store.unit() as connection:
        streamed = connection.execution_options(yield_per=500)
        for kind, query in _queries(with_samples):
            for row in streamed.execute(query):
                yield writer.record(kind, _written(kind, dict(row._mapping)))
    yield writer.end()


def read_lines(file: IO[bytes]) -> Iterator[bytes]:
    """The lines of a file, none longer in memory than an export's can be."""
    return iter(lambda: file.readline(LONGEST_LINE + 1), b"")


def take(store: Store, lines: Iterable[bytes], name: str) -> Taken:
    """Add the records of an export: every one, or none with Refused naming the line. Again, it changes nothing.

    The lines are read once, checked, and put aside in a temporary table; then they are added in short transactions.
    ``name`` is what messages call the source.
    """
    with store.clear_errors(), store.engine.connect() as connection:
        connection.detach()  # closing it for good also drops what was put aside and undoes what is set here
        if connection.dialect.name == "sqlite":
            for setting, value in _BULK.items():
                connection.exec_driver_sql(f"PRAGMA {setting}={value}")
            connection.rollback()
        with connection.begin():
            _aside.create_all(connection)
        machines: list[Values] = []
        questions: list[Values] = []
        ends, count = _put_aside(connection, checked(lines, name), machines, questions)
        _check(connection, name)
        with _writing(connection):
            new_scenarios = _add_scenarios(connection, machines, questions)
            _add_references(connection)
        new = 0
        for low, high in itertools.pairwise(["", *ends]):
            with _writing(connection):
                new += _add_trials(connection, and_(_incoming.c.id > low, _incoming.c.id <= high))
    return Taken(count, new, len(questions), new_scenarios)


def merge(store: Store, other: Store) -> Taken:
    """Add every record of another database."""
    return take(store, exported(other), other.where)


def _writing(connection: Connection) -> Any:
    return connection.execution_options(write=True).begin()


def _queries(with_samples: bool) -> Iterator[tuple[str, Select[Any]]]:
    names: tuple[str, ...] = ("key", "kind", "host", "facts")
    yield "hardware", select(*(hardware.c[name] for name in names)).order_by(hardware.c.key)
    names = ("key", "hardware_key", "engine", "engine_build", "model", "workload", "objective", "created_at")
    yield "scenario", select(*(scenarios.c[name] for name in names)).order_by(scenarios.c.key)
    yield "reference", select(reference_blobs).order_by(reference_blobs.c.key)
    query = select(trials).order_by(trials.c.id)
    if with_samples:
        query = query.add_columns(samples.c["count"].label("samples_count"), samples.c.blob.label("samples_blob"))
        query = query.select_from(trials.outerjoin(samples))
    yield "trial", query


def _written(kind: str, values: Values) -> Values:
    if kind == "reference":
        values["blob"] = encoded(values["blob"])
    if kind == "trial":
        count, blob = values.pop("samples_count", None), values.pop("samples_blob", None)
        values["samples"] = {"count": count, "blob": encoded(blob)} if blob else None
        for name in ("metrics", "seconds"):  # PostgreSQL gives 1e22 back as an integer
            values[name] = {key: float(value) for key, value in values[name].items()}
    return values


def _put_aside(
    connection: Connection, records: Iterator[tuple[str, Values]], machines: list[Values], questions: list[Values]
) -> tuple[list[str], int]:
    """Fill the temporary tables and the two lists; the last id of each batch of trials, and the number of trials."""
    ends: list[str] = []
    count = 0
    few = {"hardware": machines, "scenario": questions}
    for kind, group in itertools.groupby(records, key=lambda record: record[0]):
        while batch := [values for _, values in itertools.islice(group, BATCH if kind == "trial" else 100)]:
            if kind in few:
                few[kind] += batch
                continue
            with connection.begin():
                if kind == "trial":
                    _put(connection, batch)
                    ends.append(batch[-1]["id"])
                    count += len(batch)
                else:
                    connection.execute(_references.insert(), batch)
    return ends, count


def _put(connection: Connection, batch: list[Values]) -> None:
    """Trials as the driver takes them: what an insert through Core does to each value, they do not need."""
    mark = ":{}" if connection.dialect.name == "sqlite" else "%({})s"
    places = ", ".join(mark.format(c.name) for c in _incoming.c)
    connection.exec_driver_sql(f"INSERT INTO {_incoming.name} VALUES ({places})", batch)


def _check(connection: Connection, name: str) -> None:
    """Refuse what contradicts itself or what is stored. Nothing but temporary tables has been written so far."""
    once = and_(_incoming.c.stage == "search", _incoming.c.counted)
    index = Index(
        "incoming_counted",
        _incoming.c.scenario_key,
        _incoming.c.config_key,
        unique=True,
        sqlite_where=once,
        postgresql_where=once,
    )
    try:
        with connection.begin():
            index.create(connection)
    except exc.IntegrityError as error:
        raise Refused(f"{name} counts two search trials of one configuration. Nothing was imported") from error
    finally:
        _incoming.indexes.discard(index)
    fixed = [c for c in trials.c if c.name not in ("id", "counted")]
    differs = or_(*(c != _stored(connection, c) for c in fixed))
    other = or_(reference_blobs.c.blob != _references.c.blob, reference_blobs.c.kind != _references.c.kind)
    # Asked row by row of what comes in: as a join, SQLite would read all that is stored.
    for what, key, same, but in (
        ("trial", _incoming.c.id, trials.c.id == _incoming.c.id, differs),
        ("reference", _references.c.key, reference_blobs.c.key == _references.c.key, other),
    ):
        with connection.begin():
            clash = connection.execute(
                select(key).where(exists().where(same, but).correlate(key.table)).limit(1)
            ).scalar()
        if clash:
            raise Refused(f"{name}: {what} {clash} is stored here with other content. Nothing was imported")


def _stored(connection: Connection, column: Column[Any]) -> ColumnElement[Any]:
    """An incoming value as the type of its column; SQLite stores JSON as the text it is."""
    incoming = _incoming.c[column.name]
    return cast(incoming, Json) if column.type is Json and connection.dialect.name != "sqlite" else incoming


def _insert(connection: Connection, table: Table) -> sqlite.Insert | postgresql.Insert:
    return sqlite.insert(table) if connection.dialect.name == "sqlite" else postgresql.insert(table)


def _add_scenarios(connection: Connection, machines: list[Values], questions: list[Values]) -> int:
    before = connection.execute(select(func.count()).select_from(scenarios)).scalar_one()
    for table, column, values in ((hardware, "host", machines), (scenarios, "created_at", questions)):
        insert = _insert(connection, table)
        statement = insert.on_conflict_do_update(
            index_elements=["key"],
            set_={column: insert.excluded[column]},
            where=insert.excluded[column] < table.c[column],
        )
        if values:
            connection.execute(statement, values)
    return int(connection.execute(select(func.count()).select_from(scenarios)).scalar_one() - before)


def _add_references(connection: Connection) -> None:
    insert = _insert(connection, reference_blobs)
    connection.execute(
        insert.from_select(
            [c.name for c in reference_blobs.c], select(_references).where(true())
        ).on_conflict_do_update(
            index_elements=["key"],
            set_={"created_at": insert.excluded.created_at},
            where=insert.excluded.created_at < reference_blobs.c.created_at,
        )
    )


def _add_trials(connection: Connection, here: ColumnElement[bool]) -> int:
    """Add one batch, so that of each configuration the oldest counted search trial is the one that counts."""
    counts = and_(_incoming.c.stage == "search", _incoming.c.counted)
    rival = and_(
        trials.c.scenario_key == _incoming.c.scenario_key,
        trials.c.config_key == _incoming.c.config_key,
        trials.c.stage == "search",
        trials.c.counted,
    )
    older = exists().where(rival, trials.c.id < _incoming.c.id).correlate(_incoming)
    connection.execute(update(_incoming).where(here, counts, older).values(counted=false()))
    younger = select(trials.c.id).join(_incoming, rival).where(here, counts, trials.c.id > _incoming.c.id)
    connection.execute(update(trials).where(trials.c.id.in_(younger)).values(counted=false()))
    counted = select(_incoming.c.id).where(here, _incoming.c.counted)
    connection.execute(update(trials).where(~trials.c.counted, trials.c.id.in_(counted)).values(counted=true()))
    for table, query in (
        (trials, select(*(_stored(connection, c).label(c.name) for c in trials.c))),
        (
            samples,
            select(_incoming.c.id, _incoming.c.samples_count, _incoming.c.samples_blob).where(
                _incoming.c.samples_blob.is_not(None)
            ),
        ),
    ):
        names = [c.name for c in table.c]
        statement = _insert(connection, table).from_select(names, query.where(here).order_by(_incoming.c.id))
        keep = {"preserve_rowcount": True}
        added = connection.execute(statement.on_conflict_do_nothing(), execution_options=keep).rowcount
        if table is trials:
            new = added
    return new
