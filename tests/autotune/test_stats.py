"""Intervals against published values, verdicts, and how often a confirmation errs on simulated noise."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.stats import Interval, Verdict, decide, interval, ratio, signed_rank, t_quantile, verdict


@pytest.mark.parametrize(
    ("p", "df", "value"),
    [(0.975, 1, 12.7062), (0.975, 4, 2.7764), (0.975, 30, 2.0423), (0.995, 6, 3.7074), (0.9, 10, 1.3722)],
)
def test_t_quantile_agrees_with_the_printed_table(p: float, df: int, value: float) -> None:
    assert t_quantile(p, df) == pytest.approx(value, abs=1e-4)


def test_interval_of_one_value_claims_nothing() -> None:
    assert interval([3.0]) == Interval(3.0, -math.inf, math.inf, 1)
    with pytest.raises(ValueError):
        interval([])


def test_interval_covers_the_true_mean_95_times_of_100() -> None:
    source = random.Random(1)
    hits = 0
    for _ in range(2000):
        found = interval([source.gauss(10, 2) for _ in range(6)])
        hits += found.low <= 10 <= found.high
    assert 0.935 <= hits / 2000 <= 0.965


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (1.05, 1.2, Verdict.BETTER), (0.8, 0.95, Verdict.WORSE), (0.99, 1.01, Verdict.SAME),
        (0.9, 1.1, Verdict.UNCLEAR), (1.001, 1.01, Verdict.SAME), (1.001, 1.2, Verdict.BETTER),
        (0, math.inf, Verdict.UNCLEAR),
    ],
)  # fmt: skip
def test_verdicts(low: float, high: float, expected: Verdict) -> None:
    assert verdict(Interval((low + high) / 2, low, high, 5)) is expected


@given(st.lists(st.floats(0.1, 100), min_size=2, max_size=8), st.booleans())
def test_ratio_of_a_series_to_itself_is_one_and_direction_inverts(values: list[float], higher: bool) -> None:
    mine = dict(enumerate(values))
    same = ratio(mine, mine, higher)
    assert same is not None and same.mean == pytest.approx(1.0)
    twice = ratio({b: 2 * v for b, v in mine.items()}, mine, higher)
    assert twice is not None and twice.mean == pytest.approx(2.0 if higher else 0.5)


def test_ratio_pairs_by_block_only() -> None:
    found = ratio({1: 10.0, 2: 20.0, 9: 1e9}, {1: 5.0, 2: 10.0, 8: 1e-9}, True)
    assert found is not None and found.n == 2 and found.mean == pytest.approx(2.0)
    assert ratio({1: 1.0}, {2: 1.0}, True) is None


def test_signed_rank_is_exact() -> None:
    assert signed_rank([1, 2, 3, 4]) == 1 / 16
    assert signed_rank([-1, 2, 3, 4]) == 2 / 16
    assert signed_rank([-1, -2, -3]) == 1.0
    assert signed_rank([0, 0]) == 1.0
    assert signed_rank([1, 1]) == 1 / 4


def noisy(source: random.Random, factors: dict[str, float], blocks: int = 7) -> dict[str, dict[int, float]]:
    """Throughputs with 3 % launch noise and a drift that all configurations of a block share."""
    drift = {b: source.gauss(1, 0.05) for b in range(blocks)}
    return {k: {b: 100 * f * drift[b] * source.gauss(1, 0.03) for b in drift} for k, f in factors.items()}


def test_equal_configurations_are_never_announced_as_better_more_than_one_time_in_ten() -> None:
    source = random.Random(2)
    verdicts = [decide(noisy(source, dict.fromkeys("dabc", 1.0)), "d", True) for _ in range(200)]
    wrong = sum(w is not None and w.verdict is Verdict.BETTER for w in verdicts)
    assert wrong <= 20
    assert all(w is not None and w.config_key == "d" for w in verdicts if w and w.verdict is not Verdict.BETTER)


def test_a_true_gain_of_15_percent_is_found_nine_times_in_ten() -> None:
    source = random.Random(3)
    found = [decide(noisy(source, {"d": 1.0, "a": 1.15, "b": 1.0, "c": 0.9}), "d", True) for _ in range(200)]
    assert sum(w is not None and w.config_key == "a" for w in found) >= 180


def test_a_finalist_dropped_early_does_not_win_on_few_blocks() -> None:
    blocks = {
        "d": {b: 100.0 + b for b in range(6)},
        "long": {b: 120.0 + b for b in range(6)},
        "short": {0: 200.0, 1: 201.0},
    }
    winner = decide(blocks, "d", True)
    assert winner is not None and winner.config_key == "long"
    assert decide({"d": {0: 1.0}}, "d", True) is None
