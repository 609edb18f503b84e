"""The launch of any server as a `Runtime`: processes, port, readiness, read-back, memory. An engine module fills in
its command, its flags and how to read back what runs."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from autotune.outcome import EngineError, Status
from autotune.runtimes.server import failures, memory, ready
from autotune.runtimes.server.http import STALL_S, Dialect, HttpEndpoint
from autotune.runtimes.server.process import GRACE_S, Kept
from search_spaces import Config, Space

LAUNCH_S = 900.0
TRIES = 2
"""Launches of one configuration while the machine is at fault."""
REMOTE = ("ssh", "docker", "podman", "kubectl", "srun")
"""Commands whose engine runs where we cannot see its sockets."""


@dataclass(frozen=True, slots=True)
class Command:
    """An argv, and what it needs in its environment."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]


class Engine(Protocol):
    """What an engine module supplies."""

    name: str
    dialect: Dialect

    @property
    def endpoint(self) -> type[HttpEndpoint]: ...

    def version(self) -> Mapping[str, str]: ...

    def capabilities(self) -> Mapping[str, Any]: ...

    def offered(self, space: Space) -> Space: ...

    def command(self, config: Config, port: int, model: str) -> Command: ...

    def effective(self, endpoint: HttpEndpoint, log: str) -> Mapping[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds: for a launch until it serves, from TERM to KILL, and without a byte from any request."""

    launch: float = LAUNCH_S
    grace: float = GRACE_S
    stall: float = STALL_S


class ServerRuntime:
    """Launches ``engine`` on ``port`` where that is free, else on another one.

    ``prefix`` is the command that the engine's arguments are appended to.
    """

    def __init__(
        self,
        engine: Engine,
        prefix: Sequence[str],
        limits: Limits = Limits(),
        port: int = 0,
        baseline: memory.Baseline | None = None,
    ) -> None:
        self.engine, self.prefix, self.limits, self.port = engine, tuple(prefix), limits, port
        self.name = engine.name
        self._baseline = baseline or memory.machine()
        self._held: list[int] = []

    def version(self) -> Mapping[str, str]:
        return self.engine.version()

    def capabilities(self) -> Mapping[str, Any]:
        return self.engine.capabilities()

    def command(self, config: Config) -> list[str]:
        found = self.engine.command(config, self.port or 8000, "")
        words = [f"{k}={v}" for k, v in sorted(found.environment.items())]
        return [*(["env", *words] if words else []), *self.prefix, *found.argv]

    @contextmanager
    def launch(self, config: Config, log: Path) -> Iterator[HttpEndpoint]:
        """Start ``config``; a launch that fails by the machine's fault is tried once more."""
        kept, endpoint = self._launched(config, log)
        try:
            yield endpoint
        finally:
            self._held += kept.stop()

    def _launched(self, config: Config, log: Path) -> tuple[Kept, HttpEndpoint]:
        for attempt in range(1, TRIES + 1):
            try:
                return self._start(config, log, self.port if attempt == 1 else 0)
            except EngineError as error:
                if attempt == TRIES or error.status is not Status.BUSY:
                    raise failures.blamed(error, config) from None
                time.sleep(min(1.0, self.limits.grace))
        raise AssertionError("unreachable")

    def _start(self, config: Config, log: Path, wanted: int) -> tuple[Kept, HttpEndpoint]:
        self._clear()
        port, model = ready.free_port(wanted), f"autotune-{uuid.uuid4().hex[:12]}"
        found = self.engine.command(config, port, model)
        kept = Kept([*self.prefix, *found.argv], log, found.environment, self.limits.grace)
        try:
            local = Path(self.prefix[0]).name not in REMOTE
            ready.wait(kept, port, model, self.limits.launch, local)
            address = f"http://{ready.HOST}:{port}"
            endpoint = self.engine.endpoint(kept, address, model, self.engine.dialect, self.limits.stall)
            endpoint.settle(self.engine.effective(endpoint, kept.text()))
        except BaseException:
            self._held += kept.stop()
            raise
        return kept, endpoint

    def _clear(self) -> None:
        """Nothing of ours may run any more, and its memory must be back, before anything is launched."""
        if self._held:
            raise failures.named(
                "busy_device", f"processes {self._held} of an earlier launch cannot be ended", "launch"
            )
        over = self._baseline.excess()
        if over:
            line = f"{over / 2**20:.0f} MiB more are in use than before the first launch"
            raise failures.named("busy_device", line, "launch")
