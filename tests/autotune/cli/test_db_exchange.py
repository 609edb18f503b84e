"""`autotune query` in groups and fronts, completion, and `autotune db export|import|merge|sql|optuna`."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path

import optuna
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner, Result
from contracts.records import HOSTILE, make_scenario, make_trial

from autotune.cli import main
from tuning_db import open_store

Run = Callable[..., Result]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "tuning.db"
    scenario = make_scenario(objective={"metric": "output_tok_s", "better": "higher"}, model={"name": "glm"})
    with open_store(path) as store:
        key = store.ensure(scenario)
        for step in range(6):
            store.add(
                make_trial(
                    key,
                    id=f"aaaa000{step}",
                    config={"kv_dtype": ("int8", "bf16")[step % 2], "note": HOSTILE},
                    metrics={"output_tok_s": 100.0 + step, "ttft_p50": 0.1 * (step + 1)},
                    status="ok" if step < 5 else "oom",
                    ended_at=1e9 + step,
                )
            )
    return path


@pytest.fixture
def run(base: Path) -> Run:
    def invoke(*words: str, db: Path = base, **more: bytes) -> Result:
        return CliRunner().invoke(main, [*words, "--db", str(db)], prog_name="autotune", **more)  # type: ignore[arg-type]

    return invoke


def test_groups_show_the_best_in_the_metrics_own_direction_and_unit(run: Run) -> None:
    shown = run("query", "--group", "kv_dtype", "--columns", "output_tok_s,ttft_p50")
    assert shown.exit_code == 0, shown.output
    head, first, second = shown.output.splitlines()
    assert head.split() == ["kv_dtype", "trials", "ok", "output_tok_s_best", "output_tok_s_mean", "ttft_p50_best",
                            "ttft_p50_mean"]  # fmt: skip
    assert first.split() == ["bf16", "3", "2", "103", "102", "200", "ms", "300", "ms"]
    assert second.split()[:4] == ["int8", "3", "3", "104"]
    groups = json.loads(run("query", "status=ok", "--group", "kv_dtype", "--format", "json").output)["groups"]
    assert {group["kv_dtype"]: group["ok"] for group in groups} == {"int8": 3, "bf16": 2}


def test_a_group_of_an_unknown_field_or_of_no_metric_is_wrong_usage(run: Run) -> None:
    for words in (
        ["--group", "kv_dtyp"],
        ["--group", "kv_dtype", "--columns", "note"],
        ["--group", "x", "--sort", "y"],
    ):
        shown = run("query", *words)
        assert shown.exit_code == 2, shown.output
        assert "did you mean" in shown.output or "not a measured number" in shown.output or "--sort" in shown.output


def test_the_pareto_front_is_of_good_trials_that_fit_the_filter(run: Run) -> None:
    rows = json.loads(run("query", "kv_dtype=int8", "--pareto", "output_tok_s,ttft_p50", "--format", "json").output)
    assert [row["id"] for row in rows["trials"]] == ["aaaa0004", "aaaa0002", "aaaa0000"]
    one = json.loads(run("query", "--pareto", "throughput", "--limit", "1", "--format", "json").output)
    assert [row["id"] for row in one["trials"]] == ["aaaa0004"]


@pytest.mark.parametrize(
    ("words", "typed", "offered"),
    [
        (["query", "--sort"], "status,-ttft", ["status,-ttft_p50"]),
        (["query", "--columns"], "id,kv_", ["id,kv_dtype"]),
        (["query", "--group"], "config.kv", ["config.kv_dtype"]),
        (["query"], "status=ok and (output_t", ["status=ok and (output_tok_s"]),
        (["query"], "metrics.o", ["metrics.output_tok_s"]),
    ],
)
def test_the_shell_completes_fields(
    base: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], typed: str, offered: list[str]
) -> None:
    monkeypatch.setenv("AUTOTUNE_DB", str(base))
    assert [item.value for item in ShellComplete(main, {}, "autotune", "_X").get_completions(words, typed)] == offered


def test_completion_without_a_database_offers_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOTUNE_DB", str(tmp_path / "none.db"))
    assert ShellComplete(main, {}, "autotune", "_X").get_completions(["query", "--sort"], "a") == []


def test_export_import_and_merge_pass_everything_on(run: Run, base: Path, tmp_path: Path) -> None:
    file, other = tmp_path / "tuning.jsonl", tmp_path / "other.db"
    assert run("db", "export", "-o", str(file)).exit_code == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    told = run("db", "import", str(file), db=other)
    assert told.exit_code == 0 and "6 of 6 trials and 1 of 1 scenarios are new" in told.output
    assert "0 of 6 trials" in run("db", "import", "-", db=other, input=file.read_bytes()).output
    assert "0 of 6 trials" in run("db", "merge", str(base), db=other).output
    assert run("db", "export", db=other).stdout_bytes == file.read_bytes()
    head = json.loads(file.read_text().splitlines()[0])["autotune_tuning_db"]
    assert head["schema"] >= 2
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_a_bad_import_is_one_line_with_its_place_and_changes_nothing(run: Run, base: Path, tmp_path: Path) -> None:
    file = tmp_path / "cut.jsonl"
    file.write_bytes(run("db", "export").stdout_bytes[:-50])
    before = run("db", "export").stdout_bytes
    told = run("db", "import", str(file))
    assert told.exit_code == 2
    assert "cut.jsonl, line " in told.output and told.output.count("\n") == 1
    assert run("db", "import", str(tmp_path / "none")).exit_code == 2
    assert "is the database itself" in run("db", "export", "-o", str(base)).output
    assert run("db", "export").stdout_bytes == before


def test_sql_reads_and_only_reads(run: Run) -> None:
    query = "SELECT status, count(*) AS n FROM trials GROUP BY status ORDER BY status"
    assert run("db", "sql", query, "--format", "csv").output == "status,n\nok,5\noom,1\n"
    more = run("db", "sql", "SELECT id FROM trials", "--limit", "2")
    assert "more than 2 rows" in more.output
    assert "aaaa0002" not in more.output
    for statement in ("DELETE FROM trials", "selec"):
        told = run("db", "sql", statement)
        assert told.exit_code == 2
        assert told.output.startswith("autotune: SQL: ")


def test_a_scenario_becomes_an_optuna_study(run: Run, base: Path, tmp_path: Path) -> None:
    path = tmp_path / "study.db"
    told = run("db", "optuna", "--study", "glm", "-o", str(path), "--model", "glm")
    assert told.exit_code == 0, told.output
    assert "6 trials of native" in told.output and "optuna-dashboard sqlite:///" in told.output
    study = optuna.load_study(study_name="glm", storage=f"sqlite:///{path}")
    assert study.best_value == 104.0
    assert run("db", "optuna", "--study", "glm", "-o", str(path)).exit_code == 2
    assert run("db", "optuna", "--study", "x", "--scenario", "s1:none'").exit_code == 3
    with open_store(base) as store:
        key = store.scenarios()[0].key
    told = run("db", "optuna", "--study", "x", "-o", str(tmp_path / "x.db"), "--scenario", key[:9])
    assert told.exit_code == 0, told.output
