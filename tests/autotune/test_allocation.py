"""The knapsack against every allocation, budgets by stage, and switches that measurement alone may accept."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune import allocation
from autotune.allocation import Costs, allocate, better, predicted, refine, size, switches

WIDTHS = (4, 8, 16)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Costs, float, dict[str, int]]:
    """Up to five groups on up to two stages; wider is larger, mostly better, never exactly regular."""
    costs = {}
    for index in range(draw(st.integers(1, 5))):
        weights, error = draw(st.integers(1, 1000)), draw(st.floats(1e-6, 1.0))
        costs[f"g{index}"] = {w: (weights * w / 8, error * draw(st.floats(0.5, 2.0)) / 4**w) for w in WIDTHS}
    share = draw(st.floats(0.0, 1.1))
    narrow, wide = (size(costs, dict.fromkeys(costs, w)) for w in (4, 16))
    stages = {group: draw(st.integers(0, 1)) for group in costs}
    return costs, narrow + share * (wide - narrow), stages


def every(costs: Costs):
    for chosen in itertools.product(*(sorted(c) for c in costs.values())):
        yield dict(zip(costs, chosen, strict=True))


@settings(deadline=None, max_examples=150)
@given(problems(), st.booleans())
def test_the_knapsack_is_as_good_as_trying_everything(problem, staged: bool) -> None:
    costs, budget, stages = problem
    parts = stages if staged else None
    fit = [w for w in every(costs) if size(costs, w, parts) <= budget * (1 + 1e-12)]
    found = allocate(costs, budget, parts)
    if not fit:
        assert found is None
        return
    assert found is not None and list(found) == list(costs)
    assert size(costs, found, parts) <= budget * (1 + 1e-9)
    assert predicted(costs, found) == pytest.approx(min(predicted(costs, w) for w in fit), rel=1e-9)


@settings(deadline=None, max_examples=50)
@given(problems(), st.integers(2, 30))
def test_rounding_when_there_are_many_sums_never_passes_the_budget(problem, states: int) -> None:
    costs, budget, _ = problem
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(allocation, "STATES", states)
        found = allocate(costs, budget)
    assert found is None or size(costs, found) <= budget * (1 + 1e-9)


@settings(deadline=None, max_examples=50)
@given(problems())
def test_a_larger_budget_never_costs_more(problem) -> None:
    costs, budget, _ = problem
    less, more = allocate(costs, budget), allocate(costs, 1.3 * budget)
    assert less is None or (more is not None and predicted(costs, more) <= predicted(costs, less) * (1 + 1e-12))


@settings(deadline=None, max_examples=50)
@given(problems())
def test_switches_stay_inside_and_change_one_up(problem) -> None:
    costs, budget, stages = problem
    now = allocate(costs, budget, stages)
    for other in switches(costs, now, budget, stages) if now else ():
        up = [g for g in costs if other[g] > now[g]]
        assert len(up) == 1 and sum(other[g] < now[g] for g in costs) <= 2
        assert size(costs, other, stages) <= budget


def test_what_the_prediction_misses_a_switch_finds() -> None:
    """Group b is said to be cheap to narrow, and together with c it is not."""
    costs = {g: {4: (4.0, kl), 8: (8.0, 0.0)} for g, kl in (("a", 0.03), ("b", 0.01), ("c", 0.02))}

    def whole(widths) -> np.ndarray:
        both = 0.5 * (widths["b"] == widths["c"] == 4)
        return np.array([predicted(costs, widths) + both])

    assert allocate(costs, 16.0) == {"a": 8, "b": 4, "c": 4}
    found = refine(costs, 16.0, whole, 10)
    assert found is not None and found.widths == {"a": 4, "b": 4, "c": 8} and found.evaluations <= 10
    spent = refine(costs, 16.0, whole, 1)
    assert spent is not None and spent.widths == {"a": 8, "b": 4, "c": 4} and spent.evaluations == 1
    assert refine(costs, 11.0, whole, 10) is None


def test_noise_is_no_improvement() -> None:
    noise = np.random.default_rng(1).normal(0, 0.01, 40)
    base = np.full(40, 0.1)
    assert not better(base, base + noise - noise.mean())
    assert better(base, base - 0.02 + noise) and not better(base, base + 0.02 + noise)
    assert better(np.array([0.2]), np.array([0.1])) and not better(np.array([0.2]), np.array([0.2]))
