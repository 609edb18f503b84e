"""Objectives of one metric or several, and the Pareto front."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.objective import Objective, ObjectiveError, front

POINT = st.fixed_dictionaries(
    {"output_tok_s": st.integers(1, 6).map(float), "ttft_p50": st.integers(1, 6).map(float)},
    optional={"kl_mean": st.integers(1, 6).map(float)},
)


def test_plain_words_stand_for_metrics() -> None:
    assert Objective("throughput, latency").metrics == ("output_tok_s", "e2e_p50")
    assert Objective("quality").metric == "kl_mean" and not Objective("quality").higher
    with pytest.raises(ObjectiveError, match="did you mean throughput"):
        Objective("thruput,latency")
    with pytest.raises(ObjectiveError, match="unknown metric ''"):
        Objective(",")


def test_a_tenth_in_one_is_worth_a_tenth_in_another() -> None:
    both = Objective("output_tok_s,ttft_p50")
    base = both.goodness({"output_tok_s": 100.0, "ttft_p50": 0.2})
    faster = both.goodness({"output_tok_s": 110.0, "ttft_p50": 0.2})
    sooner = both.goodness({"output_tok_s": 100.0, "ttft_p50": 0.2 / 1.1})
    assert base is not None and faster is not None and faster > base
    assert sooner == pytest.approx(faster)
    assert both.goodness({"output_tok_s": 100.0}) is None
    raw = both.raw({"output_tok_s": 100.0, "ttft_p50": 0.2})
    assert raw is not None and both.higher and math.log(raw) == pytest.approx(base)
    assert Objective(both.identity()["metric"]) == both


def test_a_divergence_of_nothing_is_as_good_as_can_be_measured() -> None:
    assert Objective("kl_mean").goodness({"kl_mean": 0.0}) == Objective("kl_mean").goodness({"kl_mean": 1e-5})


@given(st.dictionaries(st.text("abc", min_size=1), POINT, max_size=12), st.booleans())
def test_the_front_is_what_nothing_beats_and_everything_else_is_beaten(points, three: bool) -> None:
    names = ("output_tok_s", "ttft_p50", *(["kl_mean"] if three else []))
    found = front(points, names)
    whole = {k: (-p["output_tok_s"], *(p[n] for n in names[1:])) for k, p in points.items() if set(names) <= set(p)}

    def beaten(mine) -> bool:
        return any(all(a <= b for a, b in zip(o, mine, strict=True)) and o != mine for o in whole.values())

    assert set(found) == {key for key, mine in whole.items() if not beaten(mine)}
    assert bool(found) == bool(whole)
