"""How a trial ended: one status with a reason, never an infinity or a zero. Knows nothing of how it was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from autotune.metrics import Timeline


class Status(StrEnum):
    """Every way in which a trial can end."""

    OK = "ok"
    QUALITY = "quality"  # measured, but outside the quality gate
    FAILED_REQUESTS = "failed_requests"  # too many requests failed for the figures to mean anything
    NOT_APPLIED = "not_applied"  # the engine ran something other than what was asked
    UNSUPPORTED = "unsupported"  # the engine refuses this combination
    OOM = "oom"
    CRASH = "crash"
    TIMEOUT = "timeout"
    PRUNED = "pruned"  # given up part-way: whatever came, it would have been worse than the best so far
    INVALID = "invalid"  # a rule excludes it; nothing was launched
    BUSY = "busy"  # the machine's fault: port taken, device held by others, disk full
    INTERRUPTED = "interrupted"


FREE = frozenset({Status.INVALID, Status.BUSY, Status.INTERRUPTED})
"""Endings that say nothing about a configuration; they do not count against the budget."""


KEPT_LAUNCH = "kept_launch"
"""Counter of a trial on a kept launch: the peak of its memory is that of the whole launch."""


class EngineError(Exception):
    """A launch or a run that failed. ``phase``: launch, graphs (capturing them),
    warmup, measure or quality; ``tail``: the log's end."""

    def __init__(self, status: Status, phase: str, reason: str, tail: str = "") -> None:
        super().__init__(f"{phase}: {reason}")
        self.status = status
        self.phase = phase
        self.reason = reason
        self.tail = tail


@dataclass(frozen=True, slots=True)
class Outcome:
    """What measuring one configuration gave.

    ``metrics`` are in seconds, bytes and counts (see `metrics.METRICS`); ``seconds`` is our own cost by phase;
    ``effective`` is what the engine says it runs; ``counters`` are the engine's own counts. ``notes`` are sentences on
    how far the figures can be trusted; ``disturbed`` says why they cannot, empty when they can. ``bound`` is the best
    value of the objective that a pruned run could still have had.
    """

    status: Status
    reason: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    timelines: tuple[Timeline, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    effective: Mapping[str, Any] = field(default_factory=dict)
    counters: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    disturbed: str = ""
    bound: float | None = None

    @property
    def counted(self) -> bool:
        """Whether this ending spends one trial of the budget."""
        return self.status not in FREE
