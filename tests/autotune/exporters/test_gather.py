"""An export gathered from stored rows: means, evidence, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autotune.exporters import ExportError, exporter
from autotune.exporters.gather import gather
from autotune.exporters.json_file import parse
from autotune.stats import Winner, decide
from search_spaces import Config, load
from tuning_db import Hardware, Scenario, Trial

DEFAULT = load("native").default()
FAST = load("native").complete({"attention": "sparse"})
SCENARIO = Scenario(
    hardware=Hardware("cpu", {"cpu_model": "Example", "cores": 2}),
    engine="native",
    engine_build={"torch": "2.9"},
    model={"name": "reference"},
    workload={"name": "task"},
    objective={"metric": "output_tok_s", "better": "higher"},
)


def run(config: Config, block: int, speed: float, **effective: Any) -> Trial:
    return Trial(
        id=f"{block:010x}{config.key[3:13]}",
        scenario_key=SCENARIO.key,
        stage="confirm",
        config=dict(config),
        config_key=config.key,
        status="ok",
        metrics={"output_tok_s": speed, **({"kl_mean": 0.01} if block > 1 else {})},
        effective={**config, **effective},
        block=block,
        ended_at=1_700_000_000.0 + block,
        provenance={"round": "r1:abc"},
    )


ROWS = [run(c, b, s + b) for b in range(1, 5) for c, s in ((DEFAULT, 100.0), (FAST, 200.0))]


def winner(rows: list[Trial]) -> Winner:
    blocks: dict[str, dict[int, float]] = {}
    for row in rows:
        blocks.setdefault(row.config_key, {})[row.block] = row.metrics["output_tok_s"]
    found = decide(blocks, DEFAULT.key, higher=True)
    assert found is not None
    return found


def test_the_winner_is_exported_with_its_evidence() -> None:
    export = gather(winner(ROWS), DEFAULT.key, ROWS, SCENARIO, Path("/models/reference"))
    assert Config(export.config) == FAST
    assert export.effective == dict(FAST)
    evidence = export.evidence
    assert (evidence.verdict, evidence.blocks, evidence.round) == ("better", 4, "r1:abc")
    assert evidence.metrics == {"output_tok_s": 202.5}
    assert evidence.default_metrics == {"output_tok_s": 102.5}
    assert evidence.trials == tuple(row.id for row in ROWS if row.config_key == FAST.key)
    assert evidence.measured_at == "2023-11-14T22:13:24+00:00"
    assert export.hardware["key"] == SCENARIO.hardware.key
    assert parse(exporter("json").render(export)["best.json"].encode(), "x") == export


def test_the_default_is_exported_when_nothing_proved_better() -> None:
    rows = [run(c, b, 100.0 + b) for b in range(1, 5) for c in (DEFAULT, FAST)]
    export = gather(winner(rows), DEFAULT.key, rows, SCENARIO, Path("m"))
    assert Config(export.config) == DEFAULT
    assert export.evidence.verdict == "same"


def test_runs_that_ran_different_things_vouch_for_nothing() -> None:
    rows = [*ROWS, run(FAST, 5, 200.0, attention="absorbed"), run(DEFAULT, 5, 100.0)]
    with pytest.raises(ExportError, match="autotune show"):
        gather(winner(rows), DEFAULT.key, rows, SCENARIO, Path("m"))


def test_a_winner_without_runs_is_refused() -> None:
    with pytest.raises(ExportError, match="autotune search"):
        gather(winner(ROWS), DEFAULT.key, ROWS[:1], SCENARIO, Path("m"))
