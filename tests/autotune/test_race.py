"""The race of a confirmation on simulated noise: what enters, what is dropped, when it ends and how often it errs."""

from __future__ import annotations

import math
import random

from autotune import race, stats
from search_spaces import Config


def config(**values):
    return Config(values)


def test_near_copies_do_not_fill_the_race() -> None:
    base = {"a": 1, "b": 1, "c": 1}
    copies = [(1.0 - i * 1e-4, config(**{**base, "a": i})) for i in range(6)]
    other = (0.999, config(a=9, b=9, c=9))
    chosen = race.enter([*copies, other], 8)
    assert chosen == [*(c for _, c in copies[:3]), other[1]]
    assert len(race.enter([(1.0 - i * 0.1, config(**{**base, "a": i})) for i in range(6)], 8)) == 6
    assert len(race.enter([(1.0 - i * 0.1, config(**{**base, "a": i})) for i in range(6)], 2)) == 2


def run(source: random.Random, factors: dict[str, float], blocks: int = 15, noise: float = 0.02):
    """A race to its end: {key: {block: log value}} and the blocks that were run."""
    values: dict[str, dict[int, float]] = {key: {} for key in factors}
    finalists = [key for key in factors if key != "d"]
    for block in range(1, blocks + 1):
        kept = race.alive(values, finalists, block)
        if block > race.LEAST and race.settled(values, "d", kept, len(finalists)):
            return values, block - 1
        for key in ("d", *kept):
            values[key][block] = math.log(100 * factors[key]) + source.gauss(0, noise)
    return values, blocks


def decided(source: random.Random, factors: dict[str, float]) -> stats.Winner:
    values, _ = run(source, factors)
    raw = {key: {b: math.exp(v) for b, v in mine.items()} for key, mine in values.items()}
    winner = stats.decide(raw, "d", True)
    assert winner is not None
    return winner


def test_two_equal_configurations_are_the_same_or_unclear_nine_times_in_ten() -> None:
    source = random.Random(4)
    words = [decided(source, {"d": 1.0, "a": 1.0}).verdict for _ in range(100)]
    assert sum(word in ("same", "unclear") for word in words) >= 90


def test_of_eight_equal_finalists_none_is_announced_nine_times_in_ten() -> None:
    source = random.Random(5)
    words = [decided(source, dict.fromkeys("dabcefghi", 1.0)).verdict for _ in range(100)]
    assert sum(word == "better" for word in words) <= 10


def test_a_true_gain_of_ten_percent_is_found_nine_times_in_ten() -> None:
    source = random.Random(6)
    found = [decided(source, {"d": 1.0, "a": 1.1, "b": 1.0, "c": 0.95}) for _ in range(100)]
    assert sum(w.config_key == "a" and w.verdict == "better" for w in found) >= 90


def test_a_clear_race_ends_early_and_a_close_one_goes_on() -> None:
    source = random.Random(7)
    clear = [run(source, {"d": 1.0, "a": 1.5, "b": 1.1})[1] for _ in range(20)]
    close = [run(source, {"d": 1.0, "a": 1.03, "b": 1.02}, noise=0.04)[1] for _ in range(20)]
    assert sorted(clear)[10] <= 7 and max(clear) <= 15
    assert sorted(close)[10] > 10


def test_a_finalist_that_failed_a_block_is_out_and_nothing_left_ends_the_race() -> None:
    values = {"d": dict.fromkeys(range(1, 6), 1.0), "a": dict.fromkeys(range(1, 5), 2.0)}
    assert race.alive(values, ["a"], 5) == ["a"]
    assert race.alive(values, ["a"], 6) == []
    assert race.settled(values, "d", [], 1)
