"""The tuned meta-parameters of this process's kernels: of exactly this shape, else of the nearest, and which it was.

Measures nothing and knows no kernel: what an entry means is up to who asks for it.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from search_spaces import Value

ROWS = (1, 4, 16, 64, 256)
"""Activation rows at which products are tuned; other counts belong to the nearest, by ratio."""
NEAR = 2.0
"""Each size of a borrowed shape differs by less than this many doublings: beyond, the default is the better guess."""

Choice = Mapping[str, Value]
Entries = Mapping[str, Choice]
"""Meta-parameters by `Operator.key`: what is stored, exported and handed to an engine."""

_KEY = re.compile(r"([a-z0-9_]+)/([a-z0-9-]+)/(\d+)x(\d+)/(\d+)")


@dataclass(frozen=True, slots=True)
class Operator:
    """One product y = x Wᵀ of an engine: W [outputs, inputs], x [about ``rows``, inputs].

    ``dtype`` is the storage, its group, and the type of unpacked products: ``int8-bf16``, ``int4g64-fp32``, ``bf16``.
    """

    op: str
    dtype: str
    outputs: int
    inputs: int
    rows: int

    @property
    def backend(self) -> str:
        """Whose meta-parameters these are: the C kernels' of a stored weight, or those of the Triton kernel ``op``."""
        return "cpu" if self.op == "linear" else "triton"

    @property
    def key(self) -> str:
        return f"{self.op}/{self.dtype}/{self.outputs}x{self.inputs}/{self.rows}"

    @classmethod
    def parse(cls, key: str) -> Operator:
        """The operator of a key. Raises ValueError."""
        match = _KEY.fullmatch(key)
        if match is None:
            raise ValueError(f"{key!r} is no kernel of a tuned table; one is written linear/int8-bf16/512x256/16")
        return cls(match[1], match[2], *map(int, match.groups()[2:]))

    def distance(self, other: Operator) -> float:
        """Doublings between the sizes, summed; infinite for another op or type, and beyond `NEAR` in any size."""
        if (self.op, self.dtype) != (other.op, other.dtype) or min(other.outputs, other.inputs, other.rows) < 1:
            return math.inf
        pairs = ((self.outputs, other.outputs), (self.inputs, other.inputs), (self.rows, other.rows))
        apart = [abs(math.log2(mine / theirs)) for mine, theirs in pairs]
        return sum(apart) if max(apart) < NEAR else math.inf


class Table:
    """Entries, and in ``said`` for every operator asked for: ``tuned``, ``nearest <shape>`` or ``default``.

    Raises ValueError for a key that names no operator.
    """

    def __init__(self, entries: Entries) -> None:
        self.entries = {key: dict(entries[key]) for key in sorted(entries)}
        self._known = [Operator.parse(key) for key in self.entries]
        self._found: dict[Operator, Choice | None] = {}
        self.said: dict[str, str] = {}

    def find(self, wanted: Operator) -> Choice | None:
        """The tuned choice, None where there is none near enough; of equally near ones the first by name."""
        if not self._known:
            return None
        if wanted not in self._found:  # a kernel asks at each call
            self._found[wanted] = self._search(wanted)
        return self._found[wanted]

    def _search(self, wanted: Operator) -> Choice | None:
        near = min(self._known, key=lambda known: (wanted.distance(known), known.key))
        apart = wanted.distance(near)
        if math.isinf(apart):
            self.said[wanted.key] = "default"
            return None
        rows = "" if near.rows == wanted.rows else f", {near.rows} rows"
        self.said[wanted.key] = "tuned" if apart == 0 else f"nearest {near.outputs}x{near.inputs}{rows}"
        return self.entries[near.key]

    def by_rows(self, op: str, dtype: str, outputs: int, inputs: int) -> dict[int, Choice]:
        """The choices of one weight by the `ROWS` they are for; those without one are left out."""
        wanted = Operator(op, dtype, outputs, inputs, 0)
        found = {rows: self.find(replace(wanted, rows=rows)) for rows in ROWS}
        return {rows: choice for rows, choice in found.items() if choice is not None}


def bucket(rows: int) -> int:
    """The one of `ROWS` whose choice serves ``rows`` rows."""
    return min(ROWS, key=lambda known: abs(math.log2(known / max(rows, 1))))


def packed_rows(choices: Mapping[int, Choice], usual: int) -> list[tuple[int, Choice]]:
    """Which rows the packed product takes, and how it is built: (last row, choice) in ascending order.

    Where nothing is tuned the choice is empty and rows up to ``usual`` are taken. The first dense ones end it.
    """
    found: list[tuple[int, Choice]] = []
    for rows, following in zip(ROWS, (*ROWS[1:], 0), strict=True):
        last = math.isqrt(rows * following) if following else 1 << 31
        choice = choices.get(rows)
        if choice is None:
            if usual > (found[-1][0] if found else 0):
                found.append((min(last, usual), {}))
            if usual < last:
                break
        elif choice.get("path") == "packed":
            found.append((last, choice))
        else:
            break
    return found


def digest(entries: Entries) -> str:
    """``k1:…``, equal only for equal entries."""
    text = json.dumps(entries, sort_keys=True, separators=(",", ":"), default=dict)
    return "k1:" + hashlib.sha256(text.encode()).hexdigest()[:32]


_current = Table({})


def current() -> Table:
    """The table that weights made in this process are multiplied by."""
    return _current


def use(entries: Entries) -> Table:
    """Make ``entries`` this process's table. Weights made before keep what they took. Raises ValueError."""
    global _current
    _current = Table(entries)
    return _current
