"""A whole search of a server as a user runs it, beside other people's servers: all of them live on, nothing is left."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from contracts import fake_vllm
from safetensors.numpy import save_file

from autotune.runtimes.server import ready
from tuning_db import open_store

ENGINE = shlex.join([sys.executable, "-S", fake_vllm.__file__])
WORKLOAD = """
name = "few"
sentence = "A few short questions, for tests."
kind = "chat"
conversations = 8
concurrency = 8
prompt = [16, 24]
output = [5, 5]
warmup = 1
"""
PLAN = """
engine = "vllm"
quality_tokens = 64
finalists = 1
blocks = 2
[knobs]
max_num_seqs = [128, 1]
dtype = ["bfloat16", "float32"]
kv_cache_dtype = "auto"
block_size = 128
enforce_eager = false
prefix_caching = true
kv_cache_mib = 256
max_num_batched_tokens = 2048
chunked_prefill = true
"""
DECOY = """
import time
from pathlib import Path
time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint as far as anybody here reads it, a workload and a plan."""
    model = tmp_path / "model"
    model.mkdir()
    sizes = {"num_hidden_layers": 2, "vocab_size": fake_vllm.VOCABULARY, "hidden_size": 8}
    (model / "config.json").write_text(json.dumps({"model_type": "glm4", **sizes}))
    save_file(
        {"model.embed_tokens.weight": np.zeros((fake_vllm.VOCABULARY, 8), np.float32)}, model / "model.safetensors"
    )
    (tmp_path / "few.toml").write_text(WORKLOAD)
    (tmp_path / "plan.toml").write_text(PLAN)
    (tmp_path / "ledger").mkdir()
    return tmp_path


@pytest.fixture
def decoys(folder: Path) -> Iterator[tuple[int, list[subprocess.Popen[bytes]]]]:
    """A process called "vllm serve" and a server of another model on the port that the plan wants."""
    port = ready.free_port()
    words = [[sys.executable, "-c", DECOY, "vllm", "serve", "their/model"],
             [sys.executable, "-S", fake_vllm.__file__, "serve", "their/model", "--port", str(port)]]  # fmt: skip
    running = [subprocess.Popen(line, cwd=folder) for line in words]
    while ready.served(port) is None:
        time.sleep(0.02)
    yield port, running
    for process in running:
        process.kill()
        process.wait()


def search(folder: Path, environment: dict[str, str], faults: list[dict[str, object]], *words: str) -> list[str]:
    """The command's exit code, then what it wrote; a shell in the same process group runs it and must live on."""
    line = shlex.join([sys.executable, "-m", "autotune", "search", "--plan", "plan.toml", "--model", "model",
                       "--workload", "few.toml", "--engine-command", ENGINE, "--db", "t.db", *words])  # fmt: skip
    done = subprocess.run(
        ["sh", "-c", f"{line}; echo $?"], cwd=folder, capture_output=True, text=True, timeout=300, check=False,
        env={**environment, "FAKE_FAULTS": json.dumps(faults), "FAKE_LEDGER": str(folder / "ledger")},
    )  # fmt: skip
    return [done.stdout.splitlines()[-1], done.stdout + done.stderr]


def left(marker: str) -> list[str]:
    """Command lines of living processes that serve this test's model."""
    found = []
    for process in psutil.process_iter():
        try:
            text = shlex.join(process.cmdline())
        except psutil.Error:
            continue
        if marker in text and process.pid != os.getpid():
            found.append(text)
    return found


def test_a_search_beside_decoys_succeeds_and_leaves_them_alone(folder: Path, environment, decoys) -> None:
    port, others = decoys
    code, text = search(folder, {**environment, "AUTOTUNE_PORT": str(port)}, [{"do": "fork"}], "--budget", "4")
    assert code == "0", text
    assert "verdict: " in text and "Traceback" not in text
    with open_store(folder / "t.db", readonly=True) as store:
        trials = store.trials()
    assert {t.status for t in trials} <= {"ok", "pruned"} and len(trials) == 9
    for trial in trials:
        assert dict(trial.config).items() <= dict(trial.effective).items()
    assert [other.poll() for other in others] == [None, None]
    assert ready.served(port) == ["their/model"]
    assert left(str(folder / "model")) == []
    assert fake_vllm.held(folder / "ledger") == 0


def test_what_the_engine_refuses_is_learned_once(folder: Path, environment) -> None:
    """As GLM-5.3-Flash on compute capability 8.x: one trial is spent, then all with the refused value is left out."""
    text = "ValueError: No valid attention backend found for cuda with AttentionSelectorConfig(dtype=float32)"
    refused = {"do": "exit", "text": text, "when": {"dtype": "float32", "enforce-eager": "False"}}
    code, said = search(folder, environment, [refused], "--budget", "4")
    assert code == "0" and "the whole space is measured after 3 trials" in said, said
    with open_store(folder / "t.db", readonly=True) as store:
        refusals = [t for t in store.trials() if t.status == "unsupported"]
    assert len(refusals) == 1 and refusals[0].provenance["failure"] == "unsupported"
    assert "No valid attention backend found" in refusals[0].reason and refusals[0].config["dtype"] == "float32"
