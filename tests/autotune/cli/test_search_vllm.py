"""A real search of a real vLLM on a GLM-4 checkpoint made here: what ran is what was asked, and knobs matter.

Needs ``TEST_VLLM_COMMAND`` (`scripts/vllm_cpu.sh` makes one); a launch takes half a minute.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from contracts.effects import effect

from autotune.setting import reference_model
from tuning_db import Trial, open_store

COMMAND = os.environ.get("TEST_VLLM_COMMAND", "")
pytestmark = [pytest.mark.vllm, pytest.mark.skipif(not COMMAND, reason="TEST_VLLM_COMMAND names no vLLM")]
WORKLOAD = """
name = "prefixed"
sentence = "Short answers behind a long common prefix, eight at once."
kind = "shared"
conversations = 16
concurrency = 8
prefix = 448
prompt = [8, 16]
output = [8, 8]
warmup = 1
"""
PLAN = """
engine = "vllm"
quality_tokens = 64
finalists = 1
blocks = 2
[knobs]
max_num_seqs = [128, 1]
prefix_caching = [true, false]
block_size = [128, 32]
dtype = "float32"
kv_cache_dtype = "auto"
enforce_eager = true
kv_cache_mib = 256
max_num_batched_tokens = 2048
chunked_prefill = true
"""
NOISE = 1.3
"""The same configuration twice on two busy cores; see the A/A check of any search."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GLM-4 of 18 million random weights, with the reference model's tokenizer."""
    from transformers import Glm4Config, Glm4ForCausalLM

    folder = tmp_path_factory.mktemp("glm4")
    torch.manual_seed(0)
    config = Glm4Config(
        vocab_size=512, hidden_size=512, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=2048, pad_token_id=0, eos_token_id=[0],
    )  # fmt: skip
    network = Glm4ForCausalLM(config)
    with torch.no_grad():
        network.lm_head.weight.mul_(8)  # else every token is as likely as the next
    network.to(torch.bfloat16).save_pretrained(folder)
    shutil.copy(reference_model() / "tokenizer.json", folder)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


@pytest.fixture(scope="module")
def searched(
    model: Path, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, str]]:
    """The database of one search of six trials, and what the command said."""
    folder = tmp_path_factory.mktemp("search")
    (folder / "load.toml").write_text(WORKLOAD)
    (folder / "plan.toml").write_text(PLAN)
    done = subprocess.run(
        [sys.executable, "-m", "autotune", "search", "--plan", "plan.toml", "--budget", "6", "--model", str(model),
         "--workload", "load.toml", "--engine-command", COMMAND, "--db", "t.db", "--format", "json"],
        cwd=folder, capture_output=True, text=True, check=False, timeout=3000,
        env={**environment, "VLLM_CACHE_ROOT": str(folder / "vllm")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["standings"][-1]["verdict"] == "default"
    yield folder / "t.db", done.stderr


def search_trials(database: Path) -> list[Trial]:
    with open_store(database, readonly=True) as store:
        return store.trials(stage="search")


def test_what_ran_is_what_was_asked(searched) -> None:
    trials = search_trials(searched[0])
    assert {trial.status for trial in trials} <= {"ok", "pruned"}
    assert len({trial.config_key for trial in trials}) == 6
    for trial in trials:
        assert dict(trial.config).items() <= dict(trial.effective).items()
        assert trial.effective["kv_tokens"] > 0 and trial.effective["max_model_len"] >= 513
        if trial.status == "pruned":
            continue
        assert trial.counters["preemptions"] == 0 and trial.counters["prefix_queries"] > 0
        assert ("prefix_hit_rate" in trial.metrics) and trial.metrics["client_cpu_fraction"] < 0.8
        assert trial.config["prefix_caching"] or trial.counters["prefix_hits"] == 0


def test_two_knobs_change_the_speed_beyond_noise(searched) -> None:
    trials = search_trials(searched[0])
    found = {knob: effect(trials, knob) for knob in ("max_num_seqs", "prefix_caching", "block_size")}
    assert sum(ratio > NOISE for ratio in found.values()) >= 2, found


def test_no_process_is_left(searched, model: Path) -> None:
    words = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert not [line for line in words if str(model) in line]
