"""Measures one configuration on a runtime under a workload: the only place where time is spent. Decides nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from autotune import loadgen
from autotune.metrics import Timeline, derive
from autotune.outcome import EngineError, Outcome, Status
from autotune.quality import TOP, Gate, Quality
from autotune.runtimes.base import Endpoint, Runtime, Score
from autotune.workload import Workload, build
from search_spaces import Config, Space

FAILED_LIMIT = 0.05
"""Share of failed requests above which a trial's figures mean nothing (they bend throughput and latency alike)."""


class Measuring(Protocol):
    """What a study needs of whatever measures its configurations: a `Bench`, or a `kernel_bench.KernelBench`."""

    @property
    def space(self) -> Space: ...

    @property
    def quality(self) -> Quality | None: ...

    @property
    def gate(self) -> Gate: ...

    def measure(self, config: Config, seed: int, name: str = "trial") -> Outcome: ...


@dataclass(frozen=True, slots=True)
class Bench:
    """Everything that all trials of a study share. ``source`` are the token ids that prompts are cut from."""

    runtime: Runtime
    space: Space
    workload: Workload
    source: Sequence[int]
    logs: Path
    quality: Quality | None = None
    gate: Gate = field(default_factory=Gate)
    deadline: float = 120.0

    def measure(self, config: Config, seed: int, name: str = "trial") -> Outcome:
        """Launch, warm up, measure, check quality; every failure becomes an Outcome with its phase and reason."""
        broken = self.space.broken(config)
        if broken:
            return Outcome(Status.INVALID, "; ".join(broken))
        clock = _Clock()
        outcome = Outcome(Status.OK)
        try:
            with ExitStack() as stack:
                with clock.phase("launch"):
                    endpoint = stack.enter_context(self.runtime.launch(config, self.logs / f"{name}.log"))
                outcome = self._run(endpoint, config, seed, clock)
        except EngineError as error:
            tail = f"\n{error.tail}" if error.tail else ""
            kept = error.run.timelines if isinstance(error, loadgen.TimeLimit) else ()
            reason = f"{error.phase}: {error.reason}{tail}"
            outcome = replace(outcome, status=error.status, reason=reason, timelines=kept)
        return replace(outcome, seconds=clock.seconds)

    def _run(self, endpoint: Endpoint, config: Config, seed: int, clock: _Clock) -> Outcome:
        effective = dict(endpoint.effective())
        wrong = [f"{name}={effective[name]!r} instead of {value!r}" for name, value in config.items()
                 if name in effective and effective[name] != value]  # fmt: skip
        if wrong:
            return Outcome(Status.NOT_APPLIED, "the engine runs " + ", ".join(wrong), effective=effective)
        with clock.phase("warmup"):
            loadgen.drive(endpoint, self.workload, self._conversations(seed, warmup=True), self.deadline, "warmup")
            endpoint.reset()
        with clock.phase("measure"):
            run = loadgen.drive(endpoint, self.workload, self._conversations(seed), self.deadline)
        counters = dict(endpoint.counters())
        metrics = derive(run.timelines, run.wall_seconds, run.cpu_seconds, self.workload.slo, counters)
        outcome = Outcome(Status.OK, "", metrics, run.timelines, {}, effective, counters)
        failed = metrics.get("failed_fraction", 0.0)
        if failed > FAILED_LIMIT:
            return replace(outcome, status=Status.FAILED_REQUESTS, reason=_failures(run.timelines, failed))
        if self.quality is None:
            return outcome
        return self._judge(outcome, endpoint, config, clock)

    def _judge(self, outcome: Outcome, endpoint: Endpoint, config: Config, clock: _Clock) -> Outcome:
        assert self.quality is not None
        try:
            with clock.phase("quality"):
                figures = self.quality.check(endpoint, config)
        except EngineError as error:
            return replace(outcome, status=error.status, reason=f"{error.phase}: {error.reason}")
        outcome = replace(outcome, metrics={**outcome.metrics, **figures})
        if self.gate.violation(figures) > 0:
            return replace(outcome, status=Status.QUALITY, reason=self.gate.sentence(figures))
        return outcome

    def score(self, config: Config, sequences: Sequence[Sequence[int]]) -> list[Score]:
        """Launch ``config`` only to score ``sequences`` (for the quality reference)."""
        with self.runtime.launch(config, self.logs / "reference.log") as endpoint:
            return endpoint.score(sequences, TOP)

    def _conversations(self, seed: int, warmup: bool = False) -> Any:
        return build(self.workload, self.source, seed, warmup=warmup)


def _failures(timelines: Sequence[Timeline], share: float) -> str:
    first = next((t.error for t in timelines if t.error), "")
    return f"{share:.0%} of the requests failed (limit {FAILED_LIMIT:.0%}); the first: {first}"


class _Clock:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start
