"""`autotune export` and `autotune serve` up to the engine: which round is chosen, what is written, what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from autotune.cli import main
from autotune.cli.export import chosen
from autotune.decision import decided
from autotune.exporters.json_file import read
from search_spaces import Config, SpaceError, load
from tuning_db import Hardware, Scenario, Store, Trial, new_id, open_store

SPACE = load("native")
DEFAULT = SPACE.default()
FAST = SPACE.complete({"attention": "sparse"})
FASTER = SPACE.complete({"attention": "sparse", "prefix_reuse": True})
HERE, ELSEWHERE = Hardware("cpu", {"cpu_model": "Here", "cores": 2}), Hardware("gpu", {"product": "NVIDIA A100"})
MODEL = {"name": "reference", "weights": "sha256:00"}


@dataclass(frozen=True)
class Facts:
    """A model of a known identity."""

    def identity(self) -> Mapping[str, Any]:
        return MODEL


@pytest.fixture
def db(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    @dataclass(frozen=True)
    class Probe:
        kind: str = HERE.kind
        facts: Any = None

    monkeypatch.setattr("autotune.hardware.probe", lambda: Probe(facts=HERE.facts))
    monkeypatch.setattr("autotune.model.facts", lambda folder: Facts())
    path = tmp_path / "tuning.db"
    open_store(path).close()
    return path


def scenario(**changes: Any) -> Scenario:
    objective = {"metric": "output_tok_s", "better": "higher"}
    whole = Scenario(HERE, "native", {"torch": "2.9"}, MODEL, {"name": "task"}, objective)
    return replace(whole, **changes)


def confirm(store: Store, what: Scenario, speeds: Mapping[Config, float], blocks: int = 4, start: float = 1e9) -> None:
    key = store.ensure(what)
    name = f"r1:{start:g}"
    for block in range(1, blocks + 1):
        for config, speed in speeds.items():
            store.add(
                Trial(
                    id=new_id(), scenario_key=key, stage="confirm", config=dict(config), config_key=config.key,
                    status="ok", metrics={"output_tok_s": speed + block}, effective=dict(config), block=block,
                    ended_at=start + block, provenance={"round": name, "default": DEFAULT.key},
                )
            )  # fmt: skip


def run(db: Path, *words: str) -> Result:
    return CliRunner().invoke(main, ["export", "--db", str(db), *words])


def test_the_latest_decided_round_of_this_hardware_is_written(db: Path, tmp_path: Path) -> None:
    with open_store(db) as store:
        confirm(store, scenario(), {DEFAULT: 100.0, FAST: 300.0}, start=1e9)
        confirm(store, scenario(workload={"name": "chat"}), {DEFAULT: 100.0, FASTER: 200.0}, start=2e9)
        confirm(store, scenario(), {DEFAULT: 100.0, FAST: 300.0}, blocks=1, start=3e9)
        confirm(store, scenario(hardware=ELSEWHERE), {DEFAULT: 100.0, FAST: 900.0}, start=4e9)
        confirm(store, scenario(model={"name": "other"}), {DEFAULT: 100.0, FAST: 900.0}, start=4e9)
    file = tmp_path / "best.json"
    done = run(db, "-o", str(file))
    assert done.exit_code == 0, done.output
    export = read(file)
    assert Config(export.config) == FASTER and export.workload["name"] == "chat"
    assert export.evidence.verdict == "better" and export.evidence.blocks == 4
    assert f"next: autotune serve {file}" in done.stderr
    older = run(db, "--workload", "task")
    assert Config(json.loads(older.stdout)["config"]) == FAST
    assert json.loads(run(db, "--hardware", "a100").stdout)["hardware"]["key"] == ELSEWHERE.key
    assert run(db, "--to", "shell").stdout.startswith("#!/bin/sh\n")


def test_the_default_stays_when_nothing_proved_better(db: Path) -> None:
    with open_store(db) as store:
        confirm(store, scenario(), {DEFAULT: 100.0, FAST: 100.5})
    done = run(db)
    assert Config(json.loads(done.stdout)["config"]) == DEFAULT
    assert "the default stays" in done.stderr


@pytest.mark.parametrize(
    ("stored", "words", "message"),
    [
        (None, (), "run `autotune search` first"),
        (scenario(hardware=ELSEWHERE), (), "nothing that fits was measured on this machine"),
        (scenario(model={"name": "other"}), (), "only for other; give its folder with --model"),
        (scenario(), ("--objective", "ttft_p50"), "nothing that fits"),
        (scenario(), ("--hardware", "H200"), "'H200'"),
    ],
)
def test_nothing_to_export_is_exit_3_with_a_sentence(
    db: Path, stored: Scenario | None, words: tuple[str, ...], message: str
) -> None:
    if stored is not None:
        with open_store(db) as store:
            confirm(store, stored, {DEFAULT: 100.0, FAST: 300.0})
    done = run(db, *words)
    assert done.exit_code == 3
    assert message in done.stderr and done.stdout == "" and done.stderr.count("\n") == 1


def test_a_confirmation_that_was_cut_short_says_to_go_on(db: Path) -> None:
    with open_store(db) as store:
        confirm(store, scenario(), {DEFAULT: 100.0, FAST: 300.0}, blocks=1)
    done = run(db)
    assert done.exit_code == 3 and "it goes on" in done.stderr


def test_rows_without_their_default_decide_nothing(db: Path) -> None:
    with open_store(db) as store:
        confirm(store, scenario(), {FAST: 300.0, FASTER: 301.0})
        rows = store.trials(stage="confirm")
    assert list(decided(rows, scenario())) == []


def test_a_file_that_cannot_be_written_is_one_line_and_keeps_the_old(db: Path, tmp_path: Path) -> None:
    with open_store(db) as store:
        confirm(store, scenario(), {DEFAULT: 100.0, FAST: 300.0})
    for file in (tmp_path / "none" / "best.json", tmp_path):
        done = run(db, "-o", str(file))
        assert done.exit_code == 2 and done.stderr.count("\n") == 1 and "-o" in done.stderr
    script = tmp_path / "serve.sh"
    script.write_text("old")
    assert run(db, "-o", str(script), "--to", "shell").exit_code == 0
    assert script.stat().st_mode & 0o100
    assert sorted(path.name for path in tmp_path.iterdir() if "new" in path.name) == []


def test_set_takes_values_as_the_export_spells_them() -> None:
    words = ("attention=sparse", "bits_experts=4", "prefix_reuse=true")
    assert chosen("native", words) == {"attention": "sparse", "bits_experts": 4, "prefix_reuse": True}
    vector = "3.experts=4,lm_head=8"
    assert chosen("native", (f"bits_vector={vector}",)) == {"bits_vector": vector}
    assert chosen("native", ("bits_vector=",)) == {"bits_vector": ""}
    for word in ("attention", "attention=flash", "bits_experts=4.0", "atention=sparse", "prefix_reuse=1"):
        with pytest.raises(SpaceError):
            chosen("native", (word,))
    with pytest.raises(SpaceError, match="twice"):
        chosen("native", ("bits_experts=4", "bits_experts=8"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "FILE"),
        (("best.json", "--set", "attention=sparse"), "--set"),
        (("none.json",), "cannot read none.json"),
        (("best.json", "--port", "70000"), "--port"),
        (("--model", "none", "--set", "attention=flash"), "attention cannot be"),
    ],
)
def test_serve_refuses_what_it_cannot_run(
    words: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, ["serve", *words, *(("--port", "0") if "--port" not in words else ())])
    assert done.exit_code == 2, done.output
    assert message in done.stderr and "Traceback" not in done.output
