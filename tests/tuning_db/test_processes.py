"""Several processes on one SQLite file: nothing is lost, whether they write at once or are killed."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import time
from multiprocessing import get_context

import pytest
from contracts.records import make_samples, make_scenario, make_trial

from tuning_db import open_store

fork = get_context("fork")


def _write(path, gate, count, report):
    try:
        gate.wait(30)
        with open_store(path) as store:
            key = store.ensure(make_scenario())
            for _ in range(count):
                trial = make_trial(key)
                store.add(trial, make_samples(trial.id))
        report.put("")
    except BaseException as error:
        report.put(repr(error))


@pytest.mark.parametrize("exists", [False, True])
def test_eight_writers_and_a_reader_that_holds_a_transaction(tmp_path, exists):
    path = tmp_path / "tuning.db"
    held = None
    if exists:
        with open_store(path) as store:
            key = store.ensure(make_scenario())
            store.add(make_trial(key))
    else:
        from tuning_db import store as loaded  # so that no child imports: all reach the empty path at once

        assert loaded
    gate, report = fork.Barrier(8), fork.SimpleQueue()
    writers = [fork.Process(target=_write, args=(path, gate, 25, report)) for _ in range(8)]
    for writer in writers:
        writer.start()
    if exists:
        held = sqlite3.connect(path, isolation_level=None)
        held.execute("BEGIN")
        seen = held.execute("SELECT count(*) FROM trials").fetchone()
    assert [report.get() for _ in writers] == [""] * 8
    for writer in writers:
        writer.join()
    if held:
        assert held.execute("SELECT count(*) FROM trials").fetchone() == seen
        held.close()
    with open_store(path) as store:
        rows = store.trials()
        assert len(rows) == 200 + exists
        assert len({row.id for row in rows}) == len(rows)
        assert all(len(store.samples(row.id)) == 3 for row in rows[exists:])


def _endless(path, acknowledged):
    with open_store(path) as store:
        key = store.ensure(make_scenario())
        while True:
            trial = make_trial(key, reason="x" * 3000)
            store.add(trial, make_samples(trial.id, 20))
            os.write(acknowledged, trial.id.encode() + b"\n")


def test_a_killed_writer_leaves_a_good_file_with_every_acknowledged_trial(tmp_path):
    path = tmp_path / "tuning.db"
    kept: set[str] = set()
    dice = random.Random(5)
    for _ in range(12):
        reader, writer = os.pipe()
        process = fork.Process(target=_endless, args=(path, writer))
        process.start()
        os.close(writer)
        time.sleep(dice.uniform(0.0, 0.12))
        assert process.pid
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        with os.fdopen(reader, "rb") as pipe:
            kept |= {line.decode().strip() for line in pipe if line.endswith(b"\n")}
        with open_store(path) as store:  # checks the file
            rows = store.trials()
            assert kept <= {row.id for row in rows}
            assert all(len(store.samples(row.id)) == 20 for row in rows[-3:])
    assert kept
