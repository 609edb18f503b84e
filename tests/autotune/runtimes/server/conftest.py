"""vLLM's runtime on the fake server: how to launch one, with which faults, on which memory."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from contracts import fake_vllm

from autotune.runtimes.server.discover import Build
from autotune.runtimes.server.memory import Baseline
from autotune.runtimes.server.runtime import Limits, ServerRuntime
from autotune.runtimes.server.vllm import VLLM

FAKE = (sys.executable, "-S", fake_vllm.__file__)
Serve = Callable[..., ServerRuntime]


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which whoever holds device memory is listed."""
    folder = tmp_path / "ledger"
    folder.mkdir()
    monkeypatch.setenv("FAKE_LEDGER", str(folder))
    return folder


@pytest.fixture(scope="session")
def build() -> Build:
    """What the fake says of itself; asked once, which is what takes longest."""
    return VLLM(FAKE, Path("model"), 512).build


@pytest.fixture
def serve(ledger: Path, build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Serve:
    """A runtime whose server has ``faults``; ``limits`` are short."""

    def make(*faults: dict[str, Any], port: int = 0, patience: float = 3.0, **limits: float) -> ServerRuntime:
        monkeypatch.setenv("FAKE_FAULTS", json.dumps(faults))
        short = Limits(**{"launch": 10.0, "grace": 0.5, "stall": 2.0, **limits})
        baseline = Baseline(lambda: fake_vllm.held(ledger), 0, patience)
        engine = VLLM(FAKE, tmp_path / "model", 512)
        engine.__dict__["build"] = build
        return ServerRuntime(engine, FAKE, short, port, baseline)

    return make
