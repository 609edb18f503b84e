"""Files that are not a good database of ours: one clear error each, and not a byte of them changes."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import shutil
import sqlite3
import tempfile
import warnings
from multiprocessing import get_context
from pathlib import Path

import pytest
from contracts.records import make_samples, make_scenario, make_trial

import tuning_db.sqlite_file
from tuning_db import StoreError, StoreWarning, new_id, open_store


@pytest.fixture
def good(tmp_path):
    """A closed database with 40 trials."""
    path = tmp_path / "tuning.db"
    with open_store(path) as store:
        key = store.ensure(make_scenario())
        for _ in range(40):
            trial = make_trial(key, reason="x" * 500)
            store.add(trial, make_samples(trial.id))
    return path


def _refused_and_untouched(path, match, readonly=False):
    before = path.read_bytes()
    with pytest.raises(StoreError, match=match) as caught:
        open_store(path, readonly=readonly)
    assert path.read_bytes() == before
    assert "\n" not in str(caught.value)
    assert not list(path.parent.glob("*.bak"))


@pytest.mark.parametrize("readonly", [False, True])
@pytest.mark.parametrize("content", [b"hello\n", b"\x00" * 4096, b'{"trials": []}' * 50, b"SQLite format 3\x00"])
def test_a_file_of_another_kind_is_left_alone(tmp_path, content, readonly):
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    _refused_and_untouched(path, "not a tuning database.*left as it is.*--db", readonly)


@pytest.mark.parametrize("mark", [0, 0x12345678])
def test_a_database_of_another_program_is_left_alone(tmp_path, mark):
    path = tmp_path / "other.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE trials (id)")
        connection.execute(f"PRAGMA application_id={mark}")
    connection.close()
    _refused_and_untouched(path, "another program.*--db")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["other.db", "other.db.lock"]


@pytest.mark.parametrize("readonly", [False, True])
def test_a_truncated_file_is_reported(good, readonly):
    good.write_bytes(good.read_bytes()[: good.stat().st_size // 2 // 4096 * 4096])
    _refused_and_untouched(good, r"damaged.*sqlite3 .*recover", readonly)


@pytest.mark.parametrize("page", [1, 2, 5, 12])
def test_a_page_of_rubbish_is_reported(good, page):
    content = bytearray(good.read_bytes())
    content[page * 4096 : page * 4096 + 2048] = b"\xa5" * 2048
    good.write_bytes(content)
    _refused_and_untouched(good, "damaged")


def test_an_emptied_file_with_a_log_beside_it_is_reported(good):
    good.write_bytes(b"")
    log = good.with_name("tuning.db-wal")
    log.write_bytes(b"x" * 100)
    _refused_and_untouched(good, "damaged")
    assert log.read_bytes() == b"x" * 100


@pytest.mark.parametrize("readonly", [False, True])
def test_a_newer_schema_is_refused_with_both_versions(good, readonly):
    with sqlite3.connect(good) as connection:
        connection.execute("PRAGMA user_version=99")
    connection.close()
    _refused_and_untouched(good, "schema 99.*up to 2.*pip install -U autotune", readonly)


def test_a_file_without_its_version_is_reported(good):
    with sqlite3.connect(good) as connection:
        connection.execute("PRAGMA user_version=0")
    connection.close()
    _refused_and_untouched(good, "damaged")


def test_an_empty_file_becomes_a_database(tmp_path):
    path = tmp_path / "tuning.db"
    path.touch()
    with open_store(path) as store:
        assert store.trials() == []


def test_a_creation_that_was_cut_short_is_finished(tmp_path, monkeypatch):
    path = tmp_path / "tuning.db"
    monkeypatch.setattr("tuning_db.migrate.create", lambda connection: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        open_store(path)
    monkeypatch.undo()
    with open_store(path) as store:
        assert store.trials() == []


def test_a_directory_is_refused_with_a_file_to_name(tmp_path):
    with pytest.raises(StoreError, match=r"is a directory.*tuning\.db"):
        open_store(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_path_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for readonly in (False, True):
        with pytest.raises(StoreError, match="--db"):
            open_store(tmp_path / "file" / "tuning.db", readonly=readonly)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_a_place_that_cannot_be_written_is_refused(tmp_path, monkeypatch, code):
    def refuse(*args):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(tuning_db.sqlite_file.os, "open", refuse)
    with pytest.raises(StoreError, match=f"{os.strerror(code)}.*--db"):
        open_store(tmp_path / "tuning.db")


def _open_both_ways(path, report):
    """As a user who may only read: root drops to nobody, anyone else already is."""
    if os.geteuid() == 0:
        os.setuid(65534)
    try:
        open_store(path)
        report.send("opened for writing")
    except StoreError as error:
        report.send(str(error))
    try:
        with open_store(path, readonly=True) as store:
            report.send(len(store.trials()))
    except StoreError as error:
        report.send(str(error))


@pytest.mark.parametrize("folder_too", [False, True])
def test_a_file_that_may_only_be_read(good, folder_too):
    with tempfile.TemporaryDirectory() as place:  # not below tmp_path, which nobody else may enter
        folder = Path(place)
        shutil.copy(good, folder / "tuning.db")
        (folder / "tuning.db").chmod(0o444)
        folder.chmod(0o555 if folder_too else 0o777)
        context = get_context("fork")
        ours, theirs = context.Pipe()
        reader = context.Process(target=_open_both_ways, args=(folder / "tuning.db", theirs))
        reader.start()
        refused, rows = ours.recv(), ours.recv()
        reader.join()
        folder.chmod(0o755)
    assert "Permission denied" in refused and "--db" in refused
    assert rows == 40


def test_a_lock_that_is_never_given_back_ends_in_a_message(tmp_path, monkeypatch):
    path = tmp_path / "tuning.db"
    monkeypatch.setattr(tuning_db.sqlite_file, "BUSY_SECONDS", 0.02)
    with (tmp_path / "tuning.db.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(StoreError, match="another process"):
            open_store(path)


def test_a_writer_that_never_ends_gives_one_clear_line(good, monkeypatch):
    monkeypatch.setattr(tuning_db.sqlite_file, "BUSY_SECONDS", 0.02)
    other = sqlite3.connect(good, isolation_level=None)
    with open_store(good) as store:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match=r"locked.*try again"):
            store.add(make_trial(make_scenario().key))
        other.execute("ROLLBACK")
        store.add(make_trial(make_scenario().key))
        assert len(store.trials()) == 41
    other.close()


def _fill(path, limit, report):
    """Write until the limit on file size, as small as a full disk, ends it; report what was acknowledged."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    written = []
    try:
        with open_store(path) as store:
            key = store.ensure(make_scenario())
            for _ in range(3000):
                trial = make_trial(key, id=new_id(), reason="x" * 2000)
                store.add(trial)
                written.append(trial.id)
        report.send(("no error", written))
    except StoreError as error:
        report.send((str(error), written))


@pytest.mark.parametrize("limit", [8192, 300_000])
def test_a_full_disk_is_one_clear_line_and_keeps_every_acknowledged_trial(tmp_path, limit):
    path = tmp_path / "tuning.db"
    context = get_context("fork")
    ours, theirs = context.Pipe()
    writer = context.Process(target=_fill, args=(path, limit, theirs))
    writer.start()
    said, written = ours.recv()
    writer.join()
    assert "disk full" in said or "disk is full" in said
    assert "\n" not in said
    with open_store(path) as store:
        assert {trial.id for trial in store.trials()} == set(written)


@pytest.mark.parametrize(
    ("kind", "warned"),
    [("nfs4", True), ("cifs", True), ("fuse.sshfs", True), ("9p", True), ("ext4", False), ("tmpfs", False)],
)
def test_a_network_file_system_is_warned_about(tmp_path, kind, warned):
    mounts = tmp_path / "mounts"
    folder = tmp_path / "a b"
    folder.mkdir()
    point = str(folder).replace(" ", "\\040")
    mounts.write_text(f"/dev/a / ext4 rw 0 0\nserver:/x {point} {kind} rw 0 0\ntmpfs {point}x nfs rw 0 0\nbroken\n")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tuning_db.sqlite_file.warn_if_network(folder / "tuning.db", mounts)
    assert [entry.category for entry in caught] == [StoreWarning] * warned
    assert tuning_db.sqlite_file.file_system(tmp_path / "tuning.db", mounts) == "ext4"
