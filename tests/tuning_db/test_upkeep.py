"""Backups and damaged files: what was there stays, and what is copied is whole."""

from __future__ import annotations

import sqlite3
import stat

import pytest
from contracts.records import make_scenario, make_trial
from contracts.upkeep import hundred

from tuning_db import Damaged, StoreError, open_store, upkeep


@pytest.fixture
def path(tmp_path):
    """A closed database with 100 trials."""
    with open_store(tmp_path / "tuning.db") as store:
        hundred(store)
    return tmp_path / "tuning.db"


def test_a_backup_taken_while_others_write_is_whole_and_private(tmp_path, path):
    target = tmp_path / "copy.db"
    with open_store(path) as store, sqlite3.connect(path, isolation_level=None) as other:
        other.execute("BEGIN IMMEDIATE")
        other.execute("UPDATE trials SET reason = 'not committed'")
        size = upkeep.backup(target, path)
        other.execute("ROLLBACK")
        rows = store.trials()
    assert size == target.stat().st_size > 0
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    with open_store(target) as copy:
        assert copy.trials() == rows
    assert upkeep.check(target).problems == ()


def test_a_backup_never_overwrites(tmp_path, path):
    target = tmp_path / "notes.txt"
    target.write_text("mine")
    with pytest.raises(StoreError, match="left as it is"):
        upkeep.backup(target, path)
    assert target.read_text() == "mine"


def test_a_backup_that_fails_leaves_nothing(tmp_path, path, monkeypatch):
    monkeypatch.setattr("tuning_db.sqlite_file.closing", lambda thing: (_ for _ in ()).throw(sqlite3.Error("full")))
    before = set(tmp_path.iterdir())
    with pytest.raises(StoreError, match="disk is full"):
        upkeep.backup(tmp_path / "copy.db", path)
    assert set(tmp_path.iterdir()) == before


def test_a_missing_database_cannot_be_backed_up(tmp_path):
    with pytest.raises(StoreError, match="no tuning database"):
        upkeep.backup(tmp_path / "copy.db", tmp_path / "none.db")
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file_is_put_aside_byte_for_byte_and_a_new_one_made(path):
    content = bytearray(path.read_bytes())
    content[2 * 4096 : 3 * 4096] = b"\xa5" * 4096
    path.write_bytes(content)
    with pytest.raises(StoreError, match="damaged"):
        upkeep.check(path)
    aside = upkeep.put_aside(path)
    assert aside.read_bytes() == bytes(content) and not path.exists()
    with open_store(path) as store:
        store.add(make_trial(store.ensure(make_scenario())))
        assert len(store.trials()) == 1
    assert aside.read_bytes() == bytes(content)


def test_a_large_file_is_still_checked_on_demand(path, monkeypatch):
    monkeypatch.setattr("tuning_db.sqlite_file.ALWAYS_CHECKED", 0)
    content = bytearray(path.read_bytes())
    pages = len(content) // 4096
    content[(pages - 2) * 4096 : (pages - 1) * 4096] = b"\xa5" * 4096
    path.write_bytes(content)
    with pytest.raises(Damaged):
        upkeep.check(path)
