"""Which configurations share a launch, and that nothing else does."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.bench import Bench
from autotune.launches import Launches
from autotune.outcome import KEPT_LAUNCH, EngineError, Status
from autotune.runtimes.fake import FACTS, FakeRuntime, Fault
from autotune.workload import load_workload
from search_spaces import load

SPACE = load("native").narrow({**FACTS, "longest": 1000})
SOURCE = [(i * i * 31 + i * 7) % 251 for i in range(5000)]
REUSE = {"prefix_reuse": True, "state_cache_mib": 64}


def config(**values):
    return SPACE.complete(values)


@pytest.fixture
def runtime() -> FakeRuntime:
    return FakeRuntime()


@pytest.fixture
def bench(runtime: FakeRuntime, tmp_path: Path):
    launches = Launches(runtime, SPACE)
    yield Bench(runtime, SPACE, load_workload("task"), SOURCE, tmp_path, launches=launches)
    launches.close()
    assert runtime.running == 0


def test_live_knobs_share_a_launch_and_read_as_if_fresh(bench: Bench, runtime: FakeRuntime) -> None:
    first = bench.measure(config(), 0, fresh=False)
    second = bench.measure(config(token_budget=1024, **REUSE), 0, fresh=False)
    assert len(runtime.launched) == 1 and runtime.running == 1
    assert KEPT_LAUNCH not in first.counters and second.counters[KEPT_LAUNCH] == 1.0
    assert "live knobs" in second.notes[-1] and second.effective["token_budget"] == 1024
    alone = bench.measure(config(token_budget=1024, **REUSE), 0)
    assert alone.metrics["output_tok_s"] == pytest.approx(second.metrics["output_tok_s"], rel=1e-6)
    assert len(runtime.launched) == 2 and runtime.running == 0


@pytest.mark.parametrize("other", [{"max_seqs": 4}, {"kv_dtype": "int8"}, {"bits_experts": 4}, {"graphs": "compiled"}])
def test_any_other_knob_needs_a_launch_of_its_own(bench: Bench, runtime: FakeRuntime, other: dict) -> None:
    bench.measure(config(), 0, fresh=False)
    bench.measure(config(**other), 0, fresh=False)
    assert len(runtime.launched) == 2 and runtime.running == 1


def test_a_fresh_measurement_never_runs_beside_a_kept_engine(bench: Bench, runtime: FakeRuntime) -> None:
    bench.measure(config(), 0, fresh=False)
    bench.measure(config(), 0)
    assert len(runtime.launched) == 2 and runtime.running == 0


def test_an_engine_that_failed_is_not_kept(tmp_path: Path) -> None:
    crash = Fault("crash", phase="measure", when=lambda c: c["token_budget"] == 512)
    runtime = FakeRuntime(faults=[crash])
    launches = Launches(runtime, SPACE)
    bench = Bench(runtime, SPACE, load_workload("task"), SOURCE, tmp_path, launches=launches)
    assert bench.measure(config(), 0, fresh=False).status is Status.CRASH and runtime.running == 0
    assert bench.measure(config(token_budget=1024), 0, fresh=False).status is Status.OK
    assert len(runtime.launched) == 2
    launches.close()


def test_a_launch_that_fails_leaves_nothing(tmp_path: Path) -> None:
    runtime = FakeRuntime(faults=[Fault("oom", phase="launch")])
    launches = Launches(runtime, SPACE)
    with pytest.raises(EngineError), launches.running(config(), tmp_path / "a.log", fresh=False):
        pass
    launches.close()
    assert runtime.running == 0
