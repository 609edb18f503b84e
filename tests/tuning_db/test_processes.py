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
from sqlalchemy import select

from tuning_db import open_store, upkeep
from tuning_db.schema import trials

fork = get_context("fork")
WRITES = 200
KILLS = 50


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
    writers = [fork.Process(target=_write, args=(path, gate, WRITES, report)) for _ in range(8)]
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
        assert len(rows) == 8 * WRITES + exists
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
    for number in range(KILLS):
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
            stored = {row.id for row in store.rows(select(trials.c.id))}
        assert kept <= stored
        assert upkeep.check(path, quick=number % 10 != 9).problems == ()
    assert len(kept) > KILLS


def _claim(path, gate, report):
    try:
        gate.wait(30)
        with open_store(path) as store:
            key = store.ensure(make_scenario())
            won = []
            for number in range(40):
                claim = store.claim(key, f"search/{number}", limit=40)
                if claim and not store.trials(key, config_key=f"c1:{number}"):
                    store.add(make_trial(key, config_key=f"c1:{number}"), claim=claim)
                    won.append(number)
                if claim:
                    store.release(claim)
        report.put(won)
    except BaseException as error:
        report.put(repr(error))


def test_six_searches_share_forty_jobs_without_a_double_run(tmp_path):
    path = tmp_path / "tuning.db"
    open_store(path).close()
    gate, report = fork.Barrier(6), fork.SimpleQueue()
    workers = [fork.Process(target=_claim, args=(path, gate, report)) for _ in range(6)]
    for worker in workers:
        worker.start()
    won = [report.get() for _ in workers]
    for worker in workers:
        worker.join()
    assert sorted(number for part in won for number in part) == list(range(40))
    with open_store(path) as store:
        assert len(store.trials()) == 40 and all(trial.counted for trial in store.trials())
