"""The store's contract on a real PostgreSQL that this file starts; skipped where its server is not installed."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from contracts.records import make_scenario, make_trial
from contracts.store import StoreContract
from sqlalchemy import MetaData, select

from tuning_db import StoreError, migrate, open_store, upkeep
from tuning_db.schema import metadata

psycopg = pytest.importorskip("psycopg", reason="needs `pip install 'psycopg[binary]'`")

GOLDEN = Path(__file__).parents[1] / "golden" / "schema"


class TestPostgresqlStore(StoreContract):
    @pytest.fixture
    def address(self, database):
        return database


def test_stores_that_open_an_empty_database_at_once_all_succeed(database):
    stores, errors, gate = [], [], threading.Barrier(6)

    def start():
        gate.wait()
        try:
            stores.append(open_store(database))
        except StoreError as error:
            errors.append(error)

    threads = [threading.Thread(target=start) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    key = stores[0].ensure(make_scenario())
    for store in stores:
        store.add(make_trial(key))
        store.close()
    with open_store(database) as store:
        assert len(store.trials()) == 6


def test_a_killed_connection_is_replaced(database, server):
    with open_store(database) as store:
        key = store.ensure(make_scenario())
        with psycopg.connect(server.get_uri(), autocommit=True) as other:
            other.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() "
                "AND backend_type = 'client backend'"
            )
        store.add(make_trial(key))
        assert len(store.trials()) == 1


@pytest.fixture
def old(database):
    """The database of the golden dump of schema 1, which was made on SQLite."""
    from alembic import command
    from sqlalchemy import create_engine

    engine = create_engine(database.replace("postgresql://", "postgresql+psycopg://"))
    lite = create_engine("sqlite://")
    with lite.begin() as connection:
        connection.connection.driver_connection.executescript((GOLDEN / "1.sql").read_text(encoding="utf-8"))
    with engine.begin() as connection, lite.connect() as source:
        command.upgrade(migrate.config(connection), "0001")
        tables = MetaData()
        tables.reflect(connection)
        for table in tables.sorted_tables:
            known = metadata.tables.get(table.name)
            if known is not None:
                columns = [known.c[column.name] for column in table.columns]
                values = [dict(row._mapping) for row in source.execute(select(*columns))]
                connection.execute(known.insert(), values) if values else None
    engine.dispose()
    return database


def test_an_old_schema_asks_for_an_upgrade_which_keeps_every_row(old):
    for readonly in (False, True):
        with pytest.raises(StoreError, match=r"has schema 1, this tool needs 2.*autotune db upgrade --db postgresql:"):
            open_store(old, readonly=readonly)
    assert upkeep.upgrade(old) == (1, 2)
    with open_store(old) as store:
        assert len(store.scenarios()) == 2 and len(store.trials()) == 6
        assert [len(store.samples(trial.id)) for trial in store.trials()] == [0, 1, 2, 0, 1, 2]
        assert store.reference("r1:x").blob == bytes(range(64))
    assert upkeep.check(old).problems == ()
    assert upkeep.upgrade(old) == (2, 2)


def test_upgrades_at_once_all_succeed(old):
    results, gate = [], threading.Barrier(4)

    def run():
        gate.wait()
        results.append(upkeep.upgrade(old))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4 and {after for _, after in results} == {2}
    assert upkeep.check(old).problems == ()


def test_a_newer_schema_is_refused(database):
    with open_store(database) as store, store.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE meta SET value = '99' WHERE name = 'schema_version'")
    with pytest.raises(StoreError, match=r"schema 99.*pip install -U autotune"):
        open_store(database)


def test_the_schema_is_what_the_tables_say(database):
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    from tuning_db.schema import metadata

    with open_store(database) as store, store.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, metadata) == []


def test_no_server_gives_one_clear_line_without_the_password():
    with pytest.raises(StoreError) as caught:
        open_store("postgresql://me:secret@127.0.0.1:1/none")
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "127.0.0.1" in str(caught.value)
