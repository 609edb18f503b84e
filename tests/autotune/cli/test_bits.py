"""The ladder as a user meets it, on a small random checkpoint: shown, kept, searched and exported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SHORT = {"AUTOTUNE_QUALITY_TOKENS": "128"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("random")
    sizes = ["--hidden", "128", "--layers", "2", "--experts", "4"]
    subprocess.run([sys.executable, ROOT / "scripts" / "random_checkpoint.py", folder, *sizes], check=True)
    return str(folder)


@pytest.fixture(scope="module")
def ladder(autotune, model: str) -> list[dict]:
    done = autotune("bits", "--model", model, "--db", "bits.db", "--format", "json", **SHORT)
    assert done.returncode == 0, done.stderr
    assert "ladder 2/8" in done.stderr
    return json.loads(done.stdout)["bits"]


def test_it_goes_from_full_width_to_the_narrowest(ladder: list[dict]) -> None:
    sizes = [row["weight_bytes"] for row in ladder]
    assert ladder[0]["bits_vector"] == "full width" and sizes == sorted(sizes, reverse=True) and len(sizes) >= 3
    assert all(row["kl"] > 0 for row in ladder[1:])


def test_a_second_time_nothing_is_measured(autotune, model: str, ladder: list[dict]) -> None:
    done = autotune("bits", "--model", model, "--db", "bits.db", "--format", "json", **SHORT)
    assert json.loads(done.stdout)["bits"] == ladder and "ladder" not in done.stderr
    groups = autotune("bits", "--model", model, "--db", "bits.db", "--groups", "--format", "json", **SHORT)
    rows = json.loads(groups.stdout)["bits"]
    assert {row["width"] for row in rows} == {4, 8, 16} and any(row["group"] == "1.experts" for row in rows)


def test_a_search_climbs_it_and_the_export_says_every_width(
    autotune, model: str, ladder: list[dict], home: Path
) -> None:
    words = ("--model", model, "--db", "bits.db")
    limits = ("--bits", "ladder", "--plan", "plan.toml", "--max-kl", "100", "--max-perplexity", "1000")
    done = autotune("search", "--budget", "4", *words, *limits, **SHORT)
    assert done.returncode == 0, done.stderr
    assert "[ladder, " in done.stderr
    trials = json.loads(autotune("query", "--db", "bits.db", "--format", "json", **SHORT).stdout)["trials"]
    vectors = {trial["config.bits_vector"] for trial in trials}
    assert vectors <= {"", *(row["bits_vector"] for row in ladder)} and len(vectors) > 1
    assert all(trial["config.bits_experts"] == 16 for trial in trials)
    done = autotune("export", *words, "-o", "bits.json")
    assert done.returncode in (0, 3), done.stderr
    if done.returncode == 0:
        assert json.loads((home / "bits.json").read_text())["config"]["bits_vector"] in vectors


def test_what_stands_in_its_way_is_said(autotune, home: Path) -> None:
    done = autotune("search", "--bits", "stairs")
    assert done.returncode == 2 and "ladder" in done.stderr
