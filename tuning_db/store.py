"""The store: about ten verbs, each one short transaction, the same on SQLite and PostgreSQL. Knows no measurement."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import platformdirs
from sqlalchemy import Connection, Engine, Select, Table, exc, select
from sqlalchemy.dialects import postgresql, sqlite

from tuning_db import claims, lookup, postgres, rows, sqlite_file
from tuning_db.claims import Claim
from tuning_db.errors import Ambiguous, DuplicateTrial, NotFound, StoreError
from tuning_db.lookup import Best, Goodness, Meets
from tuning_db.records import Hardware, Reference, Sample, Scenario, Trial
from tuning_db.schema import hardware, reference_blobs, samples, scenarios, trials
from tuning_db.timelines import unpack

_SCENARIO = select(scenarios, hardware.c.kind, hardware.c.facts, hardware.c.host).join(hardware)

IN_ONE_QUERY = 500
"""Keys looked for at once; each database has its own limit on parameters, all above this."""


def default_path() -> Path:
    """Where the database lies when nobody says otherwise: the platform's folder for a user's data."""
    return platformdirs.user_data_path("autotune", appauthor=False) / "tuning.db"


def located(url: str | Path | None) -> Path | str:
    """The file that a path or ``sqlite:///path`` names, or a PostgreSQL URL as it is. Raises StoreError."""
    text = str(default_path() if url is None else url)
    if text.startswith(("postgresql:", "postgres:", "postgresql+psycopg:")):
        return text
    if text.startswith("sqlite:"):
        text = text.removeprefix("sqlite:").removeprefix("//").removeprefix("/")
    if "://" in text or text in ("", ":memory:"):
        raise StoreError(f"{text!r} is neither a file nor a postgresql:// URL; give --db a path such as ./tuning.db")
    return Path(text).expanduser()


class Store:
    """An open tuning database. Safe for threads; each process opens its own. Every method may raise StoreError."""

    def __init__(self, engine: Engine, where: str, explain: Callable[[BaseException], StoreError]) -> None:
        self.engine = engine
        self.where = where
        self._explain = explain

    @classmethod
    def open(cls, url: str | Path | None = None, *, readonly: bool = False) -> Self:
        """Open a file path, ``sqlite:///path`` or ``postgresql://…``; a missing database is created unless readonly."""
        where = located(url)
        if isinstance(where, str):
            engine = postgres.open_url(where, readonly)
            return cls(engine, postgres.shown(where), lambda error: postgres.explain(error, where))
        engine = sqlite_file.open_path(where, readonly)
        return cls(engine, str(where), lambda error: sqlite_file.explain(error, where))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Give back every connection."""
        self.engine.dispose()

    def ensure(self, scenario: Scenario) -> str:
        """Record the scenario and its hardware unless they are there, and return the scenario's key."""
        machine, question = rows.hardware_row(scenario.hardware), rows.scenario_row(scenario, time.time())
        with self.unit(write=True) as connection:
            connection.execute(self._insert(hardware).on_conflict_do_nothing(), machine)
            connection.execute(self._insert(scenarios).on_conflict_do_nothing(), question)
        return str(question["key"])

    def claim(self, scenario_key: str, slot: str, limit: int | None = None) -> Claim | None:
        """The right to do one piece of work, or None while somebody else has it; hold it with `claims.kept`.

        ``slot`` is ``stage/name``, at most 80 characters. With ``limit`` also None once that many counted trials and
        live claims of the stage exist. An owner whose lease ran out, or whose process ended on this machine, loses its
        claim. Look for a stored result *after* claiming: another may have just finished. Raises NotFound, BadValue.
        """
        rows.check_short("claim: ", slot=slot)
        with self.unit(write=True) as connection:
            return claims.take(connection, scenario_key, slot, limit)

    def renew(self, claim: Claim) -> bool:
        """Extend the lease of a claim; False when another attempt has taken the work over."""
        with self.unit(write=True) as connection:
            return claims.renew(connection, claim)

    def release(self, claim: Claim) -> None:
        """Give a claim back; nothing happens when another attempt has taken the work over."""
        with self.unit(write=True) as connection:
            claims.release(connection, claim)

    def claimed(self, scenario_key: str) -> set[str]:
        """The slots of a scenario that somebody works on now."""
        with self.unit() as connection:
            return claims.live(connection, scenario_key)

    def add(self, trial: Trial, samples_: Sequence[Sample] = (), claim: Claim | None = None) -> Trial:
        """Write one trial and its samples, durably once this returns; the trial as it was stored.

        With a ``claim`` that another attempt took over meanwhile, the trial is kept but does not count, and its
        provenance says ``late``. Raises BadValue for what cannot be stored, NotFound for an unknown scenario, and
        DuplicateTrial for a known id or a second counted search trial of one configuration.
        """
        row = rows.trial_row(trial)
        timelines = rows.samples_row(trial.id, samples_) if samples_ else None
        try:
            with self.unit(write=True) as connection:
                if claim and not claims.is_mine(connection, claim):
                    trial = replace(trial, counted=False, provenance={**trial.provenance, "late": True})
                    row = rows.trial_row(trial)
                connection.execute(trials.insert(), row)
                if timelines:
                    connection.execute(samples.insert(), timelines)
        except exc.IntegrityError as error:
            raise self._conflict(trial, error) from error
        return trial

    def trials(
        self,
        scenario_key: str | None = None,
        *,
        stage: str | None = None,
        status: str | None = None,
        config_key: str | None = None,
    ) -> list[Trial]:
        """The trials that fit every given field, oldest first."""
        query = select(trials).order_by(trials.c.id)
        wanted = {"scenario_key": scenario_key, "stage": stage, "status": status, "config_key": config_key}
        for name, value in wanted.items():
            if value is not None:
                query = query.where(trials.c[name] == value)
        return [rows.trial_record(row) for row in self.rows(query)]

    def trial(self, prefix: str) -> Trial:
        """The one trial whose id begins with ``prefix``. Raises NotFound, or Ambiguous naming the candidates."""
        known = set(prefix) <= set("0123456789abcdef") and prefix
        # "g" follows every hex digit, so the range holds exactly the ids with this prefix and uses the primary key.
        query = select(trials).where(trials.c.id >= prefix, trials.c.id < prefix + "g").order_by(trials.c.id).limit(6)
        found = self.rows(query) if known else []
        if not found:
            raise NotFound(f"no trial has an id that begins with {prefix!r}; `autotune query` lists them")
        if len(found) > 1:
            names = ", ".join(row.id for row in found[:5]) + (", …" if len(found) > 5 else "")
            raise Ambiguous(f"{prefix!r} fits several trials: {names}; give more of the id")
        return rows.trial_record(found[0])

    def samples(self, trial_id: str) -> list[Sample]:
        """The samples of a trial by its whole id; an empty list when none were kept."""
        found = self.rows(select(samples.c.blob).where(samples.c.trial_id == trial_id))
        try:
            return unpack(trial_id, found[0].blob) if found else []
        except ValueError as error:
            raise StoreError(f"tuning database {self.where}: {error}") from error

    def scenarios(self) -> list[Scenario]:
        """Every scenario, oldest first."""
        query = _SCENARIO.order_by(scenarios.c.created_at, scenarios.c.key)
        return [rows.scenario_record(row) for row in self.rows(query)]

    def scenario(self, key: str) -> Scenario:
        """The scenario of a key. Raises NotFound."""
        found = self.rows(_SCENARIO.where(scenarios.c.key == key))
        if not found:
            raise NotFound(f"no scenario has the key {key!r}; `autotune query` lists what was measured")
        return rows.scenario_record(found[0])

    def scenarios_of(self, keys: Sequence[str]) -> list[Scenario]:
        """The scenarios of the keys, in the order of the keys; an unknown key has none."""
        found: dict[str, Scenario] = {}
        for start in range(0, len(keys), IN_ONE_QUERY):
            query = _SCENARIO.where(scenarios.c.key.in_(keys[start : start + IN_ONE_QUERY]))
            found |= {row.key: rows.scenario_record(row) for row in self.rows(query)}
        return [found[key] for key in keys if key in found]

    def subjects(self) -> list[tuple[str, str | None, str | None]]:
        """(engine, name of the model, name of the workload) of all scenarios, each once and in order."""
        names = [scenarios.c[part]["name"].as_string() for part in ("model", "workload")]
        found = {(row[0], row[1], row[2]) for row in self.rows(select(scenarios.c.engine, *names).distinct())}
        return sorted(found, key=lambda names: tuple(name or "" for name in names))

    def machines(self, text: str = "") -> list[Hardware]:
        """The hardware whose key begins with ``text``, or whose label contains it in any case; by label."""
        query = select(hardware.c.kind, hardware.c.facts, hardware.c.host).order_by(hardware.c.label, hardware.c.key)
        known = [Hardware(row.kind, row.facts, row.host) for row in self.rows(query)]
        return [one for one in known if one.key.startswith(text) or text.lower() in one.label.lower()]

    def best(
        self, wanted: Scenario | Hardware, goodness: Goodness, meets: Meets | None = None, **names: Any
    ) -> Best | None:
        """The best confirmed configuration for ``wanted``: exact, else near, else stale, else far, as its match says.

        The objective (``goodness`` of metrics) and SLOs (``meets``, of the runs of one configuration) are applied to
        what is stored, so that a new one needs no new run. See `tuning_db.lookup`.
        """
        return lookup.best(self, wanted, goodness, meets, **names)

    def put_reference(self, reference: Reference) -> None:
        """Keep bytes under their key; a key that is there already keeps what it has."""
        row = rows.reference_row(reference, time.time())
        with self.unit(write=True) as connection:
            connection.execute(self._insert(reference_blobs).on_conflict_do_nothing(), row)

    def reference(self, key: str) -> Reference | None:
        """What was kept under ``key``, or None."""
        found = self.rows(select(reference_blobs).where(reference_blobs.c.key == key))
        return Reference(found[0].key, found[0].kind, found[0].facts, found[0].blob) if found else None

    def _insert(self, table: Table) -> sqlite.Insert | postgresql.Insert:
        return sqlite.insert(table) if self.engine.dialect.name == "sqlite" else postgresql.insert(table)

    def rows(self, query: Select[Any]) -> Sequence[Any]:
        """The rows of a query on `tuning_db.schema`, for the other modules of this package."""
        with self.unit() as connection:
            return connection.execute(query).all()

    @contextmanager
    def unit(self, write: bool = False) -> Iterator[Connection]:
        """One transaction, for the other modules of this package; ``write`` if it may write."""
        with self.clear_errors(), self.engine.connect() as connection:
            connection = connection.execution_options(write=write)
            with connection.begin():
                yield connection

    @contextmanager
    def clear_errors(self) -> Iterator[None]:
        """Turn the database's own errors into StoreError, but for a conflict between rows."""
        try:
            yield
        except exc.IntegrityError:
            raise
        except exc.SQLAlchemyError as error:
            raise self._explain(getattr(error, "orig", None) or error) from error

    def _conflict(self, trial: Trial, error: exc.IntegrityError) -> StoreError:
        same = select(trials.c.id).where(trials.c.id == trial.id)
        if self.rows(same):
            return DuplicateTrial(f"trial {trial.id} is stored already; make a new id with tuning_db.new_id()")
        twin = self.trials(trial.scenario_key, stage="search", config_key=trial.config_key)
        if any(other.counted for other in twin):
            return DuplicateTrial(
                f"configuration {trial.config_key} already has its counted search trial {twin[0].id}; "
                "store a deliberate repeat under another stage or with counted=False"
            )
        if not self.rows(select(scenarios.c.key).where(scenarios.c.key == trial.scenario_key)):
            return NotFound(f"trial {trial.id}: no scenario has the key {trial.scenario_key!r}; call ensure() first")
        return self._explain(error.orig or error)
