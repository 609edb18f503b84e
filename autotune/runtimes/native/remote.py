"""Several ranks behind the methods of one engine, for `LLM` and the server. Knows neither text nor HTTP."""

from __future__ import annotations

import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune import model as models
from autotune.runtimes.native.kernels import tuning
from autotune.runtimes.native.llm import Event
from autotune.runtimes.native.requests import check_request
from autotune.runtimes.native.runtime import CALL_SECONDS, LAUNCH_SECONDS, NativeEndpoint
from autotune.runtimes.native.zygote import zygote
from search_spaces import Value


class RemoteEngine(NativeEndpoint):
    """`llm.Stepping` over a child that runs a layout. One thread at a time."""

    def __init__(self, folder: Path, config: Mapping[str, Value], kernels: tuning.Entries) -> None:
        """Load the checkpoint ``folder``. Raises EngineError, also later when a rank has ended."""
        scratch = tempfile.TemporaryDirectory(prefix="autotune-")
        log = Path(scratch.name) / "log"
        child = zygote().spawn(log, "autotune.runtimes.native.worker:run", folder, dict(config), kernels)
        super().__init__(child, log)
        self.close = weakref.finalize(self, _end, child, scratch)
        self._ids: dict[int, Any] = {}
        self._events: list[Event] = []
        self.start(LAUNCH_SECONDS)
        self._bounds = models.facts(folder).vocab, int(self.effective()["kv_tokens"])

    def add(
        self,
        request_id: Any,
        prompt_ids: Sequence[int],
        max_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
        ignore_eos: bool = False,
    ) -> None:
        """Queue a request. Raises ValueError for one that can never run."""
        self._check()
        check_request(prompt_ids, max_tokens, *self._bounds)
        number = self._number()
        self._ids[number] = request_id
        self._send("add", number, list(prompt_ids), max_tokens, temperature, seed, ignore_eos)

    def step(self) -> list[Event]:
        """What the next step of some replica gave; nothing without requests."""
        while not self._events and self._ids:
            self._check()
            self._take(self._read(time.monotonic() + CALL_SECONDS, "measure"))
        self._check()
        found, self._events = self._events, []
        return found

    def abort(self, request_id: Any) -> None:
        """Forget a request; unknown ones are ignored."""
        for number in [number for number, known in self._ids.items() if known == request_id]:
            del self._ids[number]
            if self._failure is None:
                self._send("abort", number)

    def _take(self, message: tuple[Any, ...]) -> None:
        if message[0] != "events":
            super()._take(message)
            return
        for number, tokens, finish in message[2]:
            if number in self._ids:
                self._events.append((self._ids[number], tokens, finish))
                if finish is not None:
                    del self._ids[number]


def _end(child: Any, scratch: tempfile.TemporaryDirectory[str]) -> None:
    child.end()
    scratch.cleanup()
