"""A server as a `Runtime`: the contract that every engine keeps."""

from __future__ import annotations

import pytest
from contracts.runtime import RuntimeContract

from autotune.runtimes.server.runtime import ServerRuntime
from search_spaces import Config, load


class TestServer(RuntimeContract):
    @pytest.fixture
    def runtime(self, serve) -> ServerRuntime:
        text = "ValueError: Sparse Attention is not supported on CPU."
        return serve({"do": "exit", "text": text, "when": {"dtype": "float32"}})

    @pytest.fixture
    def config(self) -> Config:
        return load("vllm", "cpu").default()

    @pytest.fixture
    def bad_config(self) -> Config:
        return load("vllm", "cpu").complete({"dtype": "float32"})
