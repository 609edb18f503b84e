"""The surrogate ranks points as a known function does, avoids what failed, and learns which distances matter."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from autotune.candidates import distances
from autotune.surrogate import Surrogate
from search_spaces import Choice, Knob, Pow2

SIZES = Knob("size", "cache", Choice((16, 24, 32, 48, 64, 96, 128), ordered=True), 16, ".")
KIND = Knob("kind", "cache", Choice(("a", "b", "c")), "a", ".")
POINTS = np.array(list(itertools.product(range(7), range(3))), np.intp)


def learned(values: np.ndarray, failed: np.ndarray, some: np.ndarray) -> Surrogate:
    surrogate = Surrogate([distances(SIZES), distances(KIND)], seed=1)
    surrogate.fit(POINTS[some], values[some], failed[some], steps=60)
    return surrogate


def test_the_greatest_improvement_is_expected_where_the_function_is_greatest() -> None:
    values = -np.abs(POINTS[:, 0] - 4.0) - (POINTS[:, 1] != 2)
    some = np.array([i for i in range(21) if i not in (14, 13, 5)])  # 14 is the optimum
    left = POINTS[[14, 13, 5]]
    gain = learned(values, np.zeros(21, bool), some).improvement(left)
    assert gain.argmax() == 0


def test_surroundings_of_failures_are_expected_to_gain_less() -> None:
    values, some = np.zeros(21), np.arange(0, 21, 2)
    values[4] = 1.0
    left = np.delete(POINTS, some, axis=0)
    whole = learned(values, np.zeros(21, bool), some).improvement(left)
    broken = learned(values, POINTS[:, 1] == 2, some).improvement(left)
    assert (broken[left[:, 1] == 2] / whole[left[:, 1] == 2]).mean() < (broken / whole)[left[:, 1] == 0].mean()


def test_improvement_is_positive_and_finite_far_from_and_at_the_data() -> None:
    surrogate = learned(np.linspace(0, 1, 21), np.zeros(21, bool), np.arange(5))
    gain = surrogate.improvement(POINTS)
    assert np.isfinite(gain).all()
    assert (gain > 0).all()


def test_two_points_are_needed() -> None:
    with pytest.raises(ValueError, match="at least two points"):
        Surrogate([distances(KIND)], 0).fit(POINTS[:1, :1], np.zeros(1), np.zeros(1, bool), 1)


def test_distances_know_order_scale_and_whole_powers_of_two() -> None:
    near, whole = distances(SIZES)
    assert near[0, 1] < near[0, 6] <= 1
    assert near.shape == whole.shape == (8, 8)
    assert whole[0, 2] == 0  # 16 and 32
    assert whole[0, 1] == 1  # 16 and 24
    assert (near[7, :7] == 1).all()  # inactive
    assert np.array_equal(near, near.T)
    assert len(distances(KIND)) == len(distances(Knob("p", "cache", Pow2(1, 64), 1, "."))) == 1
