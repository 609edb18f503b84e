"""The configurations a search may choose from, as rows of value indices: all of a small space, a growing part of a
large one. Knows what is valid and what lies next to what; nothing of results.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from search_spaces import Config, Knob, Space, Value

ENUMERABLE = 20_000
"""Spaces up to this size are listed whole, so that "all measured" can be known."""
SCATTER = 500
"""Random valid configurations that a large space's pool starts from."""
GROWTH = 20
"""Changes of two knobs tried around the best before each choice in a large space."""
CAPACITY = 6_000

Row = tuple[int, ...]
Rows = NDArray[np.intp]


class Pool:
    """Valid configurations of ``space`` without those that are ``dropped``. An inactive knob has a code of its own."""

    def __init__(self, space: Space, seed: int) -> None:
        self._space = space
        self._free = space.free()
        self._codes = [{_code(v): i for i, v in enumerate(knob.domain.values)} for knob in self._free]
        column = {knob.name: number for number, knob in enumerate(self._free)}
        self._plan = [(k.name, k.when, column.get(k.name), k.domain.values, k.default) for k in space.knobs]
        self._sizes = [knob.domain.size for knob in self._free]
        self._names = [knob.name for knob in self._free]
        self._defaults = [codes[_code(knob.default)] for knob, codes in zip(self._free, self._codes, strict=True)]
        self._random = random.Random(f"pool/{seed}")
        self._dropped: set[Row] = set()
        self.whole = space.size() <= ENUMERABLE
        self._start()

    def _start(self) -> None:
        self._index: dict[Row, int] = {}
        self._spread: set[Row] = set()
        self._rows: Rows = np.zeros((0, len(self._free)), np.intp)
        if self.whole:
            self._add(itertools.product(*(range(knob.domain.size) for knob in self._free)))
        else:
            self._add(self._anywhere() for _ in range(SCATTER))

    @property
    def rows(self) -> Rows:
        """(configurations, free knobs)."""
        if len(self._rows) < len(self._index):
            new = list(itertools.islice(self._index, len(self._rows), None))
            self._rows = np.concatenate([self._rows, np.array(new, np.intp)])
        return self._rows

    def left(self) -> NDArray[np.bool_]:
        """(configurations,): which were not dropped."""
        mask = np.ones(len(self._index), bool)
        mask[[self._index[row] for row in self._dropped if row in self._index]] = False
        return mask

    def config(self, row: Iterable[int]) -> Config:
        return Config(self._values(row))

    def row(self, config: Mapping[str, Value]) -> Row | None:
        """The codes of ``config``; None when it has a value that the space does not."""
        found = []
        for knob, codes in zip(self._free, self._codes, strict=True):
            code = codes.get(_code(config[knob.name])) if knob.name in config else knob.domain.size
            if code is None:
                return None
            found.append(code)
        return tuple(found)

    def drop(self, row: Row) -> None:
        """Offer this one no more."""
        self._dropped.add(row)

    def grow(self, best: Sequence[Row]) -> None:
        """In a large space, take in what is one knob away from ``best``, and some of what is two away."""
        if self.whole or not best:
            return
        if len(self._index) > CAPACITY:
            self._start()
        for row in best:
            if row not in self._spread:
                self._spread.add(row)
                self._add(_changed(row, knob, code) for knob, code in self._steps())
        for _ in range(GROWTH):
            row = self._random.choice(best)
            for knob in self._random.sample(range(len(row)), 2):
                row = _changed(row, knob, self._random.randrange(self._free[knob].domain.size))
            self._add([row])

    def scattered(self, count: int) -> list[Row]:
        """Up to ``count`` random configurations that were not dropped."""
        if not self.whole:
            self._add(self._anywhere() for _ in range(count))
        rows = self.rows[self.left()]
        picks = self._random.sample(range(len(rows)), min(count, len(rows)))
        return [tuple(map(int, rows[i])) for i in picks]

    def tables(self) -> list[list[NDArray[np.float64]]]:
        """Each free knob's distances between its values, for `surrogate.Surrogate`; see `distances`."""
        return [distances(knob) for knob in self._free]

    def _steps(self) -> Iterator[tuple[int, int]]:
        for number, knob in enumerate(self._free):
            for code in range(knob.domain.size):
                yield number, code

    def _anywhere(self) -> Row:
        return tuple(self._random.randrange(knob.domain.size) for knob in self._free)

    def _add(self, rows: Iterable[Row]) -> None:
        for given in rows:
            values = self._values(given)
            row = tuple(
                size if name not in values else code if code < size else default
                for name, size, code, default in zip(self._names, self._sizes, given, self._defaults, strict=True)
            )
            if row not in self._index and not self._space.broken(values):
                self._index[row] = len(self._index)

    def _values(self, row: Iterable[int]) -> dict[str, Value]:
        """Inactive knobs are left out; one that has just become active takes its default."""
        codes = tuple(row)
        chosen: dict[str, Value] = {}
        for name, when, column, values, default in self._plan:
            if when is None or when(chosen):
                code = codes[column] if column is not None else len(values)
                chosen[name] = values[code] if code < len(values) else default
        return chosen


def distances(knob: Knob) -> list[NDArray[np.float64]]:
    """Tables (values + 1) × (values + 1) in [0, 1]; the last value is "inactive", at distance 1 from all.

    The first is 1 between different values, for an ordered knob averaged with the distance on a log scale (linear
    where a value is not above 0). Where some values are powers of two and some not, a second one tells them apart:
    sizes that fill a wavefront, a tile or a page whole behave alike and unlike the others.
    """
    size = knob.domain.size
    different = 1 - np.eye(size + 1)
    numbers = [float(v) for v in knob.domain.values if isinstance(v, (int, float))]
    if not knob.domain.ordered or size < 3 or len(numbers) < size:
        return [different]
    places = np.array([math.log(v) for v in numbers] if min(numbers) > 0 else numbers)
    span = np.abs(places[:, None] - places[None, :]) / (places.max() - places.min())
    near = different.copy()
    near[:size, :size] = (near[:size, :size] + span) / 2
    whole = np.array([v > 0 and v.is_integer() and int(v).bit_count() == 1 for v in numbers])
    if whole.all() or not whole.any():
        return [near]
    kind = different.copy()
    kind[:size, :size] = whole[:, None] != whole[None, :]
    return [near, kind]


def _changed(row: Row, knob: int, code: int) -> Row:
    return (*row[:knob], code, *row[knob + 1 :])


def _code(value: Value) -> str:
    return json.dumps(value)
