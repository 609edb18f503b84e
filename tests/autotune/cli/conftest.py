"""The command as a user has it: a process of its own, with its own data folders."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
WORKLOAD = """
name = "tiny"
sentence = "Two short tasks, for tests."
kind = "task"
conversations = 2
concurrency = 2
turns = [2, 2]
prompt = [12, 20]
output = [3, 4]
prefix = 0
seed = 0
warmup = 1
"""
PLAN = """
quality_tokens = 128
finalists = 1
blocks = 2
[knobs]
graphs = "eager"
"""

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's home: database, logs and caches go below it."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "tiny.toml").write_text(WORKLOAD)
    (folder / "plan.toml").write_text(PLAN)
    return folder


@pytest.fixture(scope="session")
def environment(home: Path) -> dict[str, str]:
    folders = {f"XDG_{name}_HOME": str(home / name.lower()) for name in ("DATA", "STATE", "CACHE", "CONFIG")}
    ours = {"AUTOTUNE_WORKLOAD": str(home / "tiny.toml"), "AUTOTUNE_BITS": "groups"}  # a ladder takes half a minute
    return {**os.environ, **folders, **ours, "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="session")
def autotune(environment: dict[str, str], home: Path) -> Command:
    def run(*words: str, **extra: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "autotune", *words],
            capture_output=True,
            text=True,
            env={**environment, **extra},
            cwd=home,
            timeout=300,
        )

    return run


@pytest.fixture(scope="session")
def searched(autotune: Command) -> subprocess.CompletedProcess[str]:
    """One real search of four trials on the reference model; the database then holds it."""
    return autotune("search", "--budget", "4", "--plan", "plan.toml", "--format", "json")
