"""Metrics from timelines: the formulas, what counts as failed, and that no impossible figure comes out."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.metrics import FASTEST, METRICS, Timeline, derive, meets, percentile

SECONDS = st.floats(0, 1e4, allow_nan=False)


def timeline(sent=0.0, times=(1.0, 1.5, 2.5), **changes):
    parts = {"conversation": 0, "turn": 0, "prompt_tokens": 10, "output_tokens": len(times)}
    return Timeline(**{**parts, "sent": sent, "token_times": tuple(times), **changes})


@st.composite
def timelines(draw):
    made = []
    for number in range(draw(st.integers(0, 6))):
        sent = draw(SECONDS)
        gaps = draw(st.lists(st.floats(1e-4, 10), max_size=5))
        times = tuple(np.cumsum([sent, *gaps])[1:].tolist())
        error = draw(st.sampled_from(["", "", "", "HTTP 500"]))
        made.append(timeline(sent, times, conversation=number % 3, turn=number // 3, error=error))
    return made


def test_one_request_by_hand():
    found = derive([timeline(sent=0.5)], 2.5, cpu_seconds=0.25)
    expected = {
        "requests": 1, "failed_fraction": 0, "ttft_mean": 0.5, "ttft_p99": 0.5, "itl_mean": 0.75, "itl_p50": 0.75,
        "itl_p90": 0.95, "tpot_mean": 0.75, "e2e_p50": 2.0, "task_mean": 2.0, "tasks_per_min": 24.0, "requests_s": 0.4,
        "output_tok_s": 1.2, "total_tok_s": 5.2, "wall_s": 2.5, "client_cpu_fraction": 0.1,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert "goodput_req_s" not in found and "peak_bytes" not in found


def test_a_task_lasts_from_its_first_request_to_its_last_token():
    turns = [timeline(0.0, (1.0,), turn=0), timeline(4.0, (6.0,), turn=1), timeline(1.0, (2.0,), conversation=1)]
    found = derive(turns, 6.0)
    assert (found["task_mean"], found["task_p50"], found["tasks_per_min"]) == (3.5, 3.5, 20.0)


def test_a_task_with_a_failed_turn_is_no_finished_task():
    found = derive([timeline(turn=0), timeline(3.0, (), turn=1, error="HTTP 500")], 4.0)
    assert "tasks_per_min" not in found and "task_mean" not in found
    assert found["failed_fraction"] == 0.5


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (timeline(times=()), "without a token"),
        (timeline(error="HTTP 500"), "HTTP 500"),
        (timeline(sent=1.5), "before"),
        (timeline(times=(1.0, 3.0, 2.0)), "before"),
        (timeline(output_tokens=7), "7 output tokens but 3"),
        (timeline(times=(1.0, math.nan)), "finite"),
        (timeline(times=(math.inf,)), "finite"),
        (timeline(times=(1e-9,) * 50), "faster than any engine"),
    ],
)
def test_an_impossible_request_is_failed_and_never_a_number(bad, why):
    assert why in bad.fault
    found = derive([bad], 5.0)
    assert found == {"requests": 1.0, "failed_fraction": 1.0, "wall_s": 5.0}
    good = timeline(conversation=1)
    mixed, alone = derive([good, bad], 5.0), derive([good], 5.0)
    assert {k: v for k, v in mixed.items() if k.startswith(("ttft", "itl", "e2e", "output"))} == {
        k: v for k, v in alone.items() if k.startswith(("ttft", "itl", "e2e", "output"))
    }


@pytest.mark.parametrize("wall", [0.0, -1.0, math.nan, math.inf, 1e-9])
def test_an_impossible_length_of_run_gives_no_rates(wall):
    assert not {"output_tok_s", "requests_s", "tasks_per_min", "goodput_req_s", "wall_s"} & set(
        derive([timeline()], wall, 1.0, {"ttft": 9.0}) if wall != 1e-9 else derive([timeline()], wall)
    )


def test_tokens_of_one_step_share_their_time():
    found = derive([timeline(0.0, (1.0, 1.0, 1.0, 2.0))], 2.0)
    assert found["itl_p50"] == 0.0
    assert found["tpot_mean"] == pytest.approx(1 / 3)


def test_goodput_counts_what_kept_every_limit():
    slow = timeline(0.0, (5.0, 5.1), conversation=1)
    failed = timeline(0.0, (), conversation=2)
    found = derive([timeline(), slow, failed], 10.0, slo={"ttft": 2.0, "tpot": 1.0})
    assert found["goodput_req_s"] == pytest.approx(0.1)
    assert found["slo_fraction"] == pytest.approx(1 / 3)
    assert derive([slow], 10.0, slo={"ttft": 2.0})["goodput_req_s"] == 0.0
    assert not meets(timeline(), {"itl": 0.9}) and meets(timeline(), {"itl": 1.0})
    assert not meets(timeline(), {"e2e": 2.4})
    assert meets(timeline(times=(1.0,)), {"tpot": 1e-6, "itl": 1e-6})


def test_the_engines_own_counts():
    counters = {"cpu_seconds": 3.0, "peak_bytes": 5, "weight_bytes": 2, "cache_bytes": 1, "preemptions": 0,
                "prefix_hits": 30, "prefix_queries": 120}  # fmt: skip
    found = derive([], 1.0, counters=counters)
    assert found["prefix_hit_rate"] == 0.25
    assert (found["engine_cpu_s"], found["peak_bytes"], found["preemptions"]) == (3.0, 5.0, 0.0)
    assert "prefix_hit_rate" not in derive([], 1.0, counters={"prefix_hits": 0, "prefix_queries": 0})
    assert "peak_bytes" not in derive([], 1.0, counters={"peak_bytes": math.nan})


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.floats(0, 100))
def test_percentile_agrees_with_numpy(values, q):
    assert percentile(values, q) == pytest.approx(np.percentile(values, q), rel=1e-9, abs=1e-6)


@pytest.mark.parametrize(("values", "q"), [([], 50), ([1.0], -1), ([1.0], 101), ([1.0], math.nan)])
def test_percentile_refuses_what_has_no_answer(values, q):
    with pytest.raises(ValueError, match="percentile"):
        percentile(values, q)


@given(timelines(), st.floats(0.01, 1e5), st.floats(0, 10))
def test_every_figure_is_declared_finite_and_not_negative(found, wall, cpu):
    metrics = derive(found, wall, cpu, {"ttft": 1.0, "e2e": 5.0}, {"cpu_seconds": 1.0})
    assert set(metrics) <= set(METRICS)
    assert all(math.isfinite(v) and v >= 0 for v in metrics.values())
    assert all(metrics.get(name, 0) <= FASTEST for name in ("output_tok_s",))
    for family in ("ttft", "itl", "tpot", "e2e"):
        if f"{family}_p50" in metrics:
            assert metrics[f"{family}_p50"] <= metrics[f"{family}_p90"] <= metrics[f"{family}_p99"]
    if found:
        assert metrics["failed_fraction"] == pytest.approx(sum(bool(t.fault) for t in found) / len(found))
        assert metrics["slo_fraction"] <= 1 - metrics["failed_fraction"] + 1e-12


@given(timelines(), st.floats(1, 100), st.floats(0.1, 10))
def test_times_scale_and_rates_scale_inversely(found, wall, factor):
    def slower(t):
        return timeline(
            t.sent * factor,
            [x * factor for x in t.token_times],
            conversation=t.conversation,
            turn=t.turn,
            error=t.error,
        )

    before, after = derive(found, wall), derive([slower(t) for t in found], wall * factor)
    assert set(before) == set(after)
    for name in before:
        scale = {"s": factor, "1/s": 1 / factor, "tok/s": 1 / factor, "1/min": 1 / factor}.get(METRICS[name].unit, 1)
        assert after[name] == pytest.approx(before[name] * scale, rel=1e-6, abs=1e-7)


def test_each_metric_is_declared_once_with_a_direction_and_a_sentence():
    for name, metric in METRICS.items():
        assert metric.name == name
        assert metric.better in ("lower", "higher", "")
        assert metric.sentence.endswith(".") and format(1.0, metric.format)
