"""Lookup: the nearest confirmed scenario with every difference named, and never a number that failed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from contracts.records import make_scenario, make_trial

from tuning_db import Hardware, open_store
from tuning_db.lookup import best, confirmed, differences, matches

A100 = {
    "product": "NVIDIA A100-SXM4-80GB",
    "memory_bytes": 80 << 30,
    "count": 4,
    "compute_capability": "8.0",
    "mig_profile": "off",
    "links": "NVSwitch",
    "power_limit_w": 400,
    "driver": "570",
    "cuda": "12.8",
}
HERE = make_scenario(hardware=Hardware("gpu", A100))


def goodness(metrics):
    return metrics.get("tokens_per_s")


@pytest.fixture
def store(tmp_path):
    with open_store(tmp_path / "tuning.db") as store:
        yield store


def _confirm(store, scenario, config="c1:a", speed=100.0, **changes):
    key = store.ensure(scenario)
    trial = make_trial(key, stage="confirm", config_key=config, metrics={"tokens_per_s": speed}, **changes)
    store.add(trial)
    return trial


def _on(**facts):
    return replace(HERE, hardware=Hardware("gpu", {**A100, **facts}))


def test_nothing_is_found_in_an_empty_database(store):
    assert matches(store, HERE) == []
    assert best(store, HERE, goodness) is None


def test_search_trials_are_never_an_answer(store):
    store.add(make_trial(store.ensure(HERE), metrics={"tokens_per_s": 1e9}))
    assert best(store, HERE, goodness) is None


def test_the_best_is_the_highest_median_of_confirming_runs(store):
    for block, (slow, fast) in enumerate([(90, 110), (200, 120), (95, 115)]):
        _confirm(store, HERE, "c1:slow", slow, block=block)
        _confirm(store, HERE, "c1:fast", fast, block=block)
    found = best(store, HERE, goodness)
    assert found is not None
    assert (found.config_key, found.value, found.match.tier, found.match.differs) == ("c1:fast", 115, "exact", ())
    assert [trial.metrics["tokens_per_s"] for trial in found.trials] == [110, 120, 115]


@pytest.mark.parametrize("status", ["quality", "crash", "oom", "not_applied"])
def test_a_configuration_that_failed_a_confirmation_is_out(store, status):
    _confirm(store, HERE, "c1:a", 100)
    _confirm(store, HERE, "c1:b", 900, block=0)
    _confirm(store, HERE, "c1:b", 900, block=1, status=status)
    found = best(store, HERE, goodness)
    assert found is not None and found.config_key == "c1:a"
    assert all(trial.status == "ok" for trial in confirmed(store, HERE.key))


def test_a_run_that_was_only_interrupted_does_not_count_against_it(store):
    _confirm(store, HERE, "c1:a", 100)
    _confirm(store, HERE, "c1:a", 100, status="interrupted", counted=False, block=1)
    assert len(confirmed(store, HERE.key)) == 1


def test_a_configuration_that_misses_the_objective_once_is_no_answer(store):
    _confirm(store, HERE, "c1:a", 100)
    assert best(store, HERE, lambda metrics: None) is None


@pytest.mark.parametrize(
    ("fact", "value", "tier"),
    [
        ("driver", "575", "stale"),
        ("cuda", "13.0", "stale"),
        ("links", "PIX", "near"),
        ("mig_profile", "3g.40gb", "near"),
        ("power_limit_w", 300, "near"),
        ("memory_bytes", 40 << 30, "far"),
        ("count", 8, "far"),
        ("product", "NVIDIA H100", "far"),
        ("compute_capability", "9.0", "far"),
        ("links", None, "near"),
        ("count", None, "far"),
    ],
)
def test_another_machine_is_never_exact_and_the_difference_is_named(store, fact, value, tier):
    _confirm(store, _on(**{fact: value}))
    (found,) = matches(store, HERE)
    assert found.tier == tier
    assert [difference.field for difference in found.differs] == [f"hardware.{fact}"]
    assert found.differs[0].want == A100[fact]


def test_two_unknown_facts_of_different_machines_differ(store):
    ours = replace(HERE, hardware=Hardware("gpu", {**A100, "links": None}, host="one"))
    theirs = replace(HERE, hardware=Hardware("gpu", {**A100, "links": None}, host="two"))
    assert [difference.field for difference in differences(ours, theirs)] == ["hardware.links"]
    assert differences(ours, ours) == ()


@pytest.mark.parametrize(
    ("change", "field", "tier"),
    [
        ({"engine_build": {"version": "1.1", "torch": "2.9"}}, "engine.version", "stale"),
        ({"engine_build": {"version": "1.0"}}, "engine.torch", "stale"),
        ({"model": {"name": "small", "digest": "other"}}, "model.digest", "near"),
        ({"workload": {"name": "chat", "requests": 9}}, "workload.requests", "near"),
        ({"objective": {"name": "latency"}}, "objective.name", "near"),
    ],
)
def test_every_part_of_the_question_is_compared(store, change, field, tier):
    _confirm(store, replace(HERE, **change))
    (found,) = matches(store, HERE)
    assert (found.tier, [difference.field for difference in found.differs]) == (tier, [field])


def test_the_nearest_comes_first(store):
    _confirm(store, _on(count=8))
    _confirm(store, _on(links="PIX"))
    _confirm(store, _on(driver="575", cuda="13"))
    _confirm(store, _on(driver="575"))
    assert [(m.tier, len(m.differs)) for m in matches(store, HERE)] == [
        ("stale", 1),
        ("stale", 2),
        ("near", 1),
        ("far", 1),
    ]
    _confirm(store, HERE)
    assert matches(store, HERE)[0].tier == "exact"


def test_another_engine_or_model_is_no_match(store):
    _confirm(store, replace(HERE, engine="vllm"))
    _confirm(store, replace(HERE, model={"name": "large", "digest": "abc"}))
    assert matches(store, HERE) == []


def test_hardware_alone_finds_every_scenario_of_it(store):
    _confirm(store, HERE)
    _confirm(store, replace(HERE, engine="vllm"))
    assert [m.tier for m in matches(store, HERE.hardware)] == ["exact", "exact"]
    assert [m.scenario.engine for m in matches(store, HERE.hardware, engine="vllm")] == ["vllm"]
    assert matches(store, HERE.hardware, model="large") == []
    found = best(store, HERE.hardware, goodness, engine="native", workload="chat")
    assert found is not None and found.match.scenario == HERE
