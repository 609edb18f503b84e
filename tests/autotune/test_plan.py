"""Plans: precedence, origins, and one clear line for each kind of wrong input."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.plan import PlanError, resolve


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "plan.toml"
    file.write_text(text)
    return file


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = write(
        tmp_path, 'budget = 10\nseed = 3\nworkload = "chat"\n[knobs]\nkv_dtype = ["int8", "bf16"]\nthreads = 1\n'
    )
    plan = resolve({"budget": 30, "engine": None}, {"AUTOTUNE_BUDGET": "20", "AUTOTUNE_SEED": "4"}, file)
    assert (plan.budget, plan.seed, plan.workload, plan.engine) == (30, 4, "chat", "native")
    assert plan.origin["budget"] == "--budget"
    assert plan.origin["seed"] == "AUTOTUNE_SEED"
    assert plan.origin["workload"] == str(file)
    assert plan.origin["engine"] == "default"
    assert plan.knobs == {"kv_dtype": ("int8", "bf16"), "threads": (1,)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("budgt = 3", "unknown key 'budgt'; did you mean budget"),
        ("budget = ", "not valid TOML"),
        ("budget = 0", "budget must lie between 1 and"),
        ("budget = 2.5", "wants a whole number"),
        ("budget = true", "wants a whole number"),
        ("model = 3", "wants text"),
        ("max_kl = -1", "max_kl must lie between 0"),
        ("max_kl = nan", "max_kl must lie between 0"),
        ("knobs = 3", "knobs must be a table"),
        ("[knobs]\nx = {a=1}", "knob x wants a value"),
    ],
)
def test_wrong_files_are_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        resolve({}, {}, write(tmp_path, text))
    assert "\n" not in str(caught.value).strip() or "TOML" in str(caught.value)


def test_a_missing_file_and_a_wrong_environment(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot read plan"):
        resolve({}, {}, tmp_path / "none.toml")
    with pytest.raises(PlanError, match="AUTOTUNE_BUDGET: budget wants a whole number, not 'many'"):
        resolve({}, {"AUTOTUNE_BUDGET": "many"})
