"""The highest load that keeps the SLOs is found from any start in few steps, and not above a load that failed."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.capacity import FINE, Step, highest, ladder
from autotune.slo import Finding, State, parse

SLO = parse("ttft_p99<500ms")


def knee(limit: float, count: int = 1000) -> object:
    """An engine whose latency passes the limit above ``limit``."""

    def measure(load: float) -> Step:
        state = State.NOT_MET if load > limit else State.MET if count >= 459 else State.UNPROVEN
        return Step(load, (Finding(SLO, state, load, count),))

    return measure


@given(limit=st.floats(0.01, 1000), start=st.floats(0.01, 1000))
def test_the_knee_is_found_to_a_tenth(limit: float, start: float) -> None:
    steps = list(ladder(knee(limit), start, 40))  # type: ignore[arg-type]
    best = highest(steps)
    assert best is not None and best.load <= limit < best.load * (1 + FINE) * (1 + 1e-9)
    assert len(steps) <= abs(math.log2(limit / start)) + 7


@given(limit=st.integers(1, 500), start=st.integers(1, 64))
def test_whole_loads_are_found_to_one_or_a_tenth(limit: int, start: int) -> None:
    steps = list(ladder(knee(limit), start, 40, whole=True))  # type: ignore[arg-type]
    best = highest(steps)
    assert best is not None and best.load == int(best.load) and best.load <= limit
    assert limit <= max(best.load * (1 + FINE), best.load)
    assert len({step.load for step in steps}) == len(steps)


def test_it_ends_within_its_steps_and_says_when_no_load_will_do() -> None:
    never = list(ladder(knee(0.0), 4, 6))  # type: ignore[arg-type]
    assert [step.load for step in never] == [4, 2, 1, 0.5, 0.25, 0.125] and highest(never) is None
    assert highest(list(ladder(knee(0.0), 4, 20, whole=True))) is None  # type: ignore[arg-type]
    assert len(list(ladder(knee(math.inf), 1, 5))) == 5  # type: ignore[arg-type]


def test_a_load_kept_above_one_that_failed_is_not_claimed() -> None:
    fine, bad = (Finding(SLO, state, 0.1, 1000) for state in (State.MET, State.NOT_MET))
    steps = [Step(1, (fine,)), Step(2, (bad,)), Step(4, (fine,)), Step(8, (), "crash: gone")]
    best = highest(steps)
    assert best is not None and best.load == 1 and best.proven
    assert not Step(1, (), "crash").kept


@pytest.mark.parametrize(("count", "proven"), [(36, False), (459, True)])
def test_few_requests_prove_nothing(count: int, proven: bool) -> None:
    best = highest(list(ladder(knee(3.0, count), 1)))  # type: ignore[arg-type]
    assert best is not None and best.proven is proven
