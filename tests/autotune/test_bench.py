"""Repeating a measurement until it is precise, and noticing that the client was the limit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autotune.bench import CLIENT_LIMIT, Bench, _client_bound
from autotune.outcome import Status
from autotune.runtimes.fake import FACTS, FakeEndpoint, FakeRuntime
from autotune.telemetry import Watch
from autotune.workload import load_workload
from search_spaces import load

SOURCE = [(i * i * 31 + i * 7) % 251 for i in range(5000)]
SPACE = load("native").narrow({**FACTS, "longest": 1000})
WORKLOAD = replace(load_workload("task"), output=(4, 5))


def bench(logs: Path, **more) -> Bench:
    return Bench(FakeRuntime(), SPACE, WORKLOAD, SOURCE, logs, **more)


def test_precision_repeats_the_workload_on_other_prompts_and_joins_the_runs(tmp_path: Path) -> None:
    once = bench(tmp_path).measure(SPACE.default(), 0)
    often = bench(tmp_path, precision=0.05).measure(SPACE.default(), 0)
    assert often.metrics["requests"] == 3 * once.metrics["requests"] and often.notes == ()
    assert often.metrics["tasks_per_min"] == pytest.approx(once.metrics["tasks_per_min"], rel=0.05)
    assert often.metrics["e2e_p50"] == pytest.approx(once.metrics["e2e_p50"], rel=0.1)
    assert len({(t.conversation, t.turn) for t in often.timelines}) == len(often.timelines)
    assert often.timelines[: len(once.timelines)] == once.timelines


def test_a_precision_out_of_reach_ends_at_the_time_limit_and_says_what_was_unmet(tmp_path: Path) -> None:
    outcome = bench(tmp_path, precision=1e-9, deadline=1.5).measure(SPACE.default(), 0)
    assert outcome.status is Status.OK
    assert "the time limit of 1.5 s left unmet" in outcome.notes[0]


def test_a_throttled_run_is_marked(tmp_path: Path) -> None:
    slow = bench(tmp_path, telemetry=lambda: Watch(tmp_path / "none", lambda query: "1, 1410, Active\n"))
    assert "hardware slow-down" in slow.measure(SPACE.default(), 0).disturbed
    assert bench(tmp_path).measure(SPACE.default(), 0).disturbed == ""


def test_a_client_that_took_a_core_is_the_limit() -> None:
    assert "client-bound" in _client_bound({"client_cpu_fraction": CLIENT_LIMIT + 0.1})
    assert _client_bound({"client_cpu_fraction": 0.2}) == _client_bound({}) == ""


def test_cost_counts_the_devices_of_the_layout(tmp_path: Path) -> None:
    space = load("native").narrow({**FACTS, "longest": 1000, "devices": 2})
    made = Bench(FakeRuntime(), space, WORKLOAD, SOURCE, tmp_path)
    one, two = (made.measure(space.complete({"tp": n}), 0).metrics for n in (1, 2))
    assert two["device_s_per_ktok"] == pytest.approx(2 * one["device_s_per_ktok"])
    assert one["device_s_per_ktok"] == pytest.approx(1000 / one["output_tok_s"])


@pytest.mark.parametrize(("accepted", "status"), [(22, Status.QUALITY), (58, Status.OK)])
def test_drafts_that_are_hardly_ever_accepted_are_no_speed(
    accepted: int, status: Status, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = FakeEndpoint.counters
    drafts = {"drafted": 100.0, "accepted": float(accepted)}
    monkeypatch.setattr(FakeEndpoint, "counters", lambda self: {**counted(self), **drafts})
    outcome = bench(tmp_path).measure(SPACE.default(), 0)
    assert outcome.status is status and ("draft layer" in outcome.reason) == (status is Status.QUALITY)
