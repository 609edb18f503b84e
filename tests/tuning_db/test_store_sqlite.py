"""The store's contract on an SQLite file."""

from __future__ import annotations

import stat

import pytest
from contracts.records import make_scenario, make_trial
from contracts.store import StoreContract

from tuning_db import StoreError, open_store
from tuning_db.store import default_path


class TestSqliteStore(StoreContract):
    @pytest.fixture
    def address(self, tmp_path):
        return tmp_path / "data folder" / "a?b#c%20'd.db"


def test_the_file_is_private_in_wal_mode_and_marked(tmp_path):
    path = tmp_path / "new" / "tuning.db"
    with open_store(path) as store, store.engine.connect() as connection:
        pragma = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "foreign_keys", "synchronous", "busy_timeout", "user_version")
        }
    assert pragma == {
        "journal_mode": "wal",
        "foreign_keys": 1,
        "synchronous": 1,
        "busy_timeout": 30000,
        "user_version": 2,
    }
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert path.read_bytes()[68:72] == b"atud"


@pytest.mark.parametrize("form", ["{}", "sqlite:///{}"])
def test_a_path_and_an_sqlite_url_mean_the_same_file(tmp_path, form):
    path = tmp_path / "tuning.db"
    with open_store(form.format(path)) as store:
        store.ensure(make_scenario())
    with open_store(path) as store:
        assert store.scenarios() == [make_scenario()]


def test_a_relative_url_is_relative(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    open_store("sqlite:///here.db").close()
    assert (tmp_path / "here.db").exists()


def test_without_a_name_the_platforms_data_folder_is_used(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    open_store().close()
    assert default_path().is_relative_to(tmp_path)
    assert default_path().exists()


@pytest.mark.parametrize("text", ["", ":memory:", "mysql://host/db", "sqlite://"])
def test_what_is_neither_a_file_nor_postgresql_is_refused(text):
    with pytest.raises(StoreError, match="--db"):
        open_store(text)


def test_large_fields_are_stored(tmp_path):
    with open_store(tmp_path / "tuning.db") as store:
        trial = make_trial(store.ensure(make_scenario()), reason="x" * 10_000_000)
        store.add(trial)
        assert store.trial(trial.id) == trial
