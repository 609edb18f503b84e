"""Plans: precedence, origins, and one clear line for each kind of wrong input."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.plan import PlanError, resolve, seconds


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


def test_slos_come_from_flags_environment_and_file_and_a_typo_names_the_field(tmp_path) -> None:
    file = tmp_path / "p.toml"
    file.write_text('slo = ["ttft_p99 < 500ms", "output_tok_s>3"]\ntime = "1h30m"\n')
    assert resolve({"slo": ()}, {}, file).slo == ("ttft_p99<500ms", "output_tok_s>3")
    assert resolve({"slo": ("e2e_p90<2s",)}, {}, file).slo == ("e2e_p90<2s",)
    assert resolve({}, {"AUTOTUNE_SLO": "e2e_p90<2s, kl_mean<0.1"}).slo == ("e2e_p90<2s", "kl_mean<0.1")
    with pytest.raises(PlanError, match=r"--slo: .*did you mean ttft_p99"):
        resolve({"slo": ("tftt_p99<1s",)}, {})
    with pytest.raises(PlanError, match="slo wants a list"):
        resolve({"slo": 3}, {})


@pytest.mark.parametrize(("text", "expected"), [("2h", 7200), ("1h30m", 5400), ("90s", 90), ("45", 45), ("", 0)])
def test_a_duration_is_read_in_any_unit(text: str, expected: float) -> None:
    assert seconds(text) == expected
    assert resolve({"time": text}, {}).time == text


@pytest.mark.parametrize("text", ["soon", "2 fortnights", "-3h", "0s"])
def test_a_wrong_duration_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="--time: time "):
        resolve({"time": text}, {})
