"""The native engine as a runtime: the contract, and what happens when its process fails or its tuner dies."""

from __future__ import annotations

import pytest
from contracts.runtime import RuntimeContract

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
