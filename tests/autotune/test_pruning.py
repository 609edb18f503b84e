"""Giving a run up part-way: never one that could have won, by replay of whole runs of the fake engine and of chance."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.bench import Bench
from autotune.metrics import Timeline, derive
from autotune.outcome import Status
from autotune.pruning import MARGIN, OPTIMISM, RATES, Hopeless
from autotune.runtimes.fake import FACTS, FakeRuntime
from autotune.workload import load_workload
from search_spaces import load

SOURCE = [(i * i * 31 + i * 7) % 251 for i in range(5000)]
SPACE = load("native").narrow({**FACTS, "longest": 1000})


def run(durations: list[float], tokens: int = 3) -> list[Timeline]:
    """Requests one after another, each of so many seconds."""
    found, now = [], 0.0
    for index, seconds in enumerate(durations):
        times = tuple(now + seconds * (i + 1) / tokens for i in range(tokens))
        found.append(Timeline(index, 0, 8, tokens, now, times))
        now += seconds
    return found


def value(metric: str, timelines: list[Timeline]) -> float:
    return derive(timelines, max(t.token_times[-1] for t in timelines))[metric]


def replay(metric: str, mine: list[Timeline], theirs: list[Timeline]) -> Hopeless | None:
    """The watch that gave ``mine`` up, or None when it ran to its end."""
    watch = Hopeless(metric, value(metric, theirs), theirs)
    for timeline in mine:
        watch.add(timeline)
        if watch.done():
            return watch
    return None


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.floats(0.2, 3.0), min_size=12, max_size=30),
    st.sampled_from([*RATES, "e2e_p50", "e2e_p99", "ttft_mean", "itl_p90", "tpot_p90"]),
    st.integers(0, 10**6),
)
def test_nothing_is_given_up_that_could_still_have_won(ratios: list[float], metric: str, seed: int) -> None:
    """However the rest goes, short of twice the incumbent's speed, a run given up loses, within its bound."""
    source = random.Random(seed)
    base = [source.uniform(0.5, 2.0) for _ in ratios]
    ratios = [max(r, OPTIMISM) for r in ratios]
    mine, theirs = run([b * r for b, r in zip(base, ratios, strict=True)]), run(base)
    watch = replay(metric, mine, theirs)
    if watch is None:
        return
    ours, best = value(metric, mine), value(metric, theirs)
    if metric in RATES:
        assert ours <= best / MARGIN * (1 + 1e-9) and ours <= watch.bound() * (1 + 1e-9)
    else:
        assert ours >= best * MARGIN * (1 - 1e-9) and ours >= watch.bound() * (1 - 1e-9)


@pytest.mark.parametrize("metric", ["tasks_per_min", "output_tok_s", "e2e_p50", "ttft_p90", "tpot_mean"])
def test_a_hopeless_run_ends_well_before_its_end(metric: str) -> None:
    theirs = run([1.0] * 24)
    watch = replay(metric, run([4.0] * 24), theirs)
    assert watch is not None and "hopeless after" in watch.reason()
    seen = int(watch.reason().split()[2])
    assert seen <= (22 if "p90" in metric else 13)
    assert replay(metric, run([1.03] * 24), theirs) is None


def test_a_slow_start_that_makes_up_for_it_is_not_given_up() -> None:
    """Twice as slow for a third of the work, then 1.9 times as fast: such is a cache that has to warm."""
    assert replay("output_tok_s", run([2.0] * 8 + [0.52] * 16), run([1.0] * 24)) is None


def test_the_bench_stops_the_engine_and_keeps_the_partial_requests(tmp_path: Path) -> None:
    runtime = FakeRuntime()
    bench = Bench(runtime, SPACE, load_workload("task"), SOURCE, tmp_path)
    slow = SPACE.complete({"max_seqs": 1, "attention": "expanded"})
    fast = bench.measure(SPACE.complete({"graphs": "compiled", "bits_experts": 4}), 0)
    full = bench.measure(slow, 0)
    asked = runtime.requests
    metric = "tasks_per_min"
    outcome = bench.measure(slow, 0, watch=Hopeless(metric, fast.metrics[metric], fast.timelines))
    assert outcome.status is Status.PRUNED and outcome.counted and outcome.metrics == {}
    assert outcome.bound is not None and full.metrics[metric] <= outcome.bound < fast.metrics[metric]
    assert 0 < sum(not t.error for t in outcome.timelines) < len(full.timelines)
    assert runtime.running == 0 and runtime.requests - asked < len(full.timelines) + 3
