"""Measures choices of one operator's meta-parameters in a child process; to a Tuner it is what a Bench is."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from autotune.outcome import EngineError, Outcome, Status
from autotune.pruning import Watch
from autotune.quality import Gate, Quality
from autotune.runtimes.native.kernels.process import KernelProcess
from search_spaces import Config, Space
from search_spaces.kernels import kernel_space


@dataclass(frozen=True, slots=True)
class KernelBench:
    """One operator. There is no model, hence no quality reference: each answer is checked against plain torch's."""

    process: KernelProcess
    space: Space
    quality: Quality | None = None
    gate: Gate = field(default_factory=Gate)

    @classmethod
    def of(cls, process: KernelProcess) -> KernelBench:
        """With the space that the kernel says it has. Raises EngineError when it has none here."""
        found = process.describe()
        space = kernel_space(process.operator.backend, found.get("facts", {}), found.get("defaults", {}))
        return cls(process, space)

    def measure(
        self, config: Config, seed: int, name: str = "trial", watch: Watch | None = None, fresh: bool = True
    ) -> Outcome:
        """Check, then time. A wrong answer is ``quality`` and has no time; every failure is an outcome.

        Takes milliseconds and has no requests, so ``watch`` sees nothing.
        """
        broken = self.space.broken(config)
        if broken:
            return Outcome(Status.INVALID, "; ".join(broken))
        start = time.monotonic()
        try:
            timing = self.process.measure(dict(config))
        except EngineError as error:
            tail = f"\n{error.tail}" if error.tail else ""
            seconds = {"measure": time.monotonic() - start}
            return Outcome(error.status, f"{error.phase}: {error.reason}{tail}", seconds=seconds)
        seconds = {"measure": time.monotonic() - start}
        if not timing.samples:
            reason = f"the answer is {timing.error:.2g} off the reference's norm (limit {timing.limit:g})"
            return Outcome(Status.QUALITY, reason, seconds=seconds)
        metrics = {"op_s": timing.median, "op_error": timing.error}
        counters = {f"sample_{index}_s": sample for index, sample in enumerate(timing.samples)}
        return Outcome(Status.OK, "", metrics, seconds=seconds, counters=counters)
