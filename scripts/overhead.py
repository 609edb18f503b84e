"""The tuner's own time: per trial up to 2,000 trials, and as a share of a 200-trial run of the native engine.

A whole study runs on the fake engine in the native engine's space; what passes outside `Bench.measure` is ours: asking,
learning, judging, storing. One trial of the native engine is measured for the share. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, ClassVar

os.environ.setdefault("OMP_NUM_THREADS", "1")

from autotune import endings
from autotune.bench import Bench
from autotune.objective import Objective
from autotune.outcome import Outcome
from autotune.plan import Plan
from autotune.runtimes.fake import FACTS, FakeRuntime
from autotune.setting import make_bench, prepare
from autotune.tune import Study, Tuner
from autotune.workload import load_workload
from search_spaces import Config, load
from tuning_db import Hardware, Scenario, open_store

WORKLOAD = str(Path(__file__).parent / "data" / "table.toml")


class Timed(Bench):
    """A bench that counts the seconds spent in it."""

    spent: ClassVar[list[float]] = [0.0]

    def measure(self, config: Config, seed: int, *rest: Any, **named: Any) -> Outcome:
        start = time.perf_counter()
        try:
            return super().measure(config, seed, *rest, **named)
        finally:
            self.spent[0] += time.perf_counter() - start


def own_seconds(trials: int, folder: Path) -> list[float]:
    """Seconds of each trial of one study outside of measuring."""
    endings.IDLE = trials  # a search that stopped gaining would end before its last trial
    space = load("native").narrow({**FACTS, "longest": 1000})
    scenario = Scenario(Hardware("cpu", {}), "fake", {"v": "1"}, {"name": "m"}, {"name": "table"}, {"metric": "t"})
    bench = Timed(
        FakeRuntime(noise=0.02), space, load_workload(WORKLOAD), [i * 31 % 251 for i in range(4000)], folder / "logs"
    )
    with open_store(folder / "overhead.db") as store:
        store.ensure(scenario)
        tuner = Tuner(Study(scenario.key, Objective("tasks_per_min"), trials), bench, store)
        found, last = [], time.perf_counter() - bench.spent[0]
        for _ in tuner.search():
            now = time.perf_counter() - bench.spent[0]
            found.append(now - last)
            last = now
    return found


def native_seconds(folder: Path) -> float:
    """Seconds of one trial of the native engine's default: launch, warm-up, the task workload, quality."""
    with open_store(folder / "native.db") as store:
        setting = prepare(Plan())
        bench = make_bench(setting, store, folder)
        if bench.quality is not None:
            bench.quality.reference()
        start = time.perf_counter()
        outcome = bench.measure(setting.space.default(), 0)
        if not outcome.counted or outcome.reason:
            raise SystemExit(f"the native engine's default did not run: {outcome.reason}")
        return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--run", type=int, default=200)
    parser.add_argument("--trial-seconds", type=float, help="of a native trial; measured when it is not given")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        seconds = options.trial_seconds or native_seconds(folder)
        found = own_seconds(options.trials, folder)
    result = {
        "trials": len(found),
        "ms_per_trial": round(1000 * statistics.fmean(found), 2),
        "ms_last_100": round(1000 * statistics.fmean(found[-100:]), 2),
        "ms_worst": round(1000 * max(found), 1),
        "native_trial_seconds": round(seconds, 2),
        "share_of_run": round(sum(found[: options.run]) / (sum(found[: options.run]) + options.run * seconds), 5),
    }
    print(
        f"{len(found)} trials: {result['ms_per_trial']} ms of the tuner's own time a trial, {result['ms_last_100']} ms "
        f"over the last 100; {100 * result['share_of_run']:.2f} % of {options.run} native trials of {seconds:.1f} s"
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
