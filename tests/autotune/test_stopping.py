"""Stopping objects: when enough is enough, and what a time limit leaves unmet."""

from __future__ import annotations

from autotune.stopping import Count, HalfWidth, Within


def fed(stop, values):
    for value in values:
        stop.add(value)
    return stop


def test_a_count_is_met_by_so_many_values() -> None:
    assert not fed(Count(3), [1, 1]).done() and fed(Count(3), [1, 1, 1]).done()
    assert "2 of at least 3" in fed(Count(3), [1, 1]).unmet()


def test_a_half_width_wants_a_narrow_interval_from_enough_values() -> None:
    assert fed(HalfWidth(0.02), [100, 100.1, 99.9]).done()
    wide = fed(HalfWidth(0.02), [100, 120, 80])
    assert not wide.done() and "wanted ±2.0%" in wide.unmet()
    assert not fed(HalfWidth(0.02), [100, 100]).done()
    assert not fed(HalfWidth(0.02), [0, 0, 0]).done()


def test_a_time_limit_ends_it_and_says_what_was_unmet() -> None:
    now = [0.0]
    stop = Within(10.0, [Count(2), HalfWidth(0.01)], clock=lambda: now[0])
    fed(stop, [100.0, 150.0])
    assert not stop.done()
    now[0] = 11.0
    assert stop.done()
    assert "the time limit of 10 s left unmet" in stop.unmet() and "of at least 2" not in stop.unmet()
    assert fed(Within(10.0, [Count(1)], clock=lambda: 0.0), [1.0]).unmet() == ""
