"""When enough has been measured: objects that take values one by one and say whether, and what is still unmet."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from autotune.stats import interval


class Stopping(Protocol):
    """``unmet`` says what is still missing, empty once `done` for want of nothing."""

    def add(self, value: float) -> None: ...

    def done(self) -> bool: ...

    def unmet(self) -> str: ...


@dataclass(slots=True)
class Count:
    """At least ``least`` values."""

    least: int
    seen: int = 0

    def add(self, value: float) -> None:
        self.seen += 1

    def done(self) -> bool:
        return self.seen >= self.least

    def unmet(self) -> str:
        return "" if self.done() else f"{self.seen} of at least {self.least} measurements"


@dataclass(slots=True)
class HalfWidth:
    """A 95 % interval of the mean whose half-width is at most ``relative`` of the mean, from ``least`` values on."""

    relative: float
    least: int = 3
    values: list[float] = field(default_factory=list)

    def add(self, value: float) -> None:
        self.values.append(value)

    def done(self) -> bool:
        return len(self.values) >= self.least and self._width() <= self.relative

    def _width(self) -> float:
        found = interval(self.values)
        return (found.high - found.mean) / abs(found.mean) if found.mean else float("inf")

    def unmet(self) -> str:
        if self.done():
            return ""
        if len(self.values) < 2:
            return f"no interval from {len(self.values)} measurements (wanted ±{self.relative:.1%})"
        return f"interval ±{self._width():.1%} after {len(self.values)} measurements (wanted ±{self.relative:.1%})"


@dataclass(slots=True)
class Within:
    """All of ``wanted``, but no longer than ``seconds`` from the first question on: then it ends all the same."""

    seconds: float
    wanted: Sequence[Stopping]
    clock: Callable[[], float] = time.monotonic
    start: float | None = None

    def __post_init__(self) -> None:
        self.start = self.clock() if self.start is None else self.start

    def add(self, value: float) -> None:
        for one in self.wanted:
            one.add(value)

    def over(self) -> bool:
        """Whether the time limit has passed."""
        return self.start is not None and self.clock() - self.start >= self.seconds

    def done(self) -> bool:
        return self.over() or all(one.done() for one in self.wanted)

    def unmet(self) -> str:
        """What the time limit cut off; empty when all was met."""
        missing = [words for one in self.wanted if (words := one.unmet())]
        return f"the time limit of {self.seconds:g} s left unmet: " + "; ".join(missing) if missing else ""
