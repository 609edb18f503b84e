"""The last launch, kept for a configuration that differs from it in live knobs alone. Measures nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from autotune.runtimes.base import Endpoint, Runtime
from search_spaces import Config, Space, Value


class Launches:
    """Starts engines one at a time, and keeps the last one that nothing went wrong with; `close` ends it.

    An engine that was kept has forgotten its prefixes and counters, and says itself which configuration it runs now.
    """

    def __init__(self, runtime: Runtime, space: Space) -> None:
        self._runtime, self._space = runtime, space
        self._stack = ExitStack()
        self._running: tuple[Mapping[str, Value], Config, Endpoint] | None = None

    @contextmanager
    def running(self, config: Config, log: Path, fresh: bool) -> Iterator[tuple[Endpoint, bool]]:
        """``config`` ready to serve, and whether on a launch that was kept; never so when ``fresh``.

        Raises EngineError as `Runtime.launch` does. Whatever is raised inside ends the engine.
        """
        fixed = self._space.restart_part(config, "launch")
        endpoint = None if fresh else self._adopted(fixed, config)
        kept = endpoint is not None
        if endpoint is None:
            self.close()
            endpoint = self._stack.enter_context(self._runtime.launch(config, log))
        try:
            yield endpoint, kept
        except BaseException:
            self.close()
            raise
        if fresh:
            self.close()
        else:
            self._running = fixed, config, endpoint

    def _adopted(self, fixed: Mapping[str, Value], config: Config) -> Endpoint | None:
        if self._running is None or self._running[0] != fixed:
            return None
        _, before, endpoint = self._running
        try:
            if config == before:
                endpoint.reset()
                return endpoint
            return endpoint if endpoint.adopt(config) else None
        except BaseException:
            self.close()  # an engine that failed to change is none to go on with
            raise

    def close(self) -> None:
        """End the engine that was kept, if there is one."""
        self._running = None
        self._stack.close()
