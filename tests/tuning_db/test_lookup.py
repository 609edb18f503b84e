"""Lookup: the nearest confirmed scenario with every difference named, and never a number that failed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from contracts.records import make_scenario, make_trial
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import event

from tuning_db import Hardware, open_store
from tuning_db.distance import TIERS, tier, total
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
    assert list(matches(store, HERE)) == []
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
        ("driver", "565.1", "stale"),
        ("cuda", "12.4", "stale"),
        ("driver", "575", "far"),
        ("cuda", "13.0", "far"),
        ("driver", None, "stale"),
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
        ({"engine_build": {"version": "0.9", "torch": "2.9"}}, "engine.version", "stale"),
        ({"engine_build": {"version": "1.1", "torch": "2.9"}}, "engine.version", "far"),
        ({"engine_build": {"version": "1.0", "torch": "2.9+cu128"}}, "engine.torch", "stale"),
        ({"engine_build": {"version": "1.0"}}, "engine.torch", "stale"),
        ({"model": {"name": "small", "digest": "other"}}, "model.digest", "far"),
        ({"workload": {"name": "chat", "requests": 9}}, "workload.requests", "near"),
        ({"workload": {"name": "long", "requests": 8}}, "workload.name", "far"),
        ({"objective": {"name": "latency"}}, "objective.name", "exact"),
    ],
)
def test_every_part_of_the_question_is_compared(store, change, field, tier):
    _confirm(store, replace(HERE, **change))
    (found,) = matches(store, HERE)
    assert (found.tier, [difference.field for difference in found.differs]) == (tier, [field])


def test_the_nearest_comes_first_with_its_distance(store):
    _confirm(store, _on(count=8))
    _confirm(store, _on(driver="560", cuda="12.4"))
    _confirm(store, _on(driver="560"))
    _confirm(store, _on(links="PIX"))
    _confirm(store, replace(HERE, workload={"name": "chat", "requests": 16}))
    _confirm(store, replace(HERE, workload={"name": "chat", "requests": 9}))
    found = list(matches(store, HERE))
    assert [(m.tier, m.distance) for m in found] == [
        ("near", 1.0),
        ("near", 4.0),
        ("near", 4.0),
        ("stale", 1.0),
        ("stale", 2.0),
        ("far", 20.0),
    ]
    assert found[3].differs[0].sentence() == "hardware.driver 570 here, 560 there (older)"
    _confirm(store, HERE)
    first = next(matches(store, HERE))
    assert (first.tier, first.distance, first.differs) == ("exact", 0, ())


def test_the_same_objective_comes_first_among_exact_ones(store):
    _confirm(store, replace(HERE, objective={"name": "latency"}))
    _confirm(store, HERE)
    _confirm(store, replace(HERE, objective={"name": "memory"}))
    assert next(matches(store, HERE)).scenario.objective["name"] == "throughput"
    assert {m.tier for m in matches(store, HERE)} == {"exact"}


def test_a_new_limit_is_applied_to_what_is_stored(store):
    for block in range(3):
        _confirm(store, HERE, "c1:fast", 300, block=block, seed=900)
        _confirm(store, HERE, "c1:middle", 200, block=block, seed=400)
        _confirm(store, HERE, "c1:slow", 100, block=block, seed=100)
    asked = []

    def within(limit):
        def meets(trials):
            asked.append(trials[0].config_key)
            assert len(trials) == 3
            return all(trial.seed <= limit for trial in trials)

        return meets

    found = [store.best(HERE, goodness, within(limit)) for limit in (1000, 500, 200)]
    assert [(best.config_key, best.refused) for best in found] == [("c1:fast", 0), ("c1:middle", 1), ("c1:slow", 2)]
    assert asked == ["c1:fast", "c1:fast", "c1:middle", "c1:fast", "c1:middle", "c1:slow"]
    assert store.best(HERE, goodness, within(0)) is None


def test_an_answer_that_misses_the_limit_gives_way_to_the_next_scenario(store):
    _confirm(store, HERE, "c1:here", 300, seed=900)
    _confirm(store, _on(links="PIX"), "c1:there", 100, seed=100)
    found = store.best(HERE, goodness, lambda trials: trials[0].seed < 500)
    assert (found.config_key, found.match.tier) == ("c1:there", "near")


facts = st.fixed_dictionaries(
    {
        "product": st.sampled_from(["NVIDIA A100-SXM4-80GB", "NVIDIA H100"]),
        "memory_bytes": st.sampled_from([40 << 30, 80 << 30]),
        "count": st.sampled_from([1, 4, 8]),
        "compute_capability": st.sampled_from(["8.0", "9.0"]),
        "mig_profile": st.sampled_from(["off", "3g.40gb", None]),
        "links": st.sampled_from(["none", "NVSwitch", "PIX", None]),
        "power_limit_w": st.sampled_from([300, 400, None]),
        "driver": st.sampled_from(["560", "570"]),
        "cuda": st.sampled_from(["12.4", "12.8"]),
    }
)
builds = st.fixed_dictionaries({"version": st.sampled_from(["1.0", "1.1"]), "torch": st.sampled_from(["2.9", "2.10"])})
machines = st.builds(Hardware, st.just("gpu"), facts, st.sampled_from(["one", "two"]))


@given(machines, machines, builds, builds)
def test_only_machines_and_builds_that_are_the_same_in_everything_share_a_key(ours, theirs, build, other):
    here = replace(HERE, hardware=ours, engine_build=build)
    there = replace(HERE, hardware=theirs, engine_build=other)
    unknown = None in ours.facts.values()
    same_machine = ours.facts == theirs.facts and (not unknown or ours.host == theirs.host)
    assert (ours.key == theirs.key) == same_machine
    assert (here.measured_key == there.measured_key) == (same_machine and build == other)
    found = differences(here, there)
    assert (found == ()) == (same_machine and build == other)
    assert (tier(found, ours.loose == theirs.loose) == "exact") == (found == ())
    assert total(found) > 0 or not found
    assert total(found) == pytest.approx(total(differences(there, here)))


@given(st.lists(st.tuples(facts, builds, st.integers(1, 64)), min_size=1, max_size=6), facts, builds)
@settings(max_examples=25, deadline=None)
def test_the_first_match_is_the_nearest_of_all(tmp_path_factory, stored, here, build):
    wanted = replace(HERE, hardware=Hardware("gpu", here, "one"), engine_build=build)
    with open_store(tmp_path_factory.mktemp("db") / "tuning.db") as store:
        for there, other, requests in stored:
            workload = {"name": "chat", "requests": requests}
            _confirm(
                store, replace(HERE, hardware=Hardware("gpu", there, "two"), engine_build=other, workload=workload)
            )
        found = list(matches(store, wanted))
        assert len(found) == len(store.scenarios())
        order = [(TIERS.index(m.tier), m.distance) for m in found]
        assert order == sorted(order)
        for match in found:
            named = differences(wanted, match.scenario)
            assert match.differs == named and {d.field for d in named} == {d.field for d in match.differs}


def test_hundreds_of_scenarios_are_ranked_without_reading_them_all(store):
    for number in range(300):
        store.ensure(_on(driver=f"5{number % 10}", links=f"L{number}", power_limit_w=number))
    _confirm(store, _on(driver="50", links="L", power_limit_w=401))
    statements = []
    event.listen(store.engine, "before_cursor_execute", lambda *parts: statements.append(parts[2]))
    ranked = matches(store, replace(HERE, hardware=Hardware("gpu", {**A100, "driver": "50", "links": "L"})))
    assert next(ranked).tier == "near"
    assert len(statements) < 20


def test_another_engine_or_model_is_no_match(store):
    _confirm(store, replace(HERE, engine="vllm"))
    _confirm(store, replace(HERE, model={"name": "large", "digest": "abc"}))
    assert list(matches(store, HERE)) == []


def test_hardware_alone_finds_every_scenario_of_it(store):
    _confirm(store, HERE)
    _confirm(store, replace(HERE, engine="vllm"))
    assert [m.tier for m in matches(store, HERE.hardware)] == ["exact", "exact"]
    assert [m.scenario.engine for m in matches(store, HERE.hardware, engine="vllm")] == ["vllm"]
    assert list(matches(store, HERE.hardware, model="large")) == []
    found = best(store, HERE.hardware, goodness, engine="native", workload="chat")
    assert found is not None and found.match.scenario == HERE
