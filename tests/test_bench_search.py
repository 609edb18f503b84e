"""Replays on tables: the reader, the rules of a replay, confirmation, and bounds that the tuner must keep to on T1."""

from __future__ import annotations

import gzip
import importlib
import itertools
import json
import math
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
T1 = ROOT / "scripts" / "data" / "native_task.jsonl.gz"
KNOBS = {"mode": ["a", "b", "c"], "size": [16, 24, 32, 64], "reuse": [False, True], "width": [4, 8, 16]}


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        yield {n: importlib.import_module(n) for n in ("tables", "replay", "replay_peers", "replay_confirm")}
    finally:
        sys.path.remove(str(ROOT / "scripts"))


@pytest.fixture
def table(scripts: dict[str, ModuleType], tmp_path: Path) -> Any:
    """A formula's values in the recorded format: 72 configurations less 9 excluded ones, 5 blocks, 6 failures."""
    head = {"schema": 1, "name": "formula", "metric": "tasks_per_min", "higher": True, "unit": "tasks/min",
            "knobs": KNOBS, "default": {"mode": "a", "size": 16, "reuse": False, "width": 16}, "blocks": 5}  # fmt: skip
    lines = [json.dumps(head)]
    for c in itertools.product(*(range(len(v)) for v in KNOBS.values())):
        if c[0] == 1 and c[1] == 1:
            continue
        if c[0] == 2 and c[3] == 0:
            lines.append(json.dumps({"c": c, "v": [None] * 5, "s": "crash", "r": "scripted"}))
            continue
        speed = (1 + c[0]) * (1 + 0.3 * (c[1] != 1)) * (1 + 0.5 * c[2]) * (1.4 - 0.1 * c[3])
        noise = [math.exp(0.01 * math.sin(7 * sum(c) + b)) for b in range(5)]
        lines.append(json.dumps({"c": c, "v": [speed * n for n in noise], "s": "ok", "r": ""}))
    path = tmp_path / "formula.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    return scripts["tables"].read(path)


def test_a_table_says_what_is_valid_what_fails_and_what_is_best(table: Any) -> None:
    space = table.space()
    assert len(table.blocks) == 72 - 6
    assert table.true((2, 0, 0, 0)) is None
    assert space.broken(space.complete({"mode": "b", "size": 24}))
    assert not space.broken(space.default())
    assert table.codes(space.default()) == table.default == (0, 0, 0, 2)
    assert table.config((2, 3, 1, 1))["reuse"] is True
    assert table.optimum() == max(t for c in table.blocks if (t := table.true(c)) is not None)


def test_failures_cost_an_evaluation_repeats_and_excluded_points_do_not(
    scripts: dict[str, ModuleType], table: Any
) -> None:
    replay = scripts["replay"].Replay(table, seed=0, budget=3)
    refused = scripts["replay"].Refused
    assert replay.measure((1, 1, 0, 0)) is refused.INVALID
    first = replay.measure((0, 0, 0, 0))
    assert replay.measure((0, 0, 0, 0)) == first
    assert replay.measure((2, 0, 0, 0)) is refused.FAILED
    assert len(replay.curve) == 2
    assert replay.curve[0] == replay.curve[1] == pytest.approx(math.exp(table.true((0, 0, 0, 0)) - table.optimum()))
    replay.measure((1, 0, 1, 0))
    with pytest.raises(scripts["replay"].Spent):
        replay.measure((1, 0, 1, 1))


def test_all_searchers_hear_the_same_draw_of_a_recorded_block(scripts: dict[str, ModuleType], table: Any) -> None:
    replays = [scripts["replay"].Replay(table, seed=4, budget=9) for _ in range(2)]
    heard = [replay.measure((1, 2, 1, 1)) for replay in replays]
    assert heard[0] == heard[1]
    assert math.exp(heard[0]) in [pytest.approx(v) for v in table.blocks[(1, 2, 1, 1)]]


@pytest.mark.parametrize("name", ["autotune", "random", "optuna-tpe"])
def test_a_searcher_measures_as_many_as_its_budget(scripts: dict[str, ModuleType], table: Any, name: str) -> None:
    curve = scripts["replay_peers"].play(name, scripts["replay"].Replay(table, seed=1, budget=20))
    assert len(curve) == 20
    assert 0 < curve[0] <= curve[-1] <= 1


def test_the_tuner_is_ahead_of_chance_on_the_formula(scripts: dict[str, ModuleType], table: Any) -> None:
    def median(name: str) -> float:
        replays = [scripts["replay"].Replay(table, seed, 20) for seed in range(7)]
        return statistics.median(scripts["replay_peers"].play(name, replay)[-1] for replay in replays)

    assert median("autotune") >= max(0.97, median("random"))


def test_twins_are_rarely_told_apart_and_a_tenth_more_is_found(scripts: dict[str, ModuleType], table: Any) -> None:
    equal = scripts["replay_confirm"].pair(table, 30, 1.0)
    better = scripts["replay_confirm"].pair(table, 30, 1.1)
    assert equal["same"] + equal["unclear"] >= 27
    assert better["better"] >= 27


def test_a_race_keeps_near_the_best_and_never_deploys_worse_than_the_default(
    scripts: dict[str, ModuleType], table: Any
) -> None:
    found = scripts["replay_confirm"].rule(table, 20, scripts["replay_confirm"].recorded)
    assert found["worse_than_default"] == 0
    assert found["regret"] < 1.0
    assert found["claim_error"] < 1.5


@pytest.mark.skipif(not T1.is_file(), reason="the recorded table is not here; scripts/record_table.py makes it")
def test_on_the_recorded_table_fifty_trials_come_near_the_optimum(scripts: dict[str, ModuleType]) -> None:
    recorded = scripts["tables"].read(T1)
    assert len(recorded.blocks) >= 800
    ends = [
        scripts["replay_peers"].play("autotune", scripts["replay"].Replay(recorded, seed, 50))[-1] for seed in range(5)
    ]
    assert statistics.median(ends) >= 0.9
