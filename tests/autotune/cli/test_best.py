"""`autotune query --best`: the answer, its tier and its differences, for this machine and for a named one."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner
from contracts.records import make_samples, make_scenario, make_trial

from autotune.cli import main
from autotune.hardware import Probe
from tuning_db import Hardware, open_store

FACTS = {"product": "NVIDIA A100-SXM4-80GB", "memory_bytes": 80 << 30, "count": 4, "compute_capability": "8.0",
         "links": "NVSwitch", "power_limit_w": 400, "driver": "570"}  # fmt: skip
OBJECTIVE = {"metric": "output_tok_s", "better": "higher"}


def on(engine="native", build=None, **facts):
    hardware = Hardware("gpu", {**FACTS, **facts})
    return make_scenario(
        hardware=hardware, engine=engine, engine_build=build or {"source": "s1", "torch": "2.9"}, objective=OBJECTIVE
    )


@pytest.fixture
def path(tmp_path, monkeypatch):
    """A fast and a slow configuration confirmed on 4 GPUs that this machine has, and one on 8."""
    monkeypatch.setattr("autotune.hardware.probe", lambda: Probe("gpu", FACTS))
    monkeypatch.setattr("autotune.cli.best._build", lambda engine, store: {"source": "s1", "torch": "2.9"})
    with open_store(tmp_path / "tuning.db") as store:
        confirm(store, on(), "fast", 300.0, 9.0)
        confirm(store, on(), "slow", 100.0, 0.1)
        confirm(store, on(count=8), "eight", 500.0, 0.1)
    return tmp_path / "tuning.db"


def confirm(store, scenario, name, speed, scale):
    key = store.ensure(scenario)
    for block in range(3):
        trial = make_trial(
            key, stage="confirm", block=block, config={"name": name}, config_key=f"c1:{name}",
            metrics={"output_tok_s": speed + block},
        )  # fmt: skip
        slow = [
            replace(sample, sent=0.0, token_times=tuple(scale * n for n in range(1, 5)))
            for sample in make_samples(trial.id, 200)
        ]
        store.add(trial, slow)


def run(path, *words, form="json"):
    return CliRunner().invoke(main, ["query", "--best", "--db", str(path), "--format", form, *words])


def test_the_best_confirmed_configuration_of_this_machine(path):
    done = run(path)
    (row,) = json.loads(done.stdout)["best"]
    assert (row["tier"], row["distance"], row["differs"], row["config"]) == ("exact", 0, [], {"name": "fast"})
    assert (row["value"], row["runs"], len(row["trials"])) == (301.0, 3, 3)
    assert done.stderr == "" and done.exit_code == 0


def test_a_new_limit_needs_no_new_run(path):
    done = run(path, "--slo", "ttft_p99<500ms")
    (row,) = json.loads(done.stdout)["best"]
    assert row["config"] == {"name": "slow"} and row["slo"] in ("met", "unproven")
    assert "1 faster configurations do not meet the SLO" in done.stderr
    # Nothing here keeps this one, so the nearest other machine is asked, which does not either.
    assert run(path, "--slo", "ttft_p99<1ms").exit_code == 3


def test_another_machine_is_asked_by_name(path):
    (row,) = json.loads(run(path, "--hardware", "8xA100").stdout)["best"]
    assert (row["tier"], row["config"]) == ("exact", {"name": "eight"})
    unknown = run(path, "--hardware", "H100")
    assert unknown.exit_code == 2 and "4xA100-SXM4-80GB, 8xA100-SXM4-80GB" in unknown.stderr
    several = run(path, "--hardware", "A100")
    assert several.exit_code == 2 and "fits several machines" in several.stderr


@pytest.mark.parametrize(
    ("facts", "build", "tier", "named"),
    [
        ({"power_limit_w": 300}, None, "near", "hardware.power_limit_w 300 here, 400 there"),
        ({"driver": "580"}, None, "stale", "hardware.driver 580 here, 570 there (older)"),
        ({}, {"source": "s2", "torch": "2.9"}, "stale", "engine.source s2 here, s1 there"),
        ({}, {"source": "s1", "torch": "2.8"}, "far", "engine.torch 2.8 here, 2.9 there (newer)"),
        ({"product": "NVIDIA H100"}, None, "far", "hardware.product NVIDIA H100 here, NVIDIA A100-SXM4-80GB there"),
    ],
)
def test_an_answer_from_elsewhere_says_so_in_both_streams(path, monkeypatch, facts, build, tier, named):
    monkeypatch.setattr("autotune.hardware.probe", lambda: Probe("gpu", {**FACTS, **facts}))
    if build:
        monkeypatch.setattr("autotune.cli.best._build", lambda engine, store: build)
    done = run(path)
    (row,) = json.loads(done.stdout)["best"]
    assert row["tier"] == tier and named in row["differs"] and row["distance"] > 0
    assert f"{tier}, not measured here" in done.stderr and named in done.stderr
    table = run(path, form="table").stdout
    assert tier in table and named.split(" ")[0] in table


def test_an_engine_that_is_not_here_says_that_its_build_was_not_compared(path, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr("autotune.hardware.probe", lambda: Probe("gpu", FACTS))
    with open_store(path) as store:
        confirm(store, on("sglang"), "fast", 300.0, 0.1)
    done = run(path, "--engine", "sglang")
    assert json.loads(done.stdout)["best"][0]["tier"] == "exact"
    assert "sglang: its build here is unknown, so only the machine is compared" in done.stderr


def test_nothing_confirmed_is_exit_code_3(tmp_path, path):
    open_store(tmp_path / "empty.db").close()
    done = run(tmp_path / "empty.db")
    assert done.exit_code == 3 and "autotune search" in done.stderr
    assert run(path, "--engine", "vllm").exit_code == 3


def test_kernels_are_answered_for_only_when_named(path):
    with open_store(path) as store:
        confirm(store, on("kernels/linear"), "tile", 1.0, 0.1)
    assert len(json.loads(run(path).stdout)["best"]) == 1
    (row,) = json.loads(run(path, "--engine", "kernels/linear").stdout)["best"]
    assert row["config"] == {"name": "tile"}


def test_limits_without_best_are_wrong_usage(path):
    done = CliRunner().invoke(main, ["query", "--slo", "ttft_p99<1s", "--db", str(path)])
    assert done.exit_code == 2 and "--best" in done.stderr
