"""The fake engine: the contract, its known optimum, and that each scripted fault shows as what it is."""

from __future__ import annotations

import numpy as np
import pytest
from contracts.runtime import PROMPT, RuntimeContract, collect, run

from autotune.bench import Bench
from autotune.outcome import EngineError, Status
from autotune.quality import Gate, Quality, kl_divergence
from autotune.runtimes.base import Generation
from autotune.runtimes.fake import FACTS, KINDS, NATIVE, FakeRuntime, Fault, Landscape
from autotune.workload import load_workload
from search_spaces import load

SPACE = load("native").narrow({**FACTS, "longest": 1000})
SOURCE = [(i * i * 31 + i * 7) % 251 for i in range(5000)]


class TestFakeRuntime(RuntimeContract):
    @pytest.fixture
    def runtime(self):
        return FakeRuntime(faults=[Fault("oom", lambda config: config["kv_tokens"] == 16384)])

    @pytest.fixture
    def config(self):
        return SPACE.default()

    @pytest.fixture
    def bad_config(self):
        return SPACE.complete({"kv_tokens": 16384})


class NoCache:
    """A quality cache that forgets."""

    def get(self, key):
        return None

    def put(self, key, kind, facts, blob):
        pass


def bench(runtime, tmp_path, quality=False):
    heldout = [SOURCE[i : i + 129] for i in range(0, 1290, 129)]
    found = Bench(runtime, SPACE, load_workload("task"), SOURCE, tmp_path, deadline=30.0)
    if not quality:
        return found
    judge = Quality(SPACE, heldout, NoCache(), {}, lambda config: found.score(config, heldout))
    return Bench(runtime, SPACE, found.workload, SOURCE, tmp_path, judge, Gate(), 30.0)


def test_speed_follows_the_landscape(tmp_path):
    measured = bench(FakeRuntime(), tmp_path)
    slow = measured.measure(SPACE.default(), 1)
    fast = measured.measure(SPACE.complete({"graphs": "compiled"}), 1)
    assert slow.status is fast.status is Status.OK
    assert fast.metrics["tasks_per_min"] / slow.metrics["tasks_per_min"] == pytest.approx(1.3, rel=1e-6)


def test_noise_is_seeded_and_differs_from_launch_to_launch(tmp_path):
    def three(seed):
        measured = bench(FakeRuntime(noise=0.05, seed=seed), tmp_path)
        return [measured.measure(SPACE.default(), 1).metrics["output_tok_s"] for _ in range(3)]

    assert three(1) == three(1)
    assert three(1) != three(2)
    assert len(set(three(1))) == 3


def test_the_optimum_is_the_fastest_that_keeps_the_quality():
    best = NATIVE.optimum(SPACE, max_kl=0.0099)
    assert (best["bits_experts"], best["bits_attention"], best["attention"]) == (4, 8, "sparse")
    assert NATIVE.speed(NATIVE.optimum(SPACE)) > NATIVE.speed(best)
    assert all(NATIVE.speed(c) <= NATIVE.speed(best) or NATIVE.divergence(c) > 0.0099 for c in SPACE.neighbours(best))
    with pytest.raises(ValueError, match="no configuration"):
        NATIVE.optimum(SPACE, max_kl=-1.0)


@pytest.mark.parametrize("divergence", [0.0, 1e-4, 0.01, 0.5, 8.0])
def test_scores_have_exactly_the_kl_and_perplexity_asked_for(divergence, tmp_path):
    runtime = FakeRuntime(Landscape({}, {"graphs": {"compiled": divergence}}))
    scores = []
    for graphs in ("eager", "compiled"):
        with runtime.launch(SPACE.complete({"graphs": graphs}), tmp_path / "x.log") as endpoint:
            scores += endpoint.score([SOURCE[:65]], 1024)
    assert kl_divergence(scores[0], scores[1]).mean() == pytest.approx(divergence, rel=1e-3, abs=1e-6)
    assert (scores[0].logprobs - scores[1].logprobs).mean() == pytest.approx(divergence, rel=1e-3, abs=1e-6)


ENDINGS = {
    "crash": Status.CRASH, "oom": Status.OOM, "unsupported": Status.UNSUPPORTED, "timeout": Status.TIMEOUT,
    "busy": Status.BUSY, "hang": Status.TIMEOUT, "not_applied": Status.NOT_APPLIED, "garbage": Status.QUALITY,
    "nan": Status.QUALITY, "errors": Status.FAILED_REQUESTS, "empty": Status.FAILED_REQUESTS,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_each_fault_ends_a_trial_as_what_it_is(kind, tmp_path):
    bad = SPACE.complete({"max_seqs": 4})
    fault = Fault(kind, lambda config: config == bad, share=0.5)
    measured = bench(FakeRuntime(faults=[fault]), tmp_path, quality=True)
    outcome = measured.measure(bad, 1)
    assert outcome.status is ENDINGS[kind], outcome.reason
    assert outcome.reason
    assert measured.measure(SPACE.default(), 1).status is Status.OK
    assert measured.runtime.running == 0


def test_a_crash_while_measuring_ends_the_run_with_the_log(tmp_path):
    outcome = bench(FakeRuntime(faults=[Fault("crash", phase="measure")]), tmp_path).measure(SPACE.default(), 1)
    assert outcome.status is Status.CRASH
    assert "end of its log" in outcome.reason


def test_a_failed_request_is_no_failed_engine(tmp_path):
    runtime = FakeRuntime(faults=[Fault("errors", share=0.0)])
    with runtime.launch(SPACE.default(), tmp_path / "x.log") as endpoint:
        assert run(endpoint, collect(endpoint, Generation(PROMPT, 2)))
    assert (len(runtime.launched), runtime.requests) == (1, 1)


def test_reset_with_running_requests_is_an_error(tmp_path):
    with FakeRuntime().launch(SPACE.default(), tmp_path / "x.log") as endpoint:

        async def midway():
            stream = endpoint.stream(Generation(PROMPT, 4))
            await anext(stream)
            with pytest.raises(EngineError, match="1 requests"):
                endpoint.reset()
            await stream.aclose()
            endpoint.reset()

        run(endpoint, midway())


def test_sampling_depends_on_the_seed_only_above_temperature_zero(tmp_path):
    with FakeRuntime().launch(SPACE.default(), tmp_path / "x.log") as endpoint:

        def answer(temperature, seed):
            generation = Generation(PROMPT, 8, temperature=temperature, seed=seed)
            return [c.tokens for c in run(endpoint, collect(endpoint, generation))]

        assert answer(0.0, 1) == answer(0.0, 2)
        assert answer(1.0, 1) != answer(1.0, 2)
        assert answer(1.0, 1) == answer(1.0, 1)


def test_bad_scripts_are_refused():
    with pytest.raises(ValueError, match="fault kind 'explode'"):
        Fault("explode")
    with pytest.raises(ValueError, match="even"):
        FakeRuntime(vocab=7)
    assert np.isfinite(NATIVE.speed(SPACE.default()))
