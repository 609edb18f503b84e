"""Sends conversations to a running endpoint and notes when each token came. Judges and aggregates nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Protocol, cast, runtime_checkable

from autotune.metrics import Timeline
from autotune.outcome import EngineError, Status
from autotune.pruning import Watch
from autotune.runtimes.base import Chunk, Endpoint, Generation, RequestError
from autotune.workload import Conversation, Workload

GRACE = 2.0
"""Seconds that cancelled requests get to end before they are left behind."""
CUT = "cut off by the time limit"
GIVEN_UP = "given up: the run had no chance left"
SKIPPED = "not sent: an earlier turn failed"


@runtime_checkable
class Simulated(Protocol):
    """An endpoint in virtual time: it brings the event loop whose `time()` its chunks are stamped with."""

    def event_loop(self) -> asyncio.AbstractEventLoop: ...


@dataclass(frozen=True, slots=True)
class Run:
    """One run. ``cpu_seconds`` is our own process's CPU time, the cost of generating the load."""

    timelines: tuple[Timeline, ...]
    wall_seconds: float
    cpu_seconds: float


class TimeLimit(EngineError):
    """The run was cut off; ``run`` holds what was measured until then, with an error in each unmet request."""

    def __init__(self, phase: str, reason: str, run: Run) -> None:
        super().__init__(Status.TIMEOUT, phase, reason)
        self.run = run


class GivenUp(EngineError):
    """``watch`` ended the run; ``run`` holds what was measured until then."""

    def __init__(self, phase: str, watch: Watch, run: Run) -> None:
        super().__init__(Status.PRUNED, phase, watch.reason())
        self.run, self.bound = run, watch.bound()


def event_loop(endpoint: Endpoint) -> asyncio.AbstractEventLoop:
    """A new loop to talk to ``endpoint`` in; its `time()` is the clock of `Chunk.at`."""
    return endpoint.event_loop() if isinstance(endpoint, Simulated) else asyncio.new_event_loop()


def drive(
    endpoint: Endpoint,
    workload: Workload,
    conversations: Sequence[Conversation],
    deadline_s: float,
    phase: str = "measure",
    watch: Watch | None = None,
) -> Run:
    """Run ``conversations`` under ``workload``'s concurrency to their end.

    Raises TimeLimit (an EngineError) after ``deadline_s`` seconds, and the engine's own EngineError as soon as one
    comes. A failed request is a Timeline with an error. ``watch`` sees each request as it ends and may end the run,
    which raises GivenUp.
    """
    loop = event_loop(endpoint)
    # A task that ignored its cancellation is left behind below; its complaint when collected helps nobody.
    loop.set_exception_handler(lambda loop, context: None)
    cpu = time.process_time()
    start = loop.time()
    work = loop.create_task(run(endpoint, conversations, workload.concurrency, deadline_s, watch))
    try:
        timelines = loop.run_until_complete(work)
        wall = _length(timelines, loop.time() - start)
        measured = Run(tuple(timelines), wall, time.process_time() - cpu)
    finally:
        if not work.done():  # a signal came: let the requests end before the loop goes
            work.cancel()
            loop.run_until_complete(asyncio.wait([work], timeout=2 * GRACE))
        loop.run_until_complete(asyncio.wait([loop.create_task(loop.shutdown_asyncgens())], timeout=GRACE))
        loop.close()
    if watch is not None and watch.done() and any(t.error == GIVEN_UP for t in timelines):
        raise GivenUp(phase, watch, measured)
    unmet = [t for t in timelines if t.error == CUT]
    if unmet:
        raise TimeLimit(
            phase,
            f"the time limit of {deadline_s:g} s ended with {len(unmet)} of {len(timelines)} requests unfinished; "
            "raise --deadline or choose a smaller workload",
            measured,
        )
    return measured


def joined(runs: Sequence[Run]) -> Run:
    """Several runs as one: each begins where the one before it ended, and conversations are numbered on."""
    timelines: list[Timeline] = []
    wall, first = 0.0, 0
    for run_ in runs:
        for t in run_.timelines:
            times = tuple(at + wall for at in t.token_times)
            timelines.append(replace(t, conversation=t.conversation + first, sent=t.sent + wall, token_times=times))
        wall += run_.wall_seconds
        first = 1 + max((t.conversation for t in timelines), default=-1)
    return Run(tuple(timelines), wall, sum(run_.cpu_seconds for run_ in runs))


def _length(timelines: Sequence[Timeline], elapsed: float) -> float:
    """Seconds until the last token, or all that passed when nothing was measured or something was cut off."""
    ends = [t.token_times[-1] for t in timelines if t.token_times]
    clean = bool(ends) and not any(t.error for t in timelines)
    return min(max(ends), elapsed) if clean else elapsed


class _Enough(Exception):
    """Raised through a conversation to end the whole run."""


async def run(
    endpoint: Endpoint,
    conversations: Sequence[Conversation],
    concurrency: int,
    deadline_s: float,
    watch: Watch | None = None,
) -> list[Timeline]:
    """A timeline for every turn of every conversation, in order of conversation and turn.

    At most ``concurrency`` conversations are under way (0: no limit); each starts at its arrival at the earliest.
    Times are seconds of the running loop's clock since this call. Returns within ``deadline_s`` + GRACE seconds.
    """
    loop = asyncio.get_running_loop()
    log = _Log(loop.time(), watch)
    gate = asyncio.Semaphore(concurrency if concurrency > 0 else max(len(conversations), 1))
    tasks = [loop.create_task(_converse(endpoint, c, gate, log)) for c in conversations]
    if not tasks:
        return []
    failure: BaseException | None = None
    try:
        done, _ = await asyncio.wait(tasks, timeout=deadline_s, return_when=asyncio.FIRST_EXCEPTION)
        failure = next((e for task in done if (e := task.exception()) is not None), None)
    finally:
        await _stop(tasks)
    if failure is not None and not isinstance(failure, _Enough):
        raise failure
    why = CUT if failure is None else GIVEN_UP
    found = dict(log.done)
    for conversation in conversations:
        for index, turn in enumerate(conversation.turns):
            if (conversation.id, index) not in found:
                found[conversation.id, index] = log.cut(conversation.id, index, len(turn.tokens), loop.time(), why)
    return [found[key] for key in sorted(found)]


async def _stop(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel what still runs and wait for it, but not for ever."""
    left = [task for task in tasks if not task.done()]
    for task in left:
        task.cancel()
    if left:
        await asyncio.wait(left, timeout=GRACE)


class _Log:
    """The timelines so far, and what is known of the requests under way; times are relative to ``start``."""

    def __init__(self, start: float, watch: Watch | None = None) -> None:
        self.start = start
        self.watch = watch
        self.failed = False
        self.done: dict[tuple[int, int], Timeline] = {}
        self.open: dict[tuple[int, int], tuple[int, float, list[float]]] = {}

    def send(self, conversation: int, turn: int, prompt: int, now: float) -> list[float]:
        """Note that a request was handed over; the returned list takes its token times."""
        times: list[float] = []
        self.open[conversation, turn] = (prompt, now - self.start, times)
        return times

    def close(self, conversation: int, turn: int, error: str) -> None:
        prompt, sent, times = self.open.pop((conversation, turn))
        self.done[conversation, turn] = Timeline(conversation, turn, prompt, len(times), sent, tuple(times), error)
        if self.watch is not None:
            self.watch.add(self.done[conversation, turn])
            if self.watch.done():
                raise _Enough

    def cut(self, conversation: int, turn: int, tokens: int, now: float, why: str) -> Timeline:
        """The timeline of a request that the run's early end cut off or kept from being sent."""
        prompt, sent, times = self.open.get((conversation, turn), (tokens, now - self.start, []))
        return Timeline(conversation, turn, prompt, len(times), sent, tuple(times), why)


async def _converse(endpoint: Endpoint, conversation: Conversation, gate: asyncio.Semaphore, log: _Log) -> None:
    """The turns of one conversation in order; after a failed turn the rest is recorded as not sent."""
    loop = asyncio.get_running_loop()
    wait = conversation.arrival - (loop.time() - log.start)
    if wait > 0:
        await asyncio.sleep(wait)
    async with gate:
        if log.failed:
            return
        try:
            await _turns(endpoint, conversation, log)
        except BaseException:
            # The gate opens now, and the next one must not ask an engine that is gone.
            log.failed = True
            raise


async def _turns(endpoint: Endpoint, conversation: Conversation, log: _Log) -> None:
    loop = asyncio.get_running_loop()
    history: tuple[int, ...] = ()
    broken = False
    for index, turn in enumerate(conversation.turns):
        history += turn.tokens
        times = log.send(conversation.id, index, len(history), loop.time())
        if broken:
            log.close(conversation.id, index, SKIPPED)
            continue
        answer: list[int] = []
        error = await _request(endpoint, Generation(history, turn.max_tokens), answer, times, log.start)
        log.close(conversation.id, index, error)
        broken = bool(log.done[conversation.id, index].fault)
        history += tuple(answer)


async def _request(
    endpoint: Endpoint, generation: Generation, answer: list[int], times: list[float], start: float
) -> str:
    """Stream one request into ``answer`` and ``times``; returns its error, empty when it ended well."""
    finished = False
    try:
        # Closing the iterator is what aborts a request that we are cancelled in.
        async with aclosing(cast("AsyncGenerator[Chunk, None]", endpoint.stream(generation))) as chunks:
            async for chunk in chunks:
                answer += chunk.tokens
                times += [chunk.at - start] * len(chunk.tokens)
                finished = chunk.finish is not None
    except (RequestError, OSError) as error:
        return str(error) or type(error).__name__
    return "" if finished or not times else "the stream broke off before its end"
