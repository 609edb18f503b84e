"""Runs an engine's steps in one thread and hands its tokens to an asyncio loop. Knows neither HTTP nor text."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

from autotune.runtimes.base import Generation
from autotune.runtimes.native.llm import Stepping

T = TypeVar("T")
STUCK_SECONDS = 120.0
"""A single step that lasts longer is taken for a hang."""


@dataclass(frozen=True, slots=True)
class Part:
    """What a step gave a request. ``finish`` is None until the last: length, stop, error (``reason`` says which)
    or refused (the engine takes no such request)."""

    tokens: tuple[int, ...]
    finish: str | None = None
    reason: str = ""


Sink = Callable[[Part], None]


@dataclass(slots=True)
class _Live:
    """A request under way; ``first`` turns True with its first token."""

    sink: Sink
    sent: float
    first: bool = False


class Driver:
    """The only user of an engine: requests go in and parts come out on the loop, everything else waits its turn."""

    def __init__(self, engine: Stepping, loop: asyncio.AbstractEventLoop) -> None:
        self._engine, self._loop = engine, loop
        self._orders: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._live: dict[int, _Live] = {}  # owned by the loop's thread
        self._running: set[int] = set()  # owned by the engine's thread, as are the next two
        self._quiet: list[Callable[[], None]] = []  # questions that wait for an idle engine …
        self._held: dict[int, Generation] = {}  # … and the requests that wait for them, so that neither starves
        self._next = 0
        self._step_began: float | None = None
        self._failure = ""
        self.counts: Counter[str] = Counter()
        self.first_seconds = 0.0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> str:
        """Why the engine answers no more; empty while it does."""
        began = self._step_began
        if not self._failure and began is not None and time.monotonic() - began > STUCK_SECONDS:
            return f"the engine's last step has not ended for {time.monotonic() - began:.0f} s"
        return self._failure

    @property
    def running(self) -> int:
        """Requests that have had their first token."""
        return sum(live.first for live in self._live.values())

    @property
    def waiting(self) -> int:
        """Requests that have not."""
        return len(self._live) - self.running

    def submit(self, generation: Generation, sink: Sink) -> int:
        """Queue a request; ``sink`` gets its parts on the loop, the last with a ``finish``. Returns its number."""
        self._next += 1
        number = self._next
        self._live[number] = _Live(sink, time.monotonic())
        self.counts["requests"] += 1
        self.counts["prompt_tokens"] += len(generation.prompt)
        if self._failure:
            self._loop.call_soon(self._hand_out, [(number, Part((), "error", self._failure))])
        else:
            self._orders.put(lambda: self._add(number, generation))
        return number

    def abort(self, number: int) -> None:
        """Forget a request, if it is not over; its sink hears no more."""
        if self._live.pop(number, None) is not None:
            self.counts["finish_abort"] += 1
            self._orders.put(lambda: self._abort(number))

    async def call(self, question: Callable[[], T], idle: bool = False) -> T:
        """Ask the engine something between two steps, or once it is ``idle``: later requests then wait for it.

        Raises RuntimeError once the engine has failed.
        """
        answer: asyncio.Future[T] = self._loop.create_future()

        def ask() -> None:
            try:
                found = question()
            except Exception as error:
                self._post(_settle, answer, None, error)
            else:
                self._post(_settle, answer, found, None)

        if self._failure:
            raise RuntimeError(self._failure)
        self._orders.put((lambda: self._quiet.append(ask)) if idle else ask)
        while not answer.done():
            await asyncio.wait({answer}, timeout=1.0)
            if self._failure and not answer.done():
                raise RuntimeError(self._failure)
        return answer.result()

    async def counters(self) -> Mapping[str, float]:
        """The engine's own counters."""
        return await self.call(self._engine.counters)

    async def score(self, sequence: Sequence[int], top: int) -> Any:
        """Log-probabilities of one sequence, once the engine is idle; see `Stepping.score`."""
        return (await self.call(lambda: self._engine.score([sequence], top), idle=True))[0]

    def close(self, seconds: float = 5.0) -> None:
        """End the thread after its present step."""
        self._orders.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        try:
            while self._obey():
                if self._running:
                    self._step_began = time.monotonic()
                    events = self._engine.step()
                    self._step_began = None
                    parts = [(number, Part(tuple(tokens), finish)) for number, tokens, finish in events]
                    self._running -= {number for number, part in parts if part.finish is not None}
                    self._post(self._hand_out, parts)
        except Exception as error:
            self._step_began = None
            self._post(self._fail, f"the engine failed: {str(error) or type(error).__name__}")

    def _obey(self) -> bool:
        """Carry out what was ordered; wait for an order when there is nothing to step. False at the end."""
        while True:
            if self._quiet and not self._running:
                self._answer_quiet()
            elif self._running and self._orders.empty():
                return True
            else:
                order = self._orders.get()
                if order is None:
                    return False
                order()

    def _answer_quiet(self) -> None:
        questions, held = self._quiet, self._held
        self._quiet, self._held = [], {}
        for question in questions:
            question()
        for number, generation in held.items():
            self._add(number, generation)

    def _add(self, number: int, generation: Generation) -> None:
        if self._quiet:
            self._held[number] = generation
            return
        g = generation
        try:
            self._engine.add(number, g.prompt, g.max_tokens, g.temperature, g.seed, g.ignore_eos)
        except ValueError as error:
            self._post(self._hand_out, [(number, Part((), "refused", str(error)))])
        else:
            self._running.add(number)

    def _abort(self, number: int) -> None:
        self._held.pop(number, None)
        if number in self._running:
            self._running.discard(number)
            self._engine.abort(number)

    def _post(self, function: Callable[..., None], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop is closed: nobody is left to hear
            self._orders.put(None)

    def _hand_out(self, parts: Sequence[tuple[int, Part]]) -> None:
        for number, part in parts:
            live = self._live.get(number)
            if live is None:
                continue
            self.counts["generated_tokens"] += len(part.tokens)
            if part.tokens and not live.first:
                live.first = True
                self.counts["first_tokens"] += 1
                self.first_seconds += time.monotonic() - live.sent
            if part.finish is not None:
                del self._live[number]
                self.counts[f"finish_{part.finish}"] += 1
            live.sink(part)

    def _fail(self, reason: str) -> None:
        self._failure = reason
        self._hand_out([(number, Part((), "error", reason)) for number in list(self._live)])


def _settle(answer: asyncio.Future[T], found: T, error: Exception | None) -> None:
    if answer.done():
        return
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(found)
