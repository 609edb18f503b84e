"""A real search of a real llama.cpp on the reference model: what ran is what was asked, and knobs matter."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from contracts.effects import effect

from autotune.runtimes.server import llama_serve
from tuning_db import Trial, open_store

pytest.importorskip("xllamacpp", reason="pip install '.[llamacpp]' brings llama.cpp")
pytest.importorskip("gguf", reason="pip install '.[llamacpp]' brings gguf")
WORKLOAD = """
name = "turns"
sentence = "Tasks of four turns, of which each repeats all before it; four at once."
kind = "task"
conversations = 4
concurrency = 4
turns = [5, 5]
prompt = [200, 200]
output = [12, 12]
prefix = 0
warmup = 1
"""
PLAN = """
engine = "llamacpp"
quality_tokens = 64
finalists = 1
blocks = 2
workload = "load.toml"
[knobs]
parallel = [4, 1]
cache_prompt = [true, false]
type_experts = "f16"
cache_ram = 0
threads = 1
flash_attn = "on"
type_attention = "f16"
type_dense = "f16"
type_shared = "f16"
type_embedding = "f16"
type_lm_head = "f16"
wide_first = 0
wide_last = 0
cache_type = "f16"
repack = true
mmap = true
batch_size = 2048
ubatch_size = [512, 32]
"""
UNREAD = {"cache_prompt", "repack", "wide_first", "wide_last"}
"""Knobs that neither the log nor the file shows under their own name."""


@pytest.fixture(scope="module")
def searched(autotune, home: Path) -> Iterator[tuple[list[Trial], subprocess.CompletedProcess[str]]]:
    (home / "load.toml").write_text(WORKLOAD)
    (home / "llama.toml").write_text(PLAN)
    done = autotune("search", "--plan", "llama.toml", "--budget", "6", "--db", "llama.db", "--format", "json",
                    AUTOTUNE_WORKLOAD="")  # fmt: skip
    assert done.returncode == 0, done.stderr
    with open_store(home / "llama.db", readonly=True) as store:
        yield store.trials(stage="search"), done


def test_what_ran_is_what_was_asked(searched) -> None:
    trials, done = searched
    assert json.loads(done.stdout)["standings"][-1]["verdict"] == "default"
    assert {trial.status for trial in trials} <= {"ok", "pruned"} and len({t.config_key for t in trials}) == 6
    for trial in trials:
        read = {name: value for name, value in trial.config.items() if name not in UNREAD}
        assert read.items() <= dict(trial.effective).items()
        if trial.status == "ok":
            assert trial.config["cache_prompt"] == (trial.counters["prefix_hits"] > 0)
            assert trial.metrics["kl_mean"] < 1e-4


def test_two_knobs_change_the_speed_beyond_noise(searched) -> None:
    found = {knob: effect(searched[0], knob) for knob in ("parallel", "cache_prompt", "ubatch_size")}
    assert sum(ratio > 1.2 for ratio in found.values()) >= 2, found


def test_no_process_is_left_and_the_export_runs_it(searched, autotune, home: Path) -> None:
    lines = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert not [line for line in lines if llama_serve.__name__ in line and str(home) in " ".join(line)]
    done = autotune(
        "export", "--to", "shell", "--engine", "llamacpp", "--db", "llama.db", "-o", "serve.sh", AUTOTUNE_WORKLOAD=""
    )
    assert done.returncode == 0, done.stderr
    text = (home / "serve.sh").read_text()
    fake = home / "python3"
    fake.write_text('#!/bin/sh\nshift 2\nprintf "%s\\0" "$@"\n')
    fake.chmod(0o755)
    ran = subprocess.run(["sh", "-c", text], capture_output=True, text=True, check=True, env={"PATH": f"{home}:/bin"})
    options = llama_serve.parser().parse_args(ran.stdout.split("\0")[:-1])
    best = autotune(
        "export", "--to", "json", "--engine", "llamacpp", "--db", "llama.db", "-o", "best.json", AUTOTUNE_WORKLOAD=""
    )
    assert best.returncode == 0, best.stderr
    config = json.loads((home / "best.json").read_text())["config"]
    assert Path(options.model).is_file()
    assert {name: getattr(options, name) for name in ("parallel", "cache_prompt", "batch_size", "flash_attn")} == {
        name: config[name] for name in ("parallel", "cache_prompt", "batch_size", "flash_attn")
    }
