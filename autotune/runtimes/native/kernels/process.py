"""The tuner's side of kernel tuning: a child process that measures one operator, started again after it died.

A compiler's error, a crash or a hang of a kernel is then an outcome of one configuration. Loads no torch.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.outcome import EngineError, Status
from autotune.runtimes.native.kernels.tuning import Operator
from autotune.runtimes.native.zygote import Child, died, zygote
from search_spaces import Value

SECONDS = 120.0
"""The longest that one measurement may take; it may have to compile."""
TAIL = 2000
SERVE = "autotune.runtimes.native.kernels.measure:serve"


@dataclass(frozen=True, slots=True)
class Timing:
    """What one choice gave: ``error`` relative to the reference, ``limit`` its most, seconds a call of each sample."""

    error: float
    limit: float
    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)


class KernelProcess:
    """Measures ``operator``; its weights take ``footprint`` bytes together. Every failure is an EngineError."""

    def __init__(
        self, operator: Operator, footprint: int, log: Path, spawn: Callable[..., Child] | None = None
    ) -> None:
        self.operator, self.footprint, self.log = operator, footprint, log
        self.seconds = SECONDS
        self._spawn = spawn or (lambda log, *args: zygote().spawn(log, SERVE, *args))
        self._child: Child | None = None
        self._described: Mapping[str, Any] = {}

    def describe(self) -> Mapping[str, Any]:
        """Facts and defaults of `search_spaces.kernels.kernel_space`, from the kernel itself."""
        self._started()
        return self._described

    def measure(self, choice: Mapping[str, Value]) -> Timing:
        """Check and time one choice."""
        child = self._started()
        try:
            child.pipe.send(dict(choice))
        except OSError:
            raise self._death("measure") from None
        found: Timing = self._answer("measure")
        return found

    def close(self) -> None:
        """End the child; another may be started afterwards."""
        if self._child is not None:
            self._child.end()
            self._child = None

    def _started(self) -> Child:
        if self._child is None:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            self._child = self._spawn(self.log, self.operator.key, self.footprint)
            self._described = self._answer("launch")
        return self._child

    def _answer(self, phase: str) -> Any:
        assert self._child is not None
        end = time.monotonic() + self.seconds
        try:
            if not self._child.pipe.poll(max(end - time.monotonic(), 0)):
                self.close()
                raise EngineError(Status.TIMEOUT, phase, f"no answer in {self.seconds:g} s", self._tail())
            kind, *rest = self._child.pipe.recv()
        except (EOFError, OSError):
            raise self._death(phase) from None
        if kind == "failed":
            if phase == "launch":
                self.close()
            raise EngineError(Status(rest[0]), phase, rest[1])
        return rest[0]

    def _death(self, phase: str) -> EngineError:
        assert self._child is not None
        status, reason = died(self._child.end(patience=5.0), "the kernel's process")
        self._child = None
        return EngineError(status, phase, reason, self._tail())

    def _tail(self) -> str:
        try:
            return self.log.read_text(errors="replace")[-TAIL:].strip()
        except OSError:
            return ""
