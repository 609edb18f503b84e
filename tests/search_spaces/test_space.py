"""Spaces narrow with reasons, complete and judge configurations, and never widen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_spaces import Choice, Config, Float, Int, Knob, Pow2, Rule, Space, SpaceError, load

FACTS: Mapping[str, Any] = {"cuda": False, "cores": 2, "layers": 4, "experts": 8, "longest": 900}
NATIVE = load("native").narrow(FACTS)


@st.composite
def configs(draw: st.DrawFn, space: Space = NATIVE) -> Config:
    return space.complete({k.name: draw(st.sampled_from(k.domain.values)) for k in space.free()})


def small() -> Space:
    return Space(
        "small",
        (
            Knob("mode", "graphs", Choice(("a", "b")), "a", "."),
            Knob("size", "cache", Pow2(1, 8), 4, ".", when=lambda c: c["mode"] == "b"),
            Knob("gpu", "layout", Int(1, 4), 2, ".", refuse=lambda v, f: "too many" if int(v) > f["gpus"] else ""),
        ),
        (Rule("sum", "size and gpu must differ", lambda c, f: c.get("size") == c["gpu"]),),
    )


def test_narrowing_keeps_the_reason_and_moves_a_refused_default() -> None:
    space = small().narrow({"gpus": 1})
    assert space.knob("gpu").domain.values == (1,)
    assert space.default()["gpu"] == 1
    assert {(r.knob, r.value, r.reason) for r in space.removals} == {("gpu", v, "too many") for v in (2, 3, 4)}
    with pytest.raises(SpaceError, match="too many"):
        space.complete({"gpu": 3})


def test_a_knob_without_any_value_left_is_an_error_with_the_reason() -> None:
    with pytest.raises(SpaceError, match="no value of gpu is possible here: too many"):
        small().narrow({"gpus": 0})


def test_inactive_knobs_are_no_part_of_a_configuration() -> None:
    space = small().narrow({"gpus": 4})
    left, right = space.complete({"size": 1}), space.complete({"size": 8})
    assert "size" not in left
    assert left == right
    assert space.complete({"mode": "b", "size": 1}) != space.complete({"mode": "b", "size": 8})


def test_rules_give_their_sentences() -> None:
    space = small().narrow({"gpus": 4})
    assert space.broken(space.complete({"mode": "b", "size": 2, "gpu": 2})) == ("size and gpu must differ",)
    assert space.broken(space.default()) == ()


def test_an_overlay_narrows_and_never_widens() -> None:
    space = small().narrow({"gpus": 2}).limit({"gpu": (1,)}, "the plan says so")
    assert space.knob("gpu").domain.values == (1,)
    with pytest.raises(SpaceError, match="gpu cannot be 4: too many"):
        small().narrow({"gpus": 2}).limit({"gpu": (4,)}, "plan")
    with pytest.raises(SpaceError, match="did you mean size"):
        space.limit({"sizes": (1,)}, "plan")
    with pytest.raises(SpaceError, match="no value is allowed"):
        space.limit({"mode": ()}, "plan")


def test_identity_of_a_configuration_is_pinned() -> None:
    assert Config({"b": 1, "a": "x"}).key == "c1:cdab067e9f3beb32d1252cfd63e49259"
    assert Config({"a": "x", "b": 1}).key == Config({"b": 1, "a": "x"}).key
    assert len({Config({"a": v}).key for v in (1, 1.0, True, "1")}) == 4


def test_domains() -> None:
    assert Pow2(16, 64).values == (16, 32, 64)
    assert Int(1, 5, 2).values == (1, 3, 5)
    assert Float(0.8, 0.9, 0.05).values == (0.8, 0.85, 0.9)
    assert Pow2(1, 8).neighbours(4) == (8, 2)
    assert Choice(("a", "b", "c")).neighbours("b") == ("a", "c")
    for wrong in (lambda: Choice(()), lambda: Choice((1, 1)), lambda: Pow2(3, 8), lambda: Int(5, 1)):
        with pytest.raises(ValueError):
            wrong()
    assert Choice((1, 1.0, True)).size == 3


def test_native_space_has_the_five_dimensions_and_a_default_that_runs() -> None:
    whole = load("native")
    assert {k.group for k in whole.knobs} >= {"attention", "bits", "layout", "graphs", "cache"}
    assert NATIVE.broken(NATIVE.default()) == ()
    assert {r.knob for r in NATIVE.removals} >= {"tp", "pp", "dp", "ep", "graphs", "threads"}
    assert all(k.sentence.endswith(".") for k in whole.knobs)
    with pytest.raises(SpaceError, match="unknown engine"):
        load("natve")


@given(configs())
def test_completing_a_configuration_is_idempotent_and_stays_in_the_space(config: Config) -> None:
    assert NATIVE.complete(config) == config
    for name, value in config.items():
        NATIVE.check(name, value)


@given(configs())
def test_neighbours_differ_in_one_chosen_knob(config: Config) -> None:
    conditional = {k.name for k in NATIVE.knobs if k.when}
    for near in NATIVE.neighbours(config):
        changed = {n for n in {*near, *config} if near.get(n) != config.get(n)}
        assert len(changed - conditional) <= 1
        assert changed


@given(configs())
def test_quality_part_holds_what_may_change_answers_and_nothing_else(config: Config) -> None:
    part = NATIVE.quality_part(config)
    assert set(part) == {k.name for k in NATIVE.knobs if k.quality and k.name in config}
    assert not set(part) & {"attention", "graphs", "max_seqs", "threads", "prefix_reuse", "tp"}
