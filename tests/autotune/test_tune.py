"""A whole study on the fake engine: budgets, resuming, failures of every kind, and the decision."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from autotune.bench import Bench
from autotune.decision import TuneError
from autotune.effects import by_dimension, by_value, measure, table
from autotune.objective import Objective
from autotune.outcome import Status
from autotune.quality import Gate, Quality
from autotune.runtimes.fake import FACTS, NATIVE, FakeRuntime, Fault
from autotune.tune import FREE_LIMIT, Study, Tuner
from autotune.workload import load_workload
from search_spaces import Config, Space, load
from tuning_db import DuplicateTrial, Hardware, Scenario, Store, Trial, open_store

SOURCE = [(i * i * 31 + i * 7) % 251 for i in range(5000)]
FIXED = (
    "kda_chunk", "kv_splits", "bits_dense", "bits_shared", "bits_embedding", "bits_lm_head", "bits_protect_first",
    "bits_protect_last", "bits_group_size", "block_size", "state_dtype", "state_cache_mib", "kv_tokens",
    "token_budget",
)  # fmt: skip
WHOLE = load("native").narrow({**FACTS, "longest": 1000})
SPACE = WHOLE.limit({**{name: (WHOLE.knob(name).default,) for name in FIXED}, "compute": ("fp32",)}, "smaller")
KEY = Scenario(
    Hardware("cpu", {"cpu_model": "x", "cores": 2}),
    "fake",
    {"v": "1"},
    {"name": "m"},
    {"name": "task"},
    {"metric": "t"},
)


class Memory(dict[str, tuple[Mapping[str, Any], bytes]]):
    def put(self, key: str, kind: str, facts: Mapping[str, Any], blob: bytes) -> None:
        self[key] = (dict(facts), blob)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path / "t.db") as opened:
        opened.ensure(KEY)
        yield opened


def tuner(
    store: Store, logs: Path, budget: int = 12, faults: Sequence[Fault] = (), noise: float = 0.0, space: Space = SPACE
) -> Tuner:
    runtime = FakeRuntime(faults=list(faults), noise=noise)
    plain = Bench(runtime, space, load_workload("task"), SOURCE, logs)
    quality = Quality(space, [SOURCE[:80]], Memory(), {}, lambda config: plain.score(config, [SOURCE[:80]]))
    bench = Bench(runtime, space, plain.workload, SOURCE, logs, quality, Gate())
    return Tuner(Study(KEY.key, Objective("tasks_per_min"), budget, finalists=3, blocks=5), bench, store)


def counted(store: Store) -> list[Trial]:
    return [t for t in store.trials(KEY.key, stage="search") if t.counted]


def test_default_first_exactly_the_budget_and_nothing_twice(store: Store, tmp_path: Path) -> None:
    trials = list(tuner(store, tmp_path).search())
    assert trials[0].config_key == SPACE.default().key
    assert len(trials) == len({t.config_key for t in trials}) == 12
    assert [t.id for t in counted(store)] == [t.id for t in trials]
    assert all(t.seconds["measure"] >= 0 and "launch" in t.seconds for t in trials)


@pytest.mark.parametrize("stop", [1, 5, 11])
def test_a_search_stopped_anywhere_ends_at_the_budget(store: Store, tmp_path: Path, stop: int) -> None:
    first = list(itertools.islice(tuner(store, tmp_path).search(), stop))
    list(tuner(store, tmp_path).search())
    assert [t.id for t in counted(store)][:stop] == [t.id for t in first]
    assert len(counted(store)) == len({t.config_key for t in counted(store)}) == 12
    assert list(tuner(store, tmp_path).search()) == []


def test_an_interrupted_confirmation_repeats_no_run(store: Store, tmp_path: Path) -> None:
    one = tuner(store, tmp_path)
    list(one.search())
    list(itertools.islice(one.confirm(), 7))
    list(tuner(store, tmp_path).confirm())
    runs = [(t.config_key, t.block) for t in store.trials(KEY.key, stage="confirm")]
    assert len(runs) == len(set(runs))
    assert {b for _, b in runs} == {1, 2, 3, 4, 5}
    assert list(tuner(store, tmp_path).confirm()) == []


def test_the_winner_is_near_the_known_optimum_and_inside_the_gate(store: Store, tmp_path: Path) -> None:
    study = tuner(store, tmp_path, budget=60, noise=0.02)
    list(study.search())
    list(study.confirm())
    result = study.result()
    best = NATIVE.optimum(SPACE, 0.0099)
    assert result.winner.verdict == "better"
    assert NATIVE.speed(result.config) >= 0.9 * NATIVE.speed(best)
    assert NATIVE.divergence(result.config) <= 0.02
    true = NATIVE.speed(result.config) / NATIVE.speed(SPACE.default())
    assert 0.8 * true <= result.winner.ratio.mean <= 1.1 * true


def test_fast_and_wrong_never_wins(store: Store, tmp_path: Path) -> None:
    study = tuner(store, tmp_path, budget=40)
    list(study.search())
    wrong = [t for t in counted(store) if t.status == Status.QUALITY]
    assert wrong and all("KL" in t.reason and t.metrics["tasks_per_min"] > 0 for t in wrong)
    assert not {t.config_key for t in wrong} & {c.key for c in study.finalists()}


def eight(config: Mapping[str, Any]) -> bool:
    return config["bits_experts"] == 8


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("crash", Status.CRASH), ("oom", Status.OOM), ("unsupported", Status.UNSUPPORTED), ("timeout", Status.TIMEOUT),
        ("not_applied", Status.NOT_APPLIED), ("garbage", Status.QUALITY), ("errors", Status.FAILED_REQUESTS),
    ],
)  # fmt: skip
def test_a_failing_value_costs_a_few_trials_and_is_no_finalist(
    store: Store, tmp_path: Path, kind: str, status: Status
) -> None:
    study = tuner(store, tmp_path, budget=30, faults=[Fault(kind, eight)])
    list(study.search())
    assert len(counted(store)) == 30
    bad = [t for t in counted(store) if eight(t.config)]
    assert all(t.status in (status, Status.PRUNED) and t.reason for t in bad)
    assert len(bad) <= 12
    assert not any(eight(c) for c in study.finalists())


def everything(config: Mapping[str, Any]) -> bool:
    """All but the quality reference."""
    return config["kv_dtype"] != "fp32"


def not_default(config: Mapping[str, Any]) -> bool:
    return Config(config) not in (SPACE.default(), SPACE.complete(SPACE.reference_part()))


def test_a_failing_default_ends_at_once_with_its_reason(store: Store, tmp_path: Path) -> None:
    with pytest.raises(TuneError, match=r"default configuration failed \(crash\)") as caught:
        list(tuner(store, tmp_path, faults=[Fault("crash", everything)]).search())
    assert caught.value.code == 3
    assert len(counted(store)) == 1


def test_a_reference_that_cannot_be_scored_ends_the_search_before_the_first_trial(store: Store, tmp_path: Path) -> None:
    wide = [Fault("oom", lambda config: config["kv_dtype"] == "fp32")]
    with pytest.raises(TuneError, match="reference of the quality gate") as caught:
        list(tuner(store, tmp_path, faults=wide).search())
    assert caught.value.code == 3
    assert store.trials(KEY.key) == []


def test_resuming_after_a_failed_default_says_so_again(store: Store, tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(TuneError, match="default configuration failed"):
            list(tuner(store, tmp_path, faults=[Fault("crash", everything)]).search())
    assert len(counted(store)) == 1


def test_when_all_others_fail_the_budget_is_kept_and_nothing_is_announced(store: Store, tmp_path: Path) -> None:
    study = tuner(store, tmp_path, budget=10, faults=[Fault("oom", not_default)])
    list(study.search())
    assert len(counted(store)) == 10
    assert list(study.confirm()) == []
    with pytest.raises(TuneError, match="no configuration other than the default") as caught:
        study.result()
    assert caught.value.code == 3


def test_a_busy_machine_spends_no_budget_and_is_bounded(store: Store, tmp_path: Path) -> None:
    with pytest.raises(TuneError, match="outside reasons") as caught:
        list(tuner(store, tmp_path, faults=[Fault("busy", everything)]).search())
    assert caught.value.code == 1
    assert counted(store) == []
    assert len(store.trials(KEY.key)) == FREE_LIMIT
    list(tuner(store, tmp_path).search())
    assert len(counted(store)) == 12


def test_the_database_itself_refuses_a_second_counted_trial(store: Store, tmp_path: Path) -> None:
    trial = next(iter(tuner(store, tmp_path).search()))
    with pytest.raises(DuplicateTrial):
        store.add(Trial(**{**{f: getattr(trial, f) for f in trial.__dataclass_fields__}, "id": "f" * 20}))


def test_an_exhausted_space_ends_early(store: Store, tmp_path: Path) -> None:
    tiny = SPACE.limit({k.name: (k.default,) for k in SPACE.free() if k.name not in ("graphs", "threads")}, "tiny")
    study = tuner(store, tmp_path, budget=50, space=tiny)
    assert len(list(study.search())) == tiny.size()


def test_effects_of_single_values_are_the_landscapes(store: Store, tmp_path: Path) -> None:
    study, changes = tuner(store, tmp_path), by_value(SPACE, SPACE.default())
    list(measure(study, changes, 2))
    found = {e.change.what: e for e in table(changes, study.stored("effects"), study.study.objective)}
    compiled = found["graphs=compiled"]
    assert compiled.ratio is not None and compiled.ratio.mean == pytest.approx(1.3, rel=0.1)
    assert compiled.change.dimension == "graphs"
    four = found["bits_experts=4"]
    assert four.kl is not None and four.kl == pytest.approx(0.006, rel=0.2)
    assert list(measure(study, changes, 2)) == []


def test_effects_of_dimensions_stand_both_ways(store: Store, tmp_path: Path) -> None:
    study = tuner(store, tmp_path)
    winner = SPACE.complete({"bits_experts": 8, "graphs": "compiled", "prefix_reuse": True})
    changes = by_dimension(SPACE, SPACE.default(), winner)
    assert {c.dimension for c in changes} == {"bits", "graphs", "cache"}
    list(measure(study, changes, 2))
    effects = table(changes, study.stored("effects"), study.study.objective)
    graphs = {e.change.base == winner: e for e in effects if e.change.dimension == "graphs"}
    assert graphs[False].ratio is not None and graphs[False].ratio.mean == pytest.approx(1.3, rel=0.1)
    assert graphs[True].ratio is not None and graphs[True].ratio.mean == pytest.approx(1 / 1.3, rel=0.1)
    assert graphs[True].change.config == SPACE.complete({"bits_experts": 8, "prefix_reuse": True})


def run_by_run(factory: Callable[[], Tuner]) -> int:
    """How many processes a search takes when each is killed right after its first trial."""
    for number in range(1, 100):
        if not list(itertools.islice(factory().search(), 1)):
            return number
    raise AssertionError("never ended")


def test_killed_after_every_single_trial_it_still_ends_at_the_budget(store: Store, tmp_path: Path) -> None:
    assert run_by_run(lambda: tuner(store, tmp_path, budget=8)) == 9
    assert len(counted(store)) == 8
