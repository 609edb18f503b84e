"""Identity: what is the same, what never is, and that released digests do not move."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from contracts.records import make_scenario
from hypothesis import given, settings
from hypothesis import strategies as st

from tuning_db import Hardware, canonical, digest, new_id
from tuning_db.canonical import plain, quick

A100 = {
    "product": "NVIDIA A100-SXM4-80GB",
    "memory_bytes": 85_899_345_920,
    "count": 4,
    "compute_capability": "8.0",
    "mig_profile": "off",
    "links": "NVSwitch",
    "power_limit_w": 400,
    "driver": "570.86",
    "cuda": "12.8",
}
LOOSE = ("product", "memory_bytes", "count", "compute_capability")

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"])),
    lambda part: st.lists(part, max_size=3) | st.dictionaries(st.text("abäz ", max_size=4), part, max_size=3),
    max_leaves=8,
)


def test_released_digests_do_not_move():
    assert digest("x1", {"b": [1, 2.5, None, True], "a": 'é"\n', "z": 1e-7}) == "x1:a49d689bfbe99afa446cada253029945"
    assert Hardware("gpu", A100).key == "h1:6ae16773f263de791063d22095499498"
    assert Hardware("gpu", A100).loose == "hl1:315c30a16b1ad221a002a2e859c5fbea"
    assert make_scenario().key == "s1:703efb11100a64f4cd803aac6a362155"
    assert make_scenario().measured_key == "m1:0823e99db710db8357f4339ce32c88b0"
    assert make_scenario().engine_key == "e1:f0edce03f0325059d0fb58a43bce4837"
    assert make_scenario().model_key == "md1:d499e418baf17245125cb27ec5d1087c"
    assert make_scenario().workload_key == "w1:0e4e8bee07b5cb50662e89811fae233b"
    assert make_scenario().subject_key == "u1:c898dda59dab2d365565bd5a0f983f46"


def test_canonical_json_is_sorted_dense_and_exact():
    value = {"b": (1, 1.0, -0.0, 1e16), "a": {"é": "e\u0301", "A": None}}
    assert canonical(value) == '{"a":{"A":null,"é":"e\u0301"},"b":[1,1.0,0.0,1e+16]}'.encode()


@given(json_values)
def test_canonical_json_does_not_depend_on_the_order_of_keys(value):
    def turned(part):
        if isinstance(part, dict):
            return {key: turned(part[key]) for key in reversed(part)}
        return [turned(item) for item in part] if isinstance(part, list) else part

    assert canonical(turned(value)) == canonical(value)


class Word(str):
    pass


@given(
    json_values
    | st.sampled_from([(1, [2]), {"a": -0.0}, {"a": Word("b")}, {1: 2}, {"a": "\x00"}, ["\ud800"], float("nan")])
)
def test_the_quick_way_gives_the_same_text_or_none(value):
    text = quick(value)
    if text is not None:
        assert text == canonical(value).decode() and json.loads(text) == json.loads(json.dumps(plain(value)))
        assert text == json.dumps(plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False)


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), {1: 2}, object(), b"x", "\ud800", "\x00", {"a": {"\x00": 1}}, {1, 2}]
)
def test_what_json_lacks_has_no_digest(value):
    with pytest.raises(ValueError):
        canonical({"part": value})


def test_a_value_that_contains_itself_has_no_digest():
    value: list[object] = []
    value.append(value)
    with pytest.raises(ValueError, match="contains itself"):
        canonical(value)


@pytest.mark.parametrize("fact", A100)
def test_every_fact_that_differs_makes_another_machine(fact):
    ours, theirs = Hardware("gpu", A100), Hardware("gpu", {**A100, fact: "other"})
    assert ours.key != theirs.key
    assert (ours.loose == theirs.loose) == (fact not in LOOSE)


@pytest.mark.parametrize("fact", A100)
def test_an_unknown_fact_equals_no_other_machines(fact):
    facts = {**A100, fact: None}
    ours = Hardware("gpu", facts, host="one")
    assert ours.key == Hardware("gpu", facts, host="one").key
    assert ours.key != Hardware("gpu", facts, host="two").key
    assert ours.key != Hardware("gpu", A100, host="one").key


def test_the_same_known_facts_are_the_same_machine_wherever_they_were_read():
    assert Hardware("gpu", A100, host="one").key == Hardware("gpu", dict(reversed(A100.items())), host="two").key


def test_a_cpu_and_a_gpu_with_the_same_facts_differ():
    assert Hardware("cpu", A100).key != Hardware("gpu", A100).key


@pytest.mark.parametrize(
    ("hardware", "label"),
    [
        (Hardware("gpu", A100), "4xA100-SXM4-80GB"),
        (Hardware("gpu", {**A100, "count": 1, "mig_profile": "3g.40gb"}), "1xA100-SXM4-80GB MIG 3g.40gb"),
        (Hardware("cpu", {"cpu_model": "Intel(R) Xeon(R) CPU @ 2.20GHz", "cores": 2}), "2-core Intel Xeon"),
        (Hardware("cpu", {"cpu_model": "AMD EPYC 7B13", "cores": 64}), "64-core AMD EPYC 7B13"),
        (Hardware("gpu", {}), "?xunknown GPU"),
    ],
)
def test_machines_have_a_short_name(hardware, label):
    assert hardware.label == label


@pytest.mark.parametrize("part", ["engine_build", "model", "workload", "objective"])
def test_every_part_of_a_scenario_counts(part):
    one = make_scenario()
    two = replace(one, **{part: {**getattr(one, part), "more": 1}})
    assert one.key != two.key
    assert (one.measured_key == two.measured_key) == (part == "objective")


@pytest.mark.parametrize(
    ("part", "key"), [("engine_build", "engine_key"), ("model", "model_key"), ("workload", "workload_key")]
)
def test_a_part_changes_its_own_key_alone(part, key):
    one = make_scenario()
    two = replace(one, **{part: {**getattr(one, part), "more": 1}})
    names = ("engine_key", "model_key", "workload_key", "subject_key")
    assert [name for name in names if getattr(one, name) != getattr(two, name)] == [key]
    assert replace(one, engine="other").engine_key != one.engine_key


def test_engine_and_hardware_count():
    one = make_scenario()
    assert one.key != replace(one, engine="other").key
    assert one.key != replace(one, hardware=Hardware("gpu", A100)).key


@settings(max_examples=20)
@given(st.integers(2, 300))
def test_ids_are_unique_and_in_order(count):
    ids = [new_id() for _ in range(count)]
    assert ids == sorted(set(ids))
    assert all(len(ident) == 20 for ident in ids)


def test_importing_the_package_loads_no_database_library():
    heavy = ("sqlalchemy", "alembic", "numpy", "platformdirs")
    code = f"import sys, tuning_db; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
