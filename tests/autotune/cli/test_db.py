"""`autotune db`: what it prints, what it asks, and its exit codes."""

from __future__ import annotations

import re
import sqlite3
import time
import warnings
from pathlib import Path

import pytest
from click.testing import CliRunner
from contracts.records import make_samples, make_scenario, make_trial

from autotune.cli import main
from tuning_db import open_store

GOLDEN = Path(__file__).parents[2] / "golden" / "schema"


@pytest.fixture
def path(tmp_path):
    """A database with one old search trial and one old confirming trial."""
    with open_store(tmp_path / "tuning.db") as store:
        key = store.ensure(make_scenario())
        for stage in ("search", "confirm"):
            trial = make_trial(key, stage=stage, ended_at=time.time() - 10 * 86400)
            store.add(trial, make_samples(trial.id))
    return tmp_path / "tuning.db"


def run(*words):
    return CliRunner().invoke(main, ["db", *map(str, words)])


def test_check_counts_the_rows(path):
    done = run("check", "--db", path)
    assert (done.exit_code, done.stdout) == (
        0,
        "good: 1 hardware, 1 scenarios, 2 trials, 2 samples, 0 claims\n",
    )


def test_check_of_a_damaged_file_reports_and_puts_it_aside_only_when_told(path):
    path.write_bytes(path.read_bytes()[:4096] + b"\xa5" * 8192)
    content = path.read_bytes()
    done = run("check", "--db", path)
    assert done.exit_code == 1 and "damaged" in done.stderr and path.read_bytes() == content
    done = run("check", "--aside", "--db", path)
    (aside,) = path.parent.glob("tuning.db.damaged-*Z")
    assert done.exit_code == 1 and str(aside) in done.stderr
    assert aside.read_bytes() == content and not path.exists()


def test_a_file_that_is_not_ours_is_never_put_aside(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("mine " * 100)
    done = run("check", "--aside", "--db", path)
    assert done.exit_code == 2 and "not a tuning database" in done.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_check_of_a_good_file_never_puts_it_aside(path):
    assert run("check", "--aside", "--db", path).exit_code == 0
    assert path.exists()


def test_backup_and_vacuum_say_how_large(path, tmp_path):
    assert re.search(r"copy\.db: .* KiB, checked", run("backup", tmp_path / "copy.db", "--db", path).stdout)
    assert re.search(r"KiB before, .* KiB after", run("vacuum", "--db", path).stdout)


def test_prune_shows_asks_and_deletes(path):
    assert run("prune", "--older", "5d", "--dry-run", "--db", path).stdout == "would delete the requests of 1 trials\n"
    refused = run("prune", "--older", "5d", "--db", path)
    assert refused.exit_code == 2 and "add --yes" in refused.stderr
    with open_store(path) as store:
        assert all(store.samples(trial.id) for trial in store.trials())
    assert (
        "deleted the requests of 1 trials and 1 trials"
        in run("prune", "--older", "5d", "--trials", "--yes", "--db", path).stdout
    )
    with open_store(path) as store:
        assert [trial.stage for trial in store.trials()] == ["confirm"]
    assert "would delete the requests of 0 trials" in run("prune", "--older", "5d", "--yes", "--db", path).stdout


def test_an_old_file_is_upgraded_with_one_clear_line(tmp_path):
    path = tmp_path / "tuning.db"
    with sqlite3.connect(path) as connection:
        connection.executescript((GOLDEN / "1.sql").read_text(encoding="utf-8"))
    connection.close()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        done = run("upgrade", "--db", path)
    (copy,) = tmp_path.glob("tuning.db.schema1-*")
    assert done.stdout == "schema 1 is now schema 2\n"
    assert done.stderr == (
        f"warning: tuning database {path} had schema 1 and now has 2; {copy.name} beside it is a copy of what it was\n"
    )


def test_upgrade_says_what_it_did(path):
    assert run("upgrade", "--db", path).stdout == "schema 2, the newest: nothing to do\n"
