"""What a server does while it is measured: every way of failing is an outcome with its class, never a number."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from contracts.fake_vllm import VOCABULARY

from autotune.bench import Bench
from autotune.outcome import Outcome, Status
from autotune.quality import Gate, Quality
from autotune.workload import load_workload
from search_spaces import load

SPACE = load("vllm", "cpu").narrow({"longest": 512, "max_model_len": 512, "cpu_flags": ()})
SOURCE = [(i * i * 31 + i * 7) % VOCABULARY for i in range(5000)]
LOAD = replace(
    load_workload("chat"), conversations=20, concurrency=10, prompt=(20, 40), output=(6, 6), warmup=1, slo={}
)


def measure(runtime, logs: Path, seed: int = 0, deadline: float = 20.0, load=LOAD, **knobs) -> Outcome:
    bench = Bench(runtime, SPACE, load, SOURCE, logs, deadline=deadline)
    return bench.measure(SPACE.complete(knobs), seed)


def test_a_healthy_run_has_counts_that_agree(serve, tmp_path: Path) -> None:
    outcome = measure(serve(), tmp_path)
    assert outcome.status is Status.OK and outcome.metrics["failed_fraction"] == 0
    assert outcome.counters["generated"] == 120 == sum(t.output_tokens for t in outcome.timelines)
    assert outcome.effective["kv_tokens"] == 8192 and outcome.effective["block_size"] == 128
    assert set(SPACE.default()) <= set(outcome.effective)
    assert outcome.metrics["client_cpu_fraction"] > 0 and outcome.metrics["engine_cpu_s"] >= 0


def test_more_sequences_at_once_are_faster(serve, tmp_path: Path) -> None:
    slow, fast = (measure(serve(), tmp_path, max_num_seqs=n).metrics["output_tok_s"] for n in (1, 16))
    assert fast > 2 * slow


def test_a_cache_that_outlived_a_run_helps_nobody(serve, tmp_path: Path) -> None:
    """Same prompts again on another launch, and on the same one after a reset: no hit in either."""
    shared = replace(LOAD, prefix=0, prompt=(256, 256))
    rates = []
    for _ in range(2):
        outcome = measure(serve(), tmp_path, load=shared, block_size=64)
        rates.append(outcome.metrics["prefix_hit_rate"])
    prefixed = measure(serve(), tmp_path, load=replace(shared, prefix=192), block_size=64)
    assert rates == [0, 0] and prefixed.metrics["prefix_hit_rate"] > 0.3


def test_an_out_of_memory_under_load_is_no_success(serve, tmp_path: Path) -> None:
    text = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    outcome = measure(serve({"do": "die", "at": 15, "text": text}), tmp_path)
    assert outcome.status is Status.OOM and outcome.failure == "oom_request"
    assert "CUDA out of memory" in outcome.reason and "gmu" in outcome.reason and not outcome.metrics


@pytest.mark.parametrize("code", [0, 1, -11])
def test_an_engine_that_dies_is_a_crash_whatever_its_exit_code(serve, tmp_path: Path, code: int) -> None:
    outcome = measure(serve({"do": "die", "at": 9, "text": "", "code": code % 256}), tmp_path)
    assert outcome.status is Status.CRASH and outcome.reason.startswith("measure: crash: the engine ended with code")


def test_a_dead_core_behind_a_living_server_is_a_crash(serve, tmp_path: Path) -> None:
    outcome = measure(serve({"do": "core", "at": 12}), tmp_path)
    assert outcome.status is Status.CRASH and outcome.failure == "crash"


def test_a_hang_ends_with_its_class_and_the_server_stopped(serve, tmp_path: Path) -> None:
    outcome = measure(serve({"do": "hang", "at": 8}, stall=1.0), tmp_path)
    assert outcome.status is Status.TIMEOUT and outcome.failure == "hang"
    assert "no request heard anything for 1 s" in outcome.reason


def test_slow_requests_cut_off_by_the_time_limit_count(serve, tmp_path: Path) -> None:
    outcome = measure(serve({"do": "late", "share": 0.2, "seconds": 30}, stall=60.0), tmp_path, deadline=2.5)
    assert outcome.status is Status.TIMEOUT and "requests unfinished" in outcome.reason
    cut = [t for t in outcome.timelines if "cut off" in t.error]
    assert cut and len(outcome.timelines) == LOAD.conversations


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("http500", "HTTP 500: EngineCore encountered an issue"),
        ("empty", "the server sent no token"),
        ("miscount", "7 output tokens, but"),
        ("cut", "the stream broke off"),
    ],
)
def test_failed_requests_are_counted_and_limited(serve, tmp_path: Path, fault: str, said: str) -> None:
    outcome = measure(serve({"do": fault, "share": 0.3}), tmp_path)
    failed = [t for t in outcome.timelines if t.fault]
    assert outcome.status is Status.FAILED_REQUESTS and said in outcome.reason
    assert 0.05 < outcome.metrics["failed_fraction"] == pytest.approx(len(failed) / 20)
    assert outcome.metrics["requests"] == 20 and all(value >= 0 for value in outcome.metrics.values())


def test_a_server_that_grows_slower_shows(serve, tmp_path: Path) -> None:
    outcome = measure(serve({"do": "decay", "share": 0.2}), tmp_path, load=replace(LOAD, concurrency=2))
    spans = [t.e2e or 0.0 for t in sorted(outcome.timelines, key=lambda t: t.sent)]
    assert sum(spans[-5:]) > 1.5 * sum(spans[:5])


def test_a_fast_engine_with_another_models_answers_loses(serve, tmp_path: Path) -> None:
    class Kept(dict):
        def put(self, key, kind, facts, blob) -> None:
            self[key] = (facts, blob)

    texts = (tuple(SOURCE[:40]), tuple(SOURCE[90:120]))
    runtime = serve({"do": "garbage", "when": {"dtype": "bfloat16"}})
    bench = Bench(runtime, SPACE, LOAD, SOURCE, tmp_path, gate=Gate(0.02, 1.01))
    quality = Quality(SPACE, texts, Kept(), {}, lambda config: bench.score(config, texts))
    bench = replace(bench, quality=quality)
    quality.reference()  # as a study does: no two launches hold the device at once
    outcome = bench.measure(SPACE.default(), 0)
    assert outcome.status is Status.QUALITY and outcome.metrics["kl_mean"] > 0.5
    assert bench.measure(SPACE.complete({"dtype": "float32"}), 0).status is Status.OK
    assert json.dumps(dict(outcome.metrics))
