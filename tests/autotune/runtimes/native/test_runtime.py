"""The native engine as a runtime: the contract, and what happens when its process fails or its tuner dies."""

from __future__ import annotations

import pytest
from contracts.runtime import RuntimeContract, collect, run, tokens

from autotune.outcome import EngineError, Status
from autotune.runtimes.base import Generation
from autotune.runtimes.native import NativeRuntime
from autotune.setting import reference_model
from search_spaces import Config, load

SPACE = load("native").narrow({"cores": 2, "layers": 4, "experts": 8})


@pytest.fixture(scope="module")
def runtime() -> NativeRuntime:
    return NativeRuntime(reference_model())


class TestNativeRuntime(RuntimeContract):
    @pytest.fixture
    def config(self) -> Config:
        return SPACE.complete({"max_seqs": 2})

    @pytest.fixture
    def bad_config(self) -> Config:
        return Config({**SPACE.default(), "graphs": "cuda"})

    def test_live_knobs_change_without_a_launch(self, runtime: NativeRuntime, tmp_path) -> None:
        base, long = SPACE.complete({"max_seqs": 2}), Generation(tuple(range(32, 132)), 4)
        small = SPACE.complete({"max_seqs": 2, "token_budget": 64, "prefix_reuse": True, "state_cache_mib": 16})
        with runtime.launch(small, tmp_path / "fresh.log") as endpoint:
            wanted, facts = [tokens(run(endpoint, collect(endpoint, long))) for _ in range(2)], endpoint.effective()
            hits = endpoint.counters()["prefix_hits"]
        with runtime.launch(base, tmp_path / "kept.log") as endpoint:
            run(endpoint, collect(endpoint, long))
            assert endpoint.adopt(small) and dict(endpoint.effective()) == dict(facts)
            assert [tokens(run(endpoint, collect(endpoint, long))) for _ in range(2)] == wanted
            counters = endpoint.counters()
            assert counters["prefix_hits"] == hits > 0 and counters["prefill_tokens"] == 200 - hits
            assert endpoint.adopt(base) and endpoint.effective()["prefix_reuse"] is False
            run(endpoint, collect(endpoint, long))
            assert endpoint.counters()["prefix_hits"] == 0 and endpoint.counters()["prefill_tokens"] == 100

    def test_a_text_too_long_to_score_is_refused_and_the_engine_lives(self, runtime: NativeRuntime, tmp_path) -> None:
        with runtime.launch(SPACE.complete({"kv_tokens": 1024}), tmp_path / "log") as endpoint:
            with pytest.raises(EngineError, match="2 to 1024 tokens") as caught:
                endpoint.score([[65] * 1500], 5)
            assert caught.value.status is Status.UNSUPPORTED
            assert len(endpoint.score([[65, 66, 67]], 5)[0].logprobs) == 2
