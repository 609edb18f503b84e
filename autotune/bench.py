"""Measures one configuration on a runtime under a workload: the only place where time is spent. Decides nothing."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from autotune import loadgen
from autotune.launches import Launches
from autotune.metrics import Timeline, derive
from autotune.outcome import KEPT_LAUNCH, EngineError, Outcome, Status
from autotune.pruning import Watch
from autotune.quality import TOP, Gate, Quality
from autotune.runtimes.base import Endpoint, Runtime, Score
from autotune.stopping import Count, HalfWidth, Stopping, Within
from autotune.telemetry import Watch as Telemetry
from autotune.workload import Workload, build
from search_spaces import Config, Space

FAILED_LIMIT = 0.05
"""Share of failed requests above which a trial's figures mean nothing (they bend throughput and latency alike)."""
ACCEPTED_LEAST = 0.3
"""Share of drafted tokens below which a draft layer is taken for one that was never loaded (that gave about 0.22)."""
CLIENT_LIMIT = 0.8
"""Share of one core that generating the load may take; above it the figures are the client's, not the engine's."""
KEPT = "on the launch before, which differs in live knobs alone"
PASS_SEED = 1_000_003
DEVICES = ("tp", "pp", "dp")
"""Knobs whose product is how many devices a configuration takes."""


class Measuring(Protocol):
    """What a study needs of whatever measures its configurations: a `Bench`, or a `kernel_bench.KernelBench`."""

    @property
    def space(self) -> Space: ...

    @property
    def quality(self) -> Quality | None: ...

    @property
    def gate(self) -> Gate: ...

    def measure(
        self, config: Config, seed: int, name: str = "trial", watch: Watch | None = None, fresh: bool = True
    ) -> Outcome: ...


@dataclass(frozen=True, slots=True)
class Bench:
    """Everything that all trials of a study share. ``source`` are the token ids that prompts are cut from.

    With ``precision`` above 0 the workload is repeated on fresh prompts until the 95 % interval of its output rate is
    that narrow (a share of the rate), at least three times, and no longer than ``deadline`` seconds in all.
    ``telemetry`` starts to watch the machine for throttling; without it nothing is watched. ``launches`` keeps an
    engine for what may run on a kept one; whoever made it closes it. Without it every launch is fresh.
    """

    runtime: Runtime
    space: Space
    workload: Workload
    source: Sequence[int]
    logs: Path
    quality: Quality | None = None
    gate: Gate = field(default_factory=Gate)
    deadline: float = 120.0
    precision: float = 0.0
    telemetry: Callable[[], Telemetry] | None = None
    launches: Launches | None = None

    def measure(
        self, config: Config, seed: int, name: str = "trial", watch: Watch | None = None, fresh: bool = True
    ) -> Outcome:
        """Launch, warm up, measure, check quality; every failure becomes an Outcome with its phase and reason.

        ``watch`` may give the run up part-way. Unless ``fresh``, an engine that differs in live knobs alone is kept.
        """
        broken = self.space.broken(config)
        if broken:
            return Outcome(Status.INVALID, "; ".join(broken))
        clock = _Clock()
        outcome = Outcome(Status.OK)
        try:
            with ExitStack() as stack:
                with clock.phase("launch"):
                    endpoint, shared = stack.enter_context(self._running(config, self.logs / f"{name}.log", fresh))
                # Kept for what fails or is given up later, too.
                outcome = replace(outcome, effective=dict(endpoint.effective()))
                outcome = self._run(endpoint, outcome, config, seed, clock, watch)
                if shared:
                    outcome = replace(
                        outcome, notes=(*outcome.notes, KEPT), counters={**outcome.counters, KEPT_LAUNCH: 1.0}
                    )
        except EngineError as error:
            tail = f"\n{error.tail}" if error.tail else ""
            kept = error.run.timelines if isinstance(error, (loadgen.TimeLimit, loadgen.GivenUp)) else ()
            bound = error.bound if isinstance(error, loadgen.GivenUp) else None
            reason = f"{error.phase}: {error.reason}{tail}"
            outcome = replace(
                outcome, status=error.status, reason=reason, timelines=kept, bound=bound, failure=error.failure
            )
        return replace(outcome, seconds=clock.seconds)

    @contextmanager
    def _running(self, config: Config, log: Path, fresh: bool) -> Iterator[tuple[Endpoint, bool]]:
        launches = self.launches or Launches(self.runtime, self.space)
        with launches.running(config, log, fresh or self.launches is None) as found:
            yield found

    def _run(
        self, endpoint: Endpoint, started: Outcome, config: Config, seed: int, clock: _Clock, watch: Watch | None
    ) -> Outcome:
        effective = started.effective
        wrong = [f"{name}={effective[name]!r} instead of {value!r}" for name, value in config.items()
                 if name in effective and effective[name] != value]  # fmt: skip
        if wrong:
            return replace(started, status=Status.NOT_APPLIED, reason="the engine runs " + ", ".join(wrong))
        with clock.phase("warmup"):
            loadgen.drive(endpoint, self.workload, self._conversations(seed, warmup=True), self.deadline, "warmup")
            endpoint.reset()
        with clock.phase("measure"):
            machine = self.telemetry() if self.telemetry is not None else None
            run, unmet = self._passes(endpoint, seed, watch)
            held = machine.fault() if machine is not None else ""
        counters = dict(endpoint.counters())
        metrics = derive(run.timelines, run.wall_seconds, run.cpu_seconds, self.workload.slo, counters)
        metrics |= _cost(metrics, config)
        disturbed = held or _client_bound(metrics)
        notes = (unmet,) if unmet else ()
        outcome = replace(
            started, metrics=metrics, timelines=run.timelines, counters=counters, notes=notes, disturbed=disturbed
        )
        failed = metrics.get("failed_fraction", 0.0)
        if failed > FAILED_LIMIT:
            return replace(outcome, status=Status.FAILED_REQUESTS, reason=_failures(run.timelines, failed))
        accepted = metrics.get("acceptance_rate", 1.0)
        if accepted < ACCEPTED_LEAST:
            reason = f"only {accepted:.0%} of the drafted tokens were accepted, as if the draft layer were not loaded"
            return replace(outcome, status=Status.QUALITY, reason=reason)
        if self.quality is None:
            return outcome
        return self._judge(outcome, endpoint, config, clock)

    def _passes(self, endpoint: Endpoint, seed: int, watch: Watch | None) -> tuple[loadgen.Run, str]:
        """One run, or as many as the precision asks for joined to one, and what the time limit left unmet."""
        wanted: list[Stopping] = [HalfWidth(self.precision)] if self.precision > 0 else [Count(1)]
        stop = Within(self.deadline, wanted)
        runs: list[loadgen.Run] = []
        while not (runs and stop.done()):
            # The seed of a pass is far from that of any block, so that no two share a prompt.
            conversations = self._conversations(seed + PASS_SEED * len(runs))
            runs.append(
                loadgen.drive(endpoint, self.workload, conversations, self.deadline, watch=None if runs else watch)
            )
            tokens = sum(t.output_tokens for t in runs[-1].timelines)
            stop.add(tokens / max(runs[-1].wall_seconds, 1e-9))
        return loadgen.joined(runs), stop.unmet() if self.precision > 0 else ""

    def _judge(self, outcome: Outcome, endpoint: Endpoint, config: Config, clock: _Clock) -> Outcome:
        assert self.quality is not None
        try:
            with clock.phase("quality"):
                figures = self.quality.check(endpoint, config)
        except EngineError as error:
            reason = f"{error.phase}: {error.reason}"
            return replace(outcome, status=error.status, reason=reason, failure=error.failure)
        outcome = replace(outcome, metrics={**outcome.metrics, **figures})
        if self.gate.violation(figures) > 0:
            return replace(outcome, status=Status.QUALITY, reason=self.gate.sentence(figures))
        return outcome

    def score(self, config: Config, sequences: Sequence[Sequence[int]]) -> list[Score]:
        """Launch ``config`` only to score ``sequences`` (for the quality reference)."""
        with self._running(config, self.logs / "reference.log", fresh=True) as (endpoint, _):
            return endpoint.score(sequences, TOP)

    def _conversations(self, seed: int, warmup: bool = False) -> Any:
        return build(self.workload, self.source, seed, warmup=warmup)


def _cost(metrics: Mapping[str, float], config: Config) -> dict[str, float]:
    """What 1,000 output tokens cost in seconds of one device."""
    rate = metrics.get("output_tok_s", 0.0)
    devices = math.prod(int(config.get(name, 1)) for name in DEVICES)
    return {"device_s_per_ktok": 1000 * devices / rate} if rate > 0 else {}


def _client_bound(metrics: Mapping[str, float]) -> str:
    share = metrics.get("client_cpu_fraction", 0.0)
    if share <= CLIENT_LIMIT:
        return ""
    return f"client-bound: generating the load took {share:.0%} of a core (limit {CLIENT_LIMIT:.0%})"


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
