"""`autotune search --target kernels` as a user runs it: rows, verdicts, resuming, and an engine that then uses it."""

from __future__ import annotations

import json
from pathlib import Path
from subprocess import CompletedProcess

import pytest

ONLY = ("--target", "kernels", "--only", "int8-bf16/512x128/4", "--blocks", "2", "--finalists", "1", "--budget", "2")
DB = ("--db", "kernels.db")


@pytest.fixture(scope="module")
def tuned(autotune) -> CompletedProcess[str]:
    return autotune("search", *ONLY, *DB, "--format", "json")


def test_each_operator_has_a_row_with_times_ratio_and_verdict(tuned) -> None:
    assert tuned.returncode == 0, tuned.stderr
    (row,) = json.loads(tuned.stdout)["kernels"]
    assert row["operator"] == "linear/int8-bf16/512x128/4"
    assert row["default_s"] > 0 and row["best_s"] > 0 and row["low"] <= row["ratio"] <= row["high"]
    assert row["verdict"] in ("better", "worse", "same", "unclear") and row["blocks"] == 2
    assert "1 operators of " in tuned.stderr and "Engines here now look up 1 operator" in tuned.stderr
    assert "next: autotune search" in tuned.stderr and "Traceback" not in tuned.stderr


def test_the_same_command_again_measures_nothing(tuned, autotune) -> None:
    again = autotune("search", *ONLY, *DB, "--format", "json")
    assert again.returncode == 0 and again.stdout == tuned.stdout
    rows = json.loads(autotune("query", *DB, "--format", "json").stdout)["trials"]
    assert len(rows) == 2 + 4


def test_query_and_show_read_kernel_trials(tuned, autotune) -> None:
    rows = autotune("query", "op_s<1s", *DB, "--engine", "kernels/cpu", "--columns", "id,model,op_s,config.path")
    assert rows.returncode == 0 and "linear/int8-bf16/512x128/4" in rows.stdout
    shown = autotune("show", rows.stdout.splitlines()[1].split()[0], *DB)
    assert "op_s" in shown.stdout and "sample_0_s" in shown.stdout and "µs" in shown.stdout


def test_a_search_of_the_engine_uses_the_table_and_its_export_carries_it(tuned, autotune, home: Path) -> None:
    found = autotune("search", "--budget", "2", "--plan", "plan.toml", *DB)
    assert found.returncode == 0, found.stderr
    assert "the engine runs with tuned kernels (k1:" in found.stderr
    exported = autotune("export", "-o", "tuned.json", *DB)
    assert exported.returncode == 0, exported.stderr
    document = json.loads((home / "tuned.json").read_text())
    assert list(document["kernels"]) == ["linear/int8-bf16/512x128/4"]
    script = autotune("export", "--to", "shell", *DB).stdout
    assert '--kernels \'{"linear/int8-bf16/512x128/4"' in script


def test_dry_run_lists_operators_and_both_spaces(autotune) -> None:
    done = autotune("search", *ONLY, "--dry-run", "--db", "never.db")
    assert done.returncode == 0, done.stderr
    assert "target           kernels" in done.stdout and "linear/int8-bf16/512x128/4" in done.stdout
    assert "kernels/cpu: " in done.stdout and "kernels/triton: " in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--only", "int8"), "--target kernels"),
        (("--target", "kernels", "--only", "flash"), "leaves no operator"),
        (("--target", "kernel"), "'engine', 'kernels'"),
    ],
)
def test_wrong_usage_is_one_line(autotune, words: tuple[str, ...], message: str) -> None:
    done = autotune("search", *words, "--db", "never.db")
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("missing.json", "cannot read --kernels missing.json"),
        ("{", "no table of tuned kernels"),
        ('{"linear": {}}', "names no|no kernel of a tuned table"),
        ('{"linear/int8-bf16/8x8/1": {"path": "sideways"}}', "settings that no kernel takes"),
    ],
)
def test_serve_refuses_a_wrong_table(autotune, table: str, message: str) -> None:
    done = autotune("serve", "--model", ".", "--kernels", table, "--port", "0")
    assert done.returncode == 2 and any(part in done.stderr for part in message.split("|")), done.stderr
