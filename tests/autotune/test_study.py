"""The study's stages and endings on the fake engine: screen, SLOs, pruning, drift, disturbed runs, every way out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune import endings
from autotune.bench import Bench
from autotune.decision import Result, TuneError, decided
from autotune.guards import drift, self_check
from autotune.hints import Candidate, by_load, fitted, presets, stored
from autotune.judge import BOUND
from autotune.metrics import Timeline
from autotune.objective import Objective
from autotune.outcome import Outcome, Status
from autotune.runtimes.fake import FACTS, NATIVE, FakeRuntime, Fault
from autotune.slo import State, parse
from autotune.tune import TRIES, Study, Tuner
from autotune.workload import load_workload
from search_spaces import Config, Space, load
from search_spaces.presets import starts
from tuning_db import Hardware, Scenario, Store, Trial, open_store

SOURCE = [(i * i * 31 + i * 7) % 251 for i in range(5000)]
WHOLE = load("native").narrow({**FACTS, "longest": 1000})
FREE = ("graphs", "threads", "prefix_reuse", "max_seqs", "attention", "bits_experts")
SPACE = WHOLE.limit({k.name: (k.default,) for k in WHOLE.knobs if k.name not in FREE}, "smaller")
WORKLOAD = replace(load_workload("task"), output=(4, 5), warmup=1)
KEY = Scenario(
    Hardware("cpu", {"cpu_model": "x", "cores": 2}), "native", {"v": "1"}, {"name": "m"}, {"name": "task"},
    {"metric": "tasks_per_min", "better": "higher"},
)  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path / "t.db") as opened:
        opened.ensure(KEY)
        yield opened


class Clock:
    """A clock that every look moves on by ``step`` seconds."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


STANDING = Clock(0.0)


def tuner(
    store: Store, logs: Path, budget: int = 16, runtime: FakeRuntime | None = None, space: Space = SPACE,
    clock: Callable[[], float] = STANDING, **study: Any,
) -> Tuner:  # fmt: skip
    bench = Bench(runtime or FakeRuntime(noise=0.01), space, WORKLOAD, SOURCE, logs)
    wanted = {"finalists": 3, "blocks": 5, "drift_every": 0, **study}
    return Tuner(Study(KEY.key, Objective("tasks_per_min"), budget, **wanted), bench, store, clock)


def whole(study: Tuner) -> Result:
    for stage in (study.screen, study.search, study.confirm):
        list(stage())
    return study.result()


def trials(store: Store, stage: str = "search") -> list[Trial]:
    return [t for t in store.trials(KEY.key, stage=stage) if t.counted]


def slow_p50(store: Store) -> float:
    """The default's median time to first token, in seconds."""
    return next(t for t in trials(store) if t.config_key == SPACE.default().key).metrics["e2e_p50"]


def test_an_slo_that_the_default_breaks_is_met_by_the_winner(store: Store, tmp_path: Path) -> None:
    whole(tuner(store, tmp_path, 20))
    limit = slow_p50(store) * 0.8
    slo = parse(f"e2e_p50<{limit * 1000:.3f}ms")
    result = whole(tuner(store, tmp_path, 20, slos=(slo,)))
    assert result.config != SPACE.default()
    (found,) = result.findings[result.config.key]
    assert found.state is State.MET and found.count == 60
    assert result.findings[SPACE.default().key][0].state is State.NOT_MET
    assert len(trials(store)) == 20


def test_a_new_slo_is_answered_from_stored_requests_without_a_run(store: Store, tmp_path: Path) -> None:
    first = tuner(store, tmp_path)
    whole(first)
    runtime = FakeRuntime()
    again = tuner(store, tmp_path, runtime=runtime, slos=(parse("ttft_p99<1h"),))
    result = whole(again)
    assert runtime.launched == []
    assert all(f.state is State.UNPROVEN and f.needed == 459 for found in result.findings.values() for f in found)


def test_what_breaks_an_slo_never_wins_however_fast(store: Store, tmp_path: Path) -> None:
    """Here more sequences at once are faster and slower to the first token; only few at once are allowed."""
    whole(tuner(store, tmp_path, 20))
    limit = sorted(t.metrics["ttft_p90"] for t in trials(store) if t.status == "ok")[3]
    slo = parse(f"ttft_p90<{limit * 1000 * 1.0001:.4f}ms")
    study = tuner(store, tmp_path, 20, slos=(slo,))
    assert all(
        study.judge.violation(t) == 0 for t in trials(store) if t.config_key in {c.key for c in study.finalists()}
    )
    result = whole(study)
    assert all(found.violation == 0 for found in result.findings[result.config.key])


def test_an_impossible_slo_ends_within_the_budget_with_code_3(store: Store, tmp_path: Path) -> None:
    study = tuner(store, tmp_path, 12, slos=(parse("ttft_p50<1us"),))
    with pytest.raises(
        TuneError, match=r"no configuration met the SLO: \d+ of 12 trials are past ttft_p50<1us"
    ) as caught:
        whole(study)
    assert caught.value.code == 3 and len(trials(store)) == 12


def test_the_slo_of_the_search_holds_in_the_export_or_a_newer_one_does(store: Store, tmp_path: Path) -> None:
    result = whole(tuner(store, tmp_path, 16, slos=(parse("e2e_p50<1h"),), finalists=2))
    rows = store.trials(KEY.key, stage="confirm")
    (latest,) = decided(rows, KEY, store)
    assert latest.config == result.config and latest.findings == result.findings
    assert list(decided(rows, KEY, store, (parse("e2e_p50<1us"),))) == []


def test_a_space_of_one_point_launches_nothing_and_says_so(store: Store, tmp_path: Path) -> None:
    runtime = FakeRuntime()
    one = SPACE.limit({k.name: (k.default,) for k in SPACE.free()}, "one")
    for stage in ("screen", "search"):
        with pytest.raises(TuneError, match="nothing to choose: the space has one configuration") as caught:
            list(getattr(tuner(store, tmp_path, space=one, runtime=runtime), stage)())
        assert caught.value.code == 3
    assert runtime.launched == []


def test_an_engine_that_runs_nothing_else_ends_with_its_reason(store: Store, tmp_path: Path) -> None:
    bad = [Fault("oom", lambda config: Config(config) != SPACE.default())]
    with pytest.raises(
        TuneError, match=r"other than the default ran \(9 oom\); the first: launch: scripted oom"
    ) as caught:
        whole(tuner(store, tmp_path, 10, FakeRuntime(faults=bad)))
    assert caught.value.code == 3 and len(trials(store)) == 10


def test_an_engine_that_never_runs_ends_at_once(store: Store, tmp_path: Path) -> None:
    with pytest.raises(TuneError, match="the default configuration failed") as caught:
        whole(tuner(store, tmp_path, 10, FakeRuntime(faults=[Fault("crash")])))
    assert caught.value.code == 3 and len(trials(store)) == 1


@pytest.mark.parametrize(("budget", "kind"), [(10, "budget"), (500, "exhausted")])
def test_the_ending_is_named(store: Store, tmp_path: Path, budget: int, kind: str) -> None:
    small = SPACE.limit({k.name: (k.default,) for k in SPACE.free() if k.name not in ("graphs", "max_seqs")}, "small")
    study = tuner(store, tmp_path, budget, space=small)
    list(study.search())
    assert study.ending is not None and study.ending.kind == kind
    assert len(trials(store)) == min(budget, small.size())


def test_a_search_that_stopped_gaining_ends_before_its_budget(store: Store, tmp_path: Path) -> None:
    study = tuner(store, tmp_path, 400, FakeRuntime())
    list(study.search())
    assert study.ending is not None and study.ending.kind == "idle"
    done = trials(store)
    assert endings.IDLE < len(done) < 400
    best = max(done, key=lambda t: t.metrics.get("tasks_per_min", 0.0))
    assert NATIVE.speed(best.config) == pytest.approx(NATIVE.speed(NATIVE.optimum(SPACE)), rel=0.03)


def test_a_time_limit_leaves_time_to_confirm_and_decides(store: Store, tmp_path: Path) -> None:
    study = tuner(store, tmp_path, 500, clock=Clock(1.0), seconds=40.0)
    result = whole(study)
    assert study.ending is not None and study.ending.kind == "time" and "--time" in study.ending.sentence
    assert result.winner.ratio.n >= 2 and len(trials(store)) < 40


def test_time_spent_before_a_first_result_is_124_and_resumes(store: Store, tmp_path: Path) -> None:
    with pytest.raises(TuneError, match="before a first result") as caught:
        whole(tuner(store, tmp_path, 500, clock=Clock(1.0), seconds=3.0))
    assert caught.value.code == 124
    before = len(trials(store))
    whole(tuner(store, tmp_path, before + 8))
    assert len(trials(store)) == before + 8


def test_the_screen_runs_the_default_twice_and_the_candidates_first(store: Store, tmp_path: Path) -> None:
    hint = Candidate(SPACE.complete({"graphs": "compiled", "threads": 2}), "winner of a scenario that is near")
    study = tuner(store, tmp_path, 8, candidates=(hint,))
    list(study.screen())
    assert [t.config_key for t in trials(store)] == [SPACE.default().key, hint.config.key]
    assert trials(store)[1].provenance["candidate"] == hint.why
    assert len(trials(store, "screen")) == 1
    check = study.self_check()
    assert check is not None and "A/A check" in check.sentence()
    assert list(study.screen()) == []
    list(study.search())
    assert len(trials(store)) == 8


def test_candidates_do_not_pass_the_budget(store: Store, tmp_path: Path) -> None:
    many = tuple(Candidate(SPACE.complete({"max_seqs": n}), "preset") for n in (1, 2, 4, 16))
    list(itertools.chain((study := tuner(store, tmp_path, 3, candidates=many)).screen(), study.search()))
    assert len(trials(store)) == 3


def requests(factor: float) -> list[Timeline]:
    return [Timeline(i, 0, 8, 1, 0.0, (1.0 + i * 0.1 + factor * (1 + i % 3),)) for i in range(12)]


def test_the_default_against_itself_keeps_the_band_or_widens_it() -> None:
    same = self_check(requests(0.0), requests(0.0))
    assert same is not None and same.band == 0.02 and "tie band 2%" in same.sentence()
    other = self_check(requests(0.0), requests(0.05))
    assert other is not None and 0.02 < other.band < 0.25 and "leaves out 1" in other.sentence()
    assert self_check(requests(0.0)[:1], requests(0.0)) is None


def test_a_wide_band_makes_ties_of_what_it_covers(store: Store, tmp_path: Path) -> None:
    result = whole(tuner(store, tmp_path, 12))
    rows = store.trials(KEY.key, stage="confirm")
    wide = [replace(t, provenance={**t.provenance, "band": 5.0}) for t in rows]
    (again,) = decided(wide, KEY)
    assert result.winner.verdict == "better" and again.winner.verdict == "same" and again.config == again.default


def test_the_default_is_measured_again_as_the_study_goes(store: Store, tmp_path: Path) -> None:
    study = tuner(store, tmp_path, 17, drift_every=5)
    list(itertools.chain(study.screen(), study.search()))
    again = trials(store, "drift")
    assert [t.block for t in again] == [1, 2, 3] and {t.config_key for t in again} == {SPACE.default().key}
    assert {t.seed for t in again} == {0}
    found = study.drift()
    assert found is not None and found.n == 5 and "readings" in found.sentence()
    assert list(study.search()) == [] and len(trials(store)) == 17


def test_drift_says_when_the_machine_went_slower() -> None:
    steady, gone = drift([(0.0, 1.0), (60.0, 1.01)]), drift([(0.0, 1.0), (600.0, 0.8), (1200.0, 0.7)])
    assert steady is not None and "drifts" not in steady.sentence()
    assert gone is not None and "the machine drifts" in gone.sentence() and gone.change < 0.75
    assert drift([(0.0, 1.0)]) is None


def test_hopeless_trials_are_given_up_counted_and_resumed(store: Store, tmp_path: Path) -> None:
    runtime = FakeRuntime()
    study = tuner(store, tmp_path, 40, runtime)
    result = whole(study)
    given_up = [t for t in trials(store) if t.status == Status.PRUNED]
    assert given_up and all("hopeless after" in t.reason and BOUND in t.counters for t in given_up)
    assert all(store.samples(t.id) and not t.metrics for t in given_up)
    best = max(study.judge.feasible(t) or -99.0 for t in trials(store))
    assert all(t.counters[BOUND] < best for t in given_up)
    assert all(NATIVE.speed(t.config) < NATIVE.speed(result.config) for t in given_up)
    assert result.winner.verdict == "better"
    assert list(tuner(store, tmp_path, 40).search()) == []


class Disturbed:
    """A bench whose first ``times`` runs of the confirmation were throttled."""

    def __init__(self, inner: Bench, times: int) -> None:
        self.inner, self.left, self.space = inner, times, inner.space
        self.quality, self.gate = inner.quality, inner.gate

    def measure(self, config: Config, seed: int, name: str = "trial", watch: Any = None, fresh: bool = True) -> Outcome:
        outcome = self.inner.measure(config, seed, name, watch, fresh)
        if not seed or not self.left:
            return outcome
        self.left -= 1
        return replace(outcome, disturbed="throttled: the CPU quota stopped the run")


@pytest.mark.parametrize(("times", "kept"), [(0, 1), (2, 3), (50, TRIES)])
def test_a_disturbed_block_is_repeated_at_most_three_times(store: Store, tmp_path: Path, times: int, kept: int) -> None:
    study = tuner(store, tmp_path, 8)
    list(study.search())
    study.bench = Disturbed(study.bench, times)  # type: ignore[arg-type, assignment]
    first = next(iter(study.confirm()))
    rows = store.trials(KEY.key, stage="confirm")
    assert len(rows) == kept and sum(t.counted for t in rows) == 1
    assert ("notes" in first.provenance) == (times >= TRIES)


def near(**facts: Any) -> Scenario:
    return replace(KEY, **facts)


def test_winners_of_near_scenarios_come_first_nearest_first_and_labelled(store: Store, tmp_path: Path) -> None:
    whole(tuner(store, tmp_path, 12))
    wanted = near(workload={"name": "chat"})
    (found,) = stored(store, wanted, SPACE, Objective("tasks_per_min"))
    assert "far" in found.why and "workload.name" in found.why
    assert NATIVE.speed(found.config) > NATIVE.speed(SPACE.default())
    assert stored(store, KEY, SPACE, Objective("tasks_per_min")) == []
    assert stored(store, near(model={"name": "other"}), SPACE, Objective("tasks_per_min")) == []


def test_a_stored_winner_is_cut_to_what_this_space_offers() -> None:
    config = fitted(SPACE, {"graphs": "compiled", "threads": 64, "no_such_knob": 1})
    assert config == SPACE.complete({"graphs": "compiled"})


def test_presets_are_valid_once_each_and_not_the_default() -> None:
    found = presets(WHOLE, starts(WHOLE))
    assert len(found) == len({c.config.key for c in found}) >= 2
    assert all(not WHOLE.broken(c.config) and c.config != WHOLE.default() for c in found)
    assert presets(SPACE.limit({k.name: (k.default,) for k in SPACE.free()}, "one"), starts(SPACE)) == []


def test_candidates_of_one_load_stand_together() -> None:
    order: Sequence[Mapping[str, Any]] = (
        {"bits_experts": 8}, {"bits_experts": 4}, {"bits_experts": 8, "graphs": "compiled"}, {"graphs": "compiled"},
    )  # fmt: skip
    found = by_load(SPACE, [Candidate(SPACE.complete(values), "x") for values in order])
    keys = [tuple(SPACE.restart_part(c.config, "reload").items()) for c in found]
    assert len(list(itertools.groupby(keys))) == len(set(keys)) == 3
    assert [c.config["bits_experts"] for c in found] == [8, 8, 4, 16]
