"""`autotune space` for named hardware and for a config.json alone; at no launch."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from autotune.cli import main

GLM = Path(str(resources.files("autotune") / "data" / "glm-5.3-flash"))


def run(*words: str) -> Result:
    return CliRunner().invoke(main, ["space", *words])


@pytest.fixture(scope="module")
def four() -> dict:
    found = run("--engine", "vllm", "--hardware", "4xA100-80GB", "--model", str(GLM), "--format", "json")
    assert found.exit_code == 0, found.output
    return json.loads(found.stdout)


def test_a_named_machine_shows_fits_and_reasons(four):
    fits = {(f["bits"], f["layout"]): f for f in four["fits"]}
    best = fits["w4-g128", "tp4"]
    assert best["weight_bytes"] / 2**30 == pytest.approx(42.5, abs=0.25)
    assert best["kv_tokens"] == pytest.approx(2.14e6, rel=0.025) and best["reason"] == ""
    assert fits["fp8", "tp4"]["reason"] == "out of memory"
    removed = {(r["knob"], r["value"]): r["reason"] for r in four["removed"]}
    assert "GiB of weights a device at best" in removed["checkpoint", "fp8"]
    assert "8.0" in removed["attention_backend", "FLASHMLA_SPARSE"]
    assert removed["tp", 8] == "8 ranks need 8 devices; there are 4"
    assert all(r["reason"] for r in four["removed"])
    assert {s["name"] for s in four["starts"]} == {"w4-tensor-draft", "w4-stages-draft", "w4-int8-attention-stages"}
    assert 0 < four["configurations"]["valid_share"] < 1
    assert {r["rule"].split(" ")[0] for r in four["rules"]} >= {"C1", "C3", "C4", "C6", "C7", "C8", "C9", "C10", "C14"}


def test_the_table_is_for_people():
    found = run("--engine", "vllm", "--hardware", "8xA100-40GB", "--model", "glm-5.3-flash")
    assert found.exit_code == 0, found.output
    assert "3.5 GiB a rank beside weights and cache (assumed" in found.stdout
    row = next(line for line in found.stdout.splitlines() if line.startswith("w4-g128  "))
    assert "21.7 → 0.98 M" in row
    assert "checkpoint=fp8: 39" in found.stdout


def test_the_native_engine_on_a_named_machine():
    found = run("--hardware", "4xA100-80GB", "--model", str(GLM), "--format", "json")
    fits = {(f["bits"], f["layout"]): f for f in json.loads(found.stdout)["fits"]}
    assert fits["16 bits (bf16)", "tp4"]["reason"] == "out of memory"
    assert fits["4 bits", "tp4"]["reason"] == "" and fits["4 bits", "tp4"]["kv_tokens"] > 1e6


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--hardware", "4xA100-90GB"], "did you mean 4xA100-80GB"),
        (["--engine", "vlm"], "unknown engine 'vlm'"),
        (["--engine", "vllm", "--hardware", "1xA100-40GB", "--model", str(GLM)], "no value of checkpoint is possible"),
        (["--model", "nowhere"], "no model folder nowhere"),
    ],
)
def test_one_clear_line_for_what_cannot_be(words, said):
    found = run(*words)
    assert found.exit_code == 2 and said in found.stderr, found.output


def test_a_vllm_that_is_not_there_or_not_for_this_machine_is_named(tmp_path):
    words = ["search", "--engine", "vllm", "--dry-run", "--engine-command"]
    found = CliRunner().invoke(main, [*words, "/no/such/vllm"])
    assert found.exit_code == 1 and "/no/such/vllm: No such file" in found.stderr
    build = tmp_path / "vllm"
    flags = "\\n".join(f"  --{name} X" for name in ("a", "b", "c", "d", "e"))
    build.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo 0.33.0 || printf "options:\\n{flags}\\n"\n')
    build.chmod(0o755)
    found = CliRunner().invoke(main, [*words, f"env {build}"])
    assert found.exit_code == 2 and "vllm 0.33.0 is a build for GPUs" in found.stderr
