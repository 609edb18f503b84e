"""A real search on the real engine as a user runs it: what it prints, stores, exports, and how it survives a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autotune.cli.search import next_command
from autotune.plan import resolve
from search_spaces import load
from tuning_db import open_store

PLAN = ("--plan", "plan.toml")


def test_it_ends_with_standings_a_verdict_and_the_next_step(searched) -> None:
    assert searched.returncode == 0, searched.stderr
    standings = json.loads(searched.stdout)["standings"]
    assert standings[-1]["verdict"] == "default"
    assert {"ratio", "low", "high", "blocks", "tasks_per_min", "kl_mean"} <= set(standings[0])
    assert "verdict: " in searched.stderr and "95 % interval" in searched.stderr
    assert "next: autotune export -o best.json" in searched.stderr
    assert "Traceback" not in searched.stderr and "Warning" not in searched.stderr


def test_everything_measured_is_in_the_database(searched, home: Path) -> None:
    with open_store(home / "data" / "autotune" / "tuning.db", readonly=True) as store:
        trials = store.trials(stage="search")
        assert len(trials) == 4
        first = trials[0]
        assert first.status == "ok" and first.metrics["kl_mean"] >= 0 and first.seconds["measure"] > 0
        assert first.effective["kernels"] and first.counters["weight_bytes"] > 0
        assert len(store.samples(first.id)) == 4
        assert len(store.trials(stage="confirm")) == 4


def test_the_same_command_again_measures_nothing(searched, autotune) -> None:
    again = autotune("search", "--budget", "4", *PLAN, "--format", "json")
    assert again.returncode == 0
    assert again.stdout == searched.stdout
    assert "4 of 4 trials are already in the database" in again.stderr


def test_query_show_export_and_space_read_it(searched, autotune, home: Path) -> None:
    rows = json.loads(autotune("query", "--format", "json", "--stage", "search").stdout)["trials"]
    assert len(rows) == 4
    shown = autotune("show", rows[0]["id"][:14])
    assert shown.returncode == 0 and "metrics:" in shown.stdout
    (best,) = json.loads(autotune("query", "--best", "--format", "json").stdout)["best"]
    assert (best["tier"], best["differs"], best["runs"]) == ("exact", [], 2)
    exported = autotune("export", "-o", "best.json")
    assert exported.returncode == 0, exported.stderr
    document = json.loads((home / "best.json").read_text())
    assert document["evidence"]["ratio"]["n"] == 2
    space = json.loads(autotune("space", "--format", "json").stdout)["knobs"]
    assert {row["dimension"] for row in space} >= {"attention", "bits", "layout", "graphs", "cache"}
    assert "ranks need" in next(row["removed"] for row in space if row["knob"] == "tp")


def test_dry_run_shows_the_plan_and_measures_nothing(autotune, home: Path) -> None:
    done = autotune("search", "--budget", "7", "--dry-run", "--db", "never.db")
    assert done.returncode == 0, done.stderr
    assert "budget           7" in done.stdout and "--budget" in done.stdout and "AUTOTUNE_WORKLOAD" in done.stdout
    assert "removed    graphs=cuda: CUDA graphs need a CUDA device" in done.stdout
    assert "autotune serve --engine native" in done.stdout and "--set kda_chunk=64" in done.stdout
    assert not (home / "never.db").exists()


def test_the_next_command_repeats_what_it_needs() -> None:
    given = resolve({"model": "my models/glm", "db": None}, {"AUTOTUNE_DB": "shared.db"})
    assert next_command(given) == "autotune export -o best.json --model 'my models/glm'"
    assert next_command(resolve({"db": "t.db"}, {})) == "autotune export -o best.json --db t.db"


def processes(marker: str) -> list[int]:
    """Processes whose environment carries ``marker``."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and marker.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def start(environment: dict[str, str], home: Path, db: str, marker: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "autotune", "search", "--budget", "5", *PLAN, "--db", db],
        env={**environment, "MARKER": marker},
        cwd=home,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_trials(running: subprocess.Popen[str], count: int) -> None:
    assert running.stderr is not None
    for line in running.stderr:
        if line.lstrip().startswith(f"{count}/5"):
            return
    raise AssertionError("the search ended before its time")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_stopped_by_any_signal_it_leaves_no_process_and_goes_on(
    autotune, environment: dict[str, str], home: Path, number: signal.Signals
) -> None:
    db, marker = f"{number.name}.db", f"marker-{number.name}-{os.getpid()}"
    running = start(environment, home, db, marker)
    wait_for_trials(running, 2)
    time.sleep(0.2)  # into the third trial
    running.send_signal(number)
    _, rest = running.communicate(timeout=60)
    assert running.returncode == (-9 if number is signal.SIGKILL else 130)
    if number is not signal.SIGKILL:
        assert "The same command goes on from here" in rest and "Traceback" not in rest
    deadline = time.monotonic() + 20
    while processes(marker) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes(marker) == []
    with open_store(home / db, readonly=True) as store:
        before = [t.id for t in store.trials(stage="search")]
    assert len(before) >= 2
    done = autotune("search", "--budget", "5", *PLAN, "--db", db)
    assert done.returncode == 0, done.stderr
    with open_store(home / db, readonly=True) as store:
        trials = store.trials(stage="search")
    assert [t.id for t in trials][: len(before)] == before
    assert len(trials) == len({t.config_key for t in trials}) == 5


def test_a_second_search_on_the_machine_is_refused(environment: dict[str, str], home: Path, autotune) -> None:
    running = start(environment, home, "alone.db", f"alone-{os.getpid()}")
    try:
        wait_for_trials(running, 1)
        second = autotune("search", "--budget", "5", *PLAN, "--db", "other.db")
        assert second.returncode == 1
        assert f"another search (process {running.pid}) is measuring" in second.stderr
    finally:
        running.kill()
        running.communicate()


def test_a_real_configuration_outside_the_gate_cannot_win(autotune, home: Path) -> None:
    """Four bits answer differently: under a gate of almost no KL they are measured, stored, and never finalists."""
    free = {"bits_attention": (4, 16), "bits_experts": (4, 16)}
    space = load("native")
    knobs = {k.name: free.get(k.name, (k.default,)) for k in space.knobs if k.name != "bits_group_size"}
    lines = [f"{name} = {json.dumps(values)}" for name, values in knobs.items()]
    (home / "strict.toml").write_text("\n".join(["max_kl = 1e-5", "quality_tokens = 128", "[knobs]", *lines]))
    done = autotune("search", "--budget", "4", "--plan", "strict.toml", "--db", "strict.db")
    assert done.returncode == 3, done.stderr
    assert "no configuration other than the default passed the quality gate" in done.stderr
    with open_store(home / "strict.db", readonly=True) as store:
        trials = store.trials(stage="search")
    assert [t.status for t in trials] == ["ok", "quality", "quality", "quality"]
    assert all(t.metrics["tasks_per_min"] > 0 and t.metrics["kl_mean"] > 1e-5 for t in trials[1:])
    assert all("limit 1e-05" in t.reason for t in trials[1:])
