"""The native engine as a runtime: the contract, and what happens when its process fails or its tuner dies."""

from __future__ import annotations

import pytest
from contracts.runtime import RuntimeContract

from autotune.outcome import EngineError, Status
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

    def test_a_text_too_long_to_score_is_refused_and_the_engine_lives(self, runtime: NativeRuntime, tmp_path) -> None:
        with runtime.launch(SPACE.complete({"kv_tokens": 1024}), tmp_path / "log") as endpoint:
            with pytest.raises(EngineError, match="2 to 1024 tokens") as caught:
                endpoint.score([[65] * 1500], 5)
            assert caught.value.status is Status.UNSUPPORTED
            assert len(endpoint.score([[65, 66, 67]], 5)[0].logprobs) == 2
