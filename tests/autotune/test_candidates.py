"""The pool lists a small space whole, grows around the best in a large one, and offers only what is valid and new."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from autotune.candidates import CAPACITY, Pool
from search_spaces import Choice, Knob, Pow2, Rule, Space

RULE = Rule("r", "a and b must differ", lambda c, f: c["a"] == c["b"])


def small() -> Space:
    a, b = (Knob(name, "cache", Choice((0, 1, 2)), 0 if name == "a" else 1, ".") for name in "ab")
    extra = Knob("extra", "cache", Pow2(1, 4), 1, ".", when=lambda c: c["a"] == 1)
    return Space("small", (a, b, extra), (RULE,))


def large() -> Space:
    values = Choice((0, 1, 2, 3), ordered=True)
    a, b, *more = (Knob(name, "cache", values, i % 2, ".") for i, name in enumerate("abcdefgh"))
    return Space("large", (a, b, *more), (RULE,))


def test_a_small_space_is_listed_whole_without_what_rules_exclude_or_conditions_repeat() -> None:
    pool, space = Pool(small(), 0), small()
    listed = {pool.config(row).key for row in pool.rows}
    every = (space.complete({"a": a, "b": b, **({"extra": e} if a == 1 else {})})
             for a, b, e in itertools.product(range(3), range(3), (1, 2, 4)))  # fmt: skip
    assert listed == {config.key for config in every if not space.broken(config)}
    assert len(pool.rows) == len(listed) == 2 + 2 * 3 + 2


@given(st.integers(0, 10**6))
def test_rows_and_configurations_are_one_to_one(seed: int) -> None:
    pool = Pool(small(), seed)
    pool.whole = False  # as in a large space, where changes of one knob may wake another
    pool.grow(pool.scattered(3))
    for row in pool.scattered(30):
        assert pool.row(pool.config(row)) == row


def test_what_was_dropped_is_not_offered_again() -> None:
    pool = Pool(small(), 0)
    for row in pool.scattered(100):
        pool.drop(row)
    assert pool.scattered(100) == []
    assert not pool.left().any()


def test_a_value_that_the_space_lacks_has_no_row() -> None:
    assert Pool(small(), 0).row({"a": 9, "b": 1}) is None


def test_a_large_pool_takes_in_every_valid_neighbour_of_the_best_and_stays_bounded() -> None:
    space = large()
    pool = Pool(space, 3)
    best = pool.scattered(3)
    pool.grow(best)
    listed = {tuple(map(int, row)) for row in pool.rows}
    near = [near for row in best for near in space.neighbours(pool.config(row)) if not space.broken(near)]
    assert near
    assert {pool.row(config) for config in near} <= listed
    for _ in range(300):
        pool.grow(pool.scattered(3))
    assert len(pool.rows) < 2 * CAPACITY
    assert not any(space.broken(pool.config(row)) for row in pool.rows)
