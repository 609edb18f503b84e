"""Several searches of one scenario at once: nothing is measured twice, and they end where one alone would."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from autotune.bench import Bench
from autotune.objective import Objective
from autotune.outcome import Outcome
from autotune.record import described
from autotune.runtimes.fake import FACTS, FakeRuntime
from autotune.sharing import stand_in
from autotune.tune import Study, Tuner
from autotune.workload import load_workload
from search_spaces import Config, load
from tuning_db import Hardware, Scenario, Store, Trial, open_store

SOURCE = [(i * i * 31 + i * 7) % 251 for i in range(5000)]
SPACE = load("native").narrow({**FACTS, "longest": 1000})
SCENARIO = Scenario(Hardware("cpu", {}, "host"), "fake", {}, {"name": "m"}, {"name": "task"}, {"metric": "t"})


class Interrupted:
    """A bench that calls ``first`` when it is first asked to measure."""

    quality = None

    def __init__(self, bench: Bench, first: Callable[[], object]) -> None:
        self._bench, self._first = bench, [first]
        self.space, self.gate = bench.space, bench.gate

    def measure(self, config: Config, *args: Any, **more: Any) -> Outcome:
        while self._first:
            self._first.pop()()
        return self._bench.measure(config, *args, **more)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with open_store(tmp_path / "t.db") as store:
        store.ensure(SCENARIO)
    return tmp_path / "t.db"


def bench(logs: Path) -> Bench:
    return Bench(FakeRuntime(), SPACE, load_workload("task"), SOURCE, logs)


def tuner(store: Store, measuring: Any, budget: int = 14, pause: Any = None) -> Tuner:
    study = Study(SCENARIO.key, Objective("tasks_per_min"), budget, finalists=3, blocks=4, drift_every=5)
    waits = pause or (lambda seconds: threading.Event().wait(0.01))
    return Tuner(study, measuring, store, pause=waits)


def everything(study: Tuner) -> Iterator[Trial]:
    yield from study.screen()
    yield from study.search()
    yield from study.confirm()


def test_searches_at_once_measure_nothing_twice_and_stay_in_the_budget(path: Path, tmp_path: Path) -> None:
    made: list[list[Trial]] = [[], [], []]
    results: list[Any] = [None, None, None]

    def run(number: int) -> None:
        with open_store(path) as store:
            study = tuner(store, bench(tmp_path / str(number)))
            made[number] += everything(study)
            results[number] = study.result()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with open_store(path) as store:
        rows = store.trials(SCENARIO.key)
        assert store.claimed(SCENARIO.key) == set()
    assert sum(map(bool, made)) > 1 and sorted(t.id for part in made for t in part) == [t.id for t in rows]
    assert all(t.counted for t in rows)
    search = [t for t in rows if t.stage == "search"]
    assert len(search) == len({t.config_key for t in search}) == 14
    assert len([t for t in rows if t.stage == "screen"]) == 1
    runs = [(t.config_key, t.block, t.provenance.get("round")) for t in rows if t.stage in ("confirm", "drift")]
    assert len(runs) == len(set(runs))
    mine = [{(t.block, t.provenance["round"]) for t in part if t.stage == "confirm"} for part in made]
    assert sum(map(len, mine)) == len(set().union(*mine))  # a block was measured by one search alone
    assert len({(result.config, result.winner.ratio.mean) for result in results}) == 1


def test_a_configuration_that_another_measures_is_left_to_it_and_its_result_learned(path: Path, tmp_path: Path) -> None:
    with open_store(path) as store:
        list(tuner(store, bench(tmp_path)).screen())
        theirs = _next(store, tmp_path)
        claim = store.claim(SCENARIO.key, f"search/{theirs.key}")
        assert claim is not None
        stored: list[Trial] = []

        def finish(seconds: float) -> None:
            """The other search ends its trial when ours has nothing left but to wait for it."""
            outcome = bench(tmp_path).measure(theirs, 0)
            trial = described(outcome, theirs, Objective("tasks_per_min"))
            stored.append(store.add(replace(trial, scenario_key=SCENARIO.key, stage="search"), claim=claim))
            store.release(claim)

        study = tuner(store, bench(tmp_path), budget=6, pause=finish)
        mine = [t for t in study.search() if t.stage == "search"]
        assert study.ending is not None and study.ending.kind == "budget"
        assert len(stored) == 1 and stored[0].counted
        assert len({t.config_key for t in mine} - {theirs.key, SPACE.default().key}) == len(mine) == 4


def _next(store: Store, logs: Path) -> Config:
    """What a search would measure after the default."""
    asked: list[Config] = []

    class Stop(Exception):
        pass

    class Asked(Interrupted):
        def measure(self, config: Config, *args: Any, **more: Any) -> Outcome:
            asked.append(config)
            raise Stop

    with pytest.raises(Stop):
        list(tuner(store, Asked(bench(logs), Stop), budget=6).search())
    return asked[0]


def test_a_search_waits_for_the_default_that_another_measures(path: Path, tmp_path: Path) -> None:
    with open_store(path) as store:
        claim = store.claim(SCENARIO.key, f"search/{SPACE.default().key}")
        assert claim is not None
        waits: list[float] = []

        def pause(seconds: float) -> None:
            waits.append(seconds)
            if len(waits) == 3:
                store.release(claim)

        first = next(iter(tuner(store, bench(tmp_path), pause=pause).screen()))
        assert len(waits) == 3 and first.config_key == SPACE.default().key


def _measure_for_ever(path: Path, logs: Path, report: Any) -> None:
    def hang() -> None:
        report.send("measuring")
        signal.pause()

    with open_store(path) as store:
        list(tuner(store, Interrupted(bench(logs), hang)).screen())


def test_the_work_of_a_killed_search_is_taken_over_at_once(path: Path, tmp_path: Path) -> None:
    context = get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_measure_for_ever, args=(path, tmp_path, theirs))
    process.start()
    assert ours.recv() == "measuring"
    with open_store(path) as store:
        assert store.claimed(SCENARIO.key) == {f"search/{SPACE.default().key}"}
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert store.claimed(SCENARIO.key) == set()
        waits: list[float] = []
        first = next(iter(tuner(store, bench(tmp_path), pause=waits.append).screen()))
        assert first.config_key == SPACE.default().key and waits == []


def test_a_result_that_comes_after_a_takeover_is_kept_and_not_counted(path: Path, tmp_path: Path) -> None:
    with open_store(path) as store:

        def lose_the_lease() -> None:
            with store.engine.begin() as connection:
                connection.exec_driver_sql("UPDATE claims SET leased_until = 0")
            assert store.claim(SCENARIO.key, f"search/{SPACE.default().key}")

        waits: list[float] = []
        late = next(iter(tuner(store, Interrupted(bench(tmp_path), lose_the_lease), pause=waits.append).screen()))
        assert (late.status, late.counted, late.provenance["late"]) == ("ok", False, True)


def test_the_stand_in_is_the_median_of_what_succeeded() -> None:
    assert stand_in([3.0, None, 1.0, 2.0]) == 2.0
    assert stand_in([None]) is None
