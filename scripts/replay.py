"""Replays one search on a measured table: what an evaluation gives, what it costs, how good the search stands after it.

The rules are the same for every searcher: a measured or failed configuration is one evaluation; a repeated one and one
that breaks a declared rule are free. The searcher sees one recorded block, drawn by seed and configuration; it is
scored by the table's median of the best among the FINALISTS that it saw do best: what confirming them would find.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from enum import Enum

from tables import Codes, Table

FINALISTS = 8


class Spent(Exception):
    """The budget is used up: the end of a replay, whatever the searcher had in mind."""


class Refused(Enum):
    """What a searcher hears in place of a value."""

    FAILED = "failed"
    INVALID = "invalid"


@dataclass(slots=True)
class Replay:
    """``budget`` distinct evaluations on ``table``. ``curve`` is the score after each: fraction of the optimum."""

    table: Table
    seed: int
    budget: int
    curve: list[float] = field(default_factory=list)
    heard: dict[Codes, float | None] = field(default_factory=dict)
    _leaders: list[tuple[float, float]] = field(default_factory=list)
    _optimum: float = 0.0

    def __post_init__(self) -> None:
        self._optimum = self.table.optimum()

    def measure(self, codes: Codes) -> float | Refused:
        """Goodness of a drawn block (log scale, higher is better), or why there is none. Raises Spent at the end."""
        if codes not in self.table.blocks:
            return Refused.INVALID
        if codes not in self.heard:
            if len(self.heard) >= self.budget:
                raise Spent
            value = self.heard[codes] = self._draw(codes)
            true = self.table.true(codes)
            if value is not None and true is not None:
                self._leaders = sorted([*self._leaders, (value, true)], reverse=True)[:FINALISTS]
            best = max((true for _, true in self._leaders), default=-math.inf)
            self.curve.append(math.exp(best - self._optimum))
        value = self.heard[codes]
        return Refused.FAILED if value is None else value

    def _draw(self, codes: Codes) -> float | None:
        blocks = self.table.blocks[codes]
        return self.table.goodness(random.Random(f"{self.seed}/{codes}").choice(blocks)) if blocks else None

    def unseen(self, source: random.Random) -> Codes:
        """A valid configuration not measured yet. Raises Spent when there is none."""
        left = [codes for codes in self.table.blocks if codes not in self.heard]
        if not left or len(self.heard) >= self.budget:
            raise Spent
        return source.choice(left)
