"""The native engine as a `Runtime`: one child process a launch, spoken to over a pipe."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

from autotune.outcome import EngineError, Status
from autotune.runtimes.base import Chunk, Generation, RequestError, Score
from autotune.runtimes.native.kernels import tuning
from autotune.runtimes.native.layout import Layout
from autotune.runtimes.native.zygote import Child, died, zygote
from search_spaces import Config, Value

LAUNCH_SECONDS = 600.0
CALL_SECONDS = 600.0
SENSE_SECONDS = 7200.0
TAIL = 2000
"""Characters of a log that an error carries."""


class NativeRuntime:
    """Launches `engine.Engine` on one checkpoint folder, its kernels as in the tuned table ``kernels``."""

    name = "native"

    def __init__(
        self, folder: Path, launch_seconds: float = LAUNCH_SECONDS, kernels: tuning.Entries | None = None
    ) -> None:
        self.folder, self.launch_seconds, self.kernels = folder, launch_seconds, dict(kernels or {})

    def version(self) -> Mapping[str, str]:
        """The engine's own source digest, the torch that multiplies, and the digest of tuned kernels if there are."""
        digest = hashlib.sha256()
        for path in sorted(Path(__file__).parent.rglob("*")):
            if path.suffix in (".py", ".c", ".h"):
                digest.update(path.read_bytes())
        found = {"source": digest.hexdigest()[:16], "torch": metadata.version("torch")}
        return found | ({"kernels": tuning.digest(self.kernels)} if self.kernels else {})

    def capabilities(self) -> Mapping[str, Any]:
        return self._probed

    @cached_property
    def _probed(self) -> Mapping[str, Any]:
        child = zygote().spawn(Path(os.devnull), "autotune.runtimes.native.worker:probed")
        try:
            found: Mapping[str, Any] = _receive(child, time.monotonic() + 120)[1]
            return found
        finally:
            child.end()

    def sensitivities(self, log: Path, group: int = 64) -> dict[str, dict[int, float]]:
        """Predicted KL (nats a token) of each group and width, 4-bit scales shared by ``group`` weights.

        Raises EngineError; see `quant.fisher.sensitivities`.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        child = zygote().spawn(log, "autotune.runtimes.native.worker:sensed", self.folder, group)
        try:
            found: dict[str, dict[int, float]] = NativeEndpoint(child, log).answer(
                time.monotonic() + SENSE_SECONDS, "sensitivities"
            )
        finally:
            child.end()
        return found

    def command(self, config: Config) -> list[str]:
        return serve_command(str(self.folder), config, kernels=self.kernels)

    @contextmanager
    def launch(self, config: Config, log: Path) -> Iterator[NativeEndpoint]:
        log.parent.mkdir(parents=True, exist_ok=True)
        child = zygote().spawn(
            log, "autotune.runtimes.native.worker:run", self.folder, dict(config), self.kernels
        )  # fmt: skip
        endpoint = NativeEndpoint(child, log)
        try:
            endpoint.start(self.launch_seconds)
            yield endpoint
        finally:
            child.end()


def serve_command(
    folder: str, config: Mapping[str, Value], engine: str = "native", kernels: tuning.Entries | None = None
) -> list[str]:
    """The argv that serves exactly this configuration outside the tuner."""
    words = ["autotune", "serve", "--engine", engine, "--model", folder]
    for name, value in sorted(config.items()):
        words += ["--set", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
    if kernels:
        words += ["--kernels", json.dumps(kernels, sort_keys=True)]
    return words


class NativeEndpoint:
    """A running child. One event loop at a time may stream from it."""

    def __init__(self, child: Child, log: Path) -> None:
        self._child, self._log = child, log
        self._next = 0
        self._queues: dict[int, asyncio.Queue[Chunk | Exception]] = {}
        self._results: dict[int, Any] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._effective: Mapping[str, Any] = {}
        self._failure: EngineError | None = None

    def start(self, seconds: float) -> None:
        """Wait until the engine is ready. Raises EngineError(phase="launch")."""
        self._effective = self.answer(time.monotonic() + seconds, "launch")

    def answer(self, end: float, phase: str) -> Any:
        """What the child has to say first. Raises EngineError."""
        message = self._read(end, phase)
        if message[0] == "failed":
            raise EngineError(Status(message[1]), message[2], message[3], self._tail())
        return message[1]

    async def stream(self, generation: Generation) -> AsyncIterator[Chunk]:
        self._check()
        self._attach()
        number, queue = self._number(), asyncio.Queue[Chunk | Exception]()
        self._queues[number] = queue
        finished = False
        try:
            g = generation
            self._send("add", number, g.prompt, g.max_tokens, g.temperature, g.seed, g.ignore_eos)
            while not finished:
                item = await queue.get()
                if isinstance(item, Exception):
                    finished = True
                    raise item
                finished = item.finish is not None
                yield item
        finally:
            del self._queues[number]
            if not finished and self._failure is None:
                self._send("abort", number)

    def score(self, sequences: Sequence[Sequence[int]], top: int) -> list[Score]:
        found: list[Score] = self._call("score", [list(s) for s in sequences], top)
        return found

    def effective(self) -> Mapping[str, Any]:
        return self._effective

    def counters(self) -> Mapping[str, float]:
        found: Mapping[str, float] = self._call("counters")
        return found

    def reset(self) -> None:
        self._call("reset")

    def adopt(self, config: Config) -> bool:
        if Layout.of(config).world > 1:
            return False  # ranks admit requests each on its own
        self._effective = self._call("adopt", dict(config))
        return True

    def _call(self, name: str, *args: Any) -> Any:
        self._check()
        number, end = self._number(), time.monotonic() + CALL_SECONDS
        self._send("call", number, name, *args)
        while number not in self._results:
            self._take(self._read(end, name))
            self._check()
        found = self._results.pop(number)
        if isinstance(found, ValueError):
            raise EngineError(Status.UNSUPPORTED, name, str(found))
        return found

    def _number(self) -> int:
        self._next += 1
        return self._next

    def _send(self, *message: Any) -> None:
        try:
            self._child.pipe.send(message)
        except OSError:
            self._fail(self._death("measure"))
            self._check()

    def _read(self, end: float, phase: str) -> tuple[Any, ...]:
        try:
            return _receive(self._child, end)
        except TimeoutError:
            self._detach()
            self._child.end()
            raise EngineError(Status.TIMEOUT, phase, "the engine gave no answer in time", self._tail()) from None
        except (EOFError, OSError):
            raise self._death(phase) from None

    def _attach(self) -> None:
        """Let the running loop watch the pipe; an earlier loop is closed by now and watches nothing."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop = loop
            loop.add_reader(self._child.pipe.fileno(), self._pump)

    def _detach(self) -> None:
        """Stop watching the pipe; a closed one has no number left to stop by."""
        if self._loop is not None and not self._loop.is_closed() and not self._child.pipe.closed:
            self._loop.remove_reader(self._child.pipe.fileno())

    def _pump(self) -> None:
        try:
            while self._failure is None and self._child.pipe.poll():
                self._take(self._child.pipe.recv())
        except (EOFError, OSError):
            self._fail(self._death("measure"))

    def _take(self, message: tuple[Any, ...]) -> None:
        kind, first, *rest = message
        if kind == "events":
            for number, tokens, finish in rest[0]:
                if number in self._queues:
                    self._queues[number].put_nowait(Chunk(tokens, first, finish))
        elif kind == "result":
            self._results[first] = rest[0]
        elif kind == "refused" and first in self._queues:
            self._queues[first].put_nowait(RequestError(rest[0]))
        elif kind == "failed":
            self._fail(EngineError(Status(first), rest[0], rest[1], self._tail()))

    def _fail(self, error: EngineError) -> None:
        """The engine is gone: every stream ends now, and every later call says why."""
        self._failure = self._failure or error
        self._detach()
        for queue in self._queues.values():
            queue.put_nowait(self._failure)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _death(self, phase: str) -> EngineError:
        """Why the pipe closed, from the child's wait status."""
        self._detach()
        said = self._last_words()
        status, reason = died(self._child.end(patience=5.0), "the engine")
        return said or EngineError(status, phase, reason, self._tail())

    def _last_words(self) -> EngineError | None:
        """What the child said of its end and nobody has read yet."""
        for _ in range(2):  # a reset connection is reported once, before what is left to read
            with contextlib.suppress(EOFError, OSError):
                while self._child.pipe.poll():
                    message = self._child.pipe.recv()
                    if message[0] == "failed":
                        return EngineError(Status(message[1]), message[2], message[3], self._tail())
        return None

    def _tail(self) -> str:
        try:
            return self._log.read_text(errors="replace")[-TAIL:].strip()
        except OSError:
            return ""


def _receive(child: Child, end: float) -> tuple[Any, ...]:
    if not child.pipe.poll(max(end - time.monotonic(), 0)):
        raise TimeoutError
    message: tuple[Any, ...] = child.pipe.recv()
    return message
