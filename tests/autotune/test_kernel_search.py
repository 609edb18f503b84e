"""Kernel tuning end to end on real child processes: wrong, crashing and hanging kernels are outcomes that never win."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from autotune import kernel_search
from autotune.kernel_bench import KernelBench
from autotune.outcome import EngineError, Status
from autotune.plan import PlanError, resolve
from autotune.runtimes.native import NativeRuntime
from autotune.runtimes.native.kernels import tuning
from autotune.runtimes.native.kernels.process import KernelProcess
from autotune.runtimes.native.kernels.tuning import Operator
from autotune.runtimes.native.zygote import Child, Zygote
from autotune.setting import prepare, reference_model
from autotune.tune import Study, Tuner
from search_spaces import load
from tuning_db import Store, open_store

FAULTY = '''
"""A kernel that crashes, hangs or answers wrongly by its settings, and is fastest with one that is right."""
import os, signal, time
from autotune.runtimes.native.kernels.process import Timing

def serve(pipe, key, footprint):
    pipe.send(("ready", {"facts": {}, "defaults": {"path": "packed", "block": 4}}))
    while True:
        choice = pipe.recv()
        block = choice.get("block")
        print("block", block, flush=True)
        if block == 2 and choice["ahead"] < 1000:
            os.kill(os.getpid(), signal.SIGSEGV)
        if block == 2 and choice["ahead"] > 3000:
            time.sleep(60)
        if choice["path"] == "dense":
            pipe.send(("failed", "crash", "RuntimeError: the compiler gave up"))
        elif block == 8:
            pipe.send(("timed", Timing(0.5, 1e-2, ())))
        else:
            seconds = 1e-5 if choice["ahead"] == 2048 else 2e-5
            pipe.send(("timed", Timing(1e-3, 1e-2, (seconds,) * 3)))
'''
OPERATOR = Operator("linear", "int8-bf16", 64, 64, 1)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path / "t.db") as opened:
        yield opened


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Child]]:
    """Spawns children of the faulty kernel."""
    folder = tmp_path_factory.mktemp("faulty")
    (folder / "faulty_kernel.py").write_text(FAULTY)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        zygote = Zygote()
    yield lambda log, *args: zygote.spawn(log, "faulty_kernel:serve", *args)
    zygote.close()


def _ending(choice: Mapping[str, Any]) -> str:
    """What the faulty kernel does with a choice."""
    if choice["path"] == "dense" or (choice["block"] == 2 and choice["ahead"] < 1000):
        return "crash"
    return {2: "timeout" if choice["ahead"] > 3000 else "ok", 4: "ok", 8: "quality"}[choice["block"]]


def study(store: Store, budget: int, bench: KernelBench) -> Tuner:
    setting = kernel_search.prepare(resolve({}, {}))
    key = store.ensure(setting.scenario(OPERATOR))
    return Tuner(Study(key, kernel_search.OBJECTIVE, budget, finalists=2, blocks=3), bench, store)


def test_faults_are_outcomes_and_never_win(store: Store, tmp_path: Path, faulty: Callable[..., Child]) -> None:
    process = KernelProcess(OPERATOR, 1, tmp_path / "kernel.log", faulty)
    bench = KernelBench.of(process)
    process.seconds = 2.0
    tuner = study(store, 24, bench)
    trials = list(tuner.search())
    wanted = {t.config_key: _ending(t.config) for t in trials}
    assert {t.config_key: t.status for t in trials} == wanted
    assert set(wanted.values()) == {"ok", "crash", "timeout", "quality"}
    assert any("signal 11" in t.reason and "block 2" in t.reason for t in trials)
    assert all("op_s" not in t.metrics for t in trials if t.status != "ok")
    list(tuner.confirm())
    result = tuner.result()
    assert result.config["ahead"] == 2048 and result.winner.verdict == "better"
    process.close()


def test_a_search_killed_after_each_trial_resumes(store: Store, tmp_path: Path, faulty: Callable[..., Child]) -> None:
    def one_more() -> int:
        process = KernelProcess(OPERATOR, 1, tmp_path / "kernel.log", faulty)
        try:
            bench = KernelBench.of(process)
            process.seconds = 2.0
            return len(list(itertools.islice(study(store, 4, bench).search(), 1)))
        finally:
            process.close()

    assert [one_more() for _ in range(5)] == [1, 1, 1, 1, 0]
    assert len({t.config_key for t in store.trials(stage="search")}) == 4


def test_a_product_that_no_engine_makes_is_unsupported_here(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="an engine stores linear") as caught:
        KernelBench.of(KernelProcess(Operator("linear", "int4g64-bf16", 64, 96, 1), 1, tmp_path / "log"))
    assert caught.value.status == Status.UNSUPPORTED


def test_a_real_operator_is_tuned_stored_and_used_by_the_engine(store: Store, tmp_path: Path) -> None:
    plan = resolve({"only": "linear/int8-fp32/512x512/4", "blocks": 2, "finalists": 1, "budget": 2}, {})
    setting = kernel_search.prepare(plan)
    (operator,) = setting.operators
    with setting.tuner(operator, store, tmp_path) as tuner:
        assert all(t.status == "ok" and t.metrics["op_error"] < 0.02 for t in tuner.search())
        assert [t.counters["sample_0_s"] > 0 for t in tuner.confirm()] == [True] * 4
    table = kernel_search.tuned(plan, store)
    assert list(table) == [operator.key] and table[operator.key]["path"] in ("packed", "dense")
    kept = store.reference(tuning.digest(table))
    assert kept is not None and kept.kind == "kernels"
    plain, made = prepare(resolve({}, {})), prepare(resolve({}, {}), table)
    assert made.scenario.engine_build["kernels"] == tuning.digest(table)
    assert made.scenario.key != plain.scenario.key
    config = load("native").complete({"bits_dense": 8, "bits_attention": 8})
    with NativeRuntime(reference_model(), kernels=table).launch(config, tmp_path / "log") as endpoint:
        said = endpoint.effective()["kernel_tuning"]
    assert said[operator.key] == "tuned"
    assert said["linear/int8-fp32/512x256/4"] == "nearest 512x512"
    assert said["linear/int8-fp32/512x512/256"] == "default"


def test_other_hardware_or_other_kernels_are_not_in_the_table(store: Store, tmp_path: Path) -> None:
    from dataclasses import replace

    plan = resolve({"only": "linear/int8-bf16/512x128/1", "blocks": 2, "finalists": 1, "budget": 2}, {})
    setting = kernel_search.prepare(plan)
    with setting.tuner(setting.operators[0], store, tmp_path) as tuner:
        assert list(tuner.search()) and list(tuner.confirm())
    assert len(setting.table(store)) == 1
    assert replace(setting, build={"source": "another"}).table(store) == {}
    assert replace(setting, cache=1).table(store) == {}


def test_a_name_that_fits_nothing_is_said() -> None:
    with pytest.raises(PlanError, match="leaves no operator"):
        kernel_search.prepare(resolve({"only": "flash"}, {}))
    with pytest.raises(PlanError, match="engine or kernels"):
        resolve({}, {"AUTOTUNE_TARGET": "kernel"})
