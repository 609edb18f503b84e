"""A running server as an `Endpoint`: streams OpenAI-compatible completions, asks for log-probabilities and counters.

Knows no engine beyond that; which metrics and settings a server has is its engine module's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from autotune.outcome import EngineError
from autotune.runtimes.base import Chunk, Generation, RequestError, Score
from autotune.runtimes.server import failures
from autotune.runtimes.server.process import Kept
from search_spaces import Config

T = TypeVar("T")
CALL_S = 600.0
STALL_S = 60.0
"""Seconds without a byte from any request, while some wait, after which the engine hangs."""
HEALTH_S = 5.0
SCORED = 250_000
"""Most log-probabilities asked for in one answer: as JSON they take about 60 bytes each."""
LEAST_TOP = 20


Fields = Mapping[str, Any]


def openai_request(g: Generation, model: str) -> Fields:
    """The body of a request for tokens in OpenAI's words."""
    return {"model": model, "prompt": list(g.prompt), "max_tokens": g.max_tokens, "temperature": g.temperature,
            "seed": g.seed, "ignore_eos": g.ignore_eos, "stream": True,
            "stream_options": {"include_usage": True}}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Dialect:
    """What differs from one kind of server to the next.

    ``body``: extra fields of each request; ``counters``: {our name: its Prometheus metric}; ``gauges``: those of them
    that are not counted from zero; ``reset``: the path that empties its prefix cache; ``score_top``: the field that
    asks for log-probabilities of the prompt. ``complete``: the path that generates, ``request`` makes its body, and
    ``event`` says one event of its stream, after some tokens have come, in the words of OpenAI's.
    """

    body: Mapping[str, Any] = field(default_factory=dict)
    counters: Mapping[str, str] = field(default_factory=dict)
    gauges: frozenset[str] = frozenset()
    reset: str = ""
    score_top: str = "prompt_logprobs"
    complete: str = "/v1/completions"
    request: Callable[[Generation, str], Fields] = openai_request
    event: Callable[[Fields, int], Fields] = lambda event, tokens: event


class HttpEndpoint:
    """``base`` is its address, ``model`` the name it answers to; ``effective`` what was read back from it at start."""

    def __init__(self, kept: Kept, base: str, model: str, dialect: Dialect, stall: float = STALL_S) -> None:
        self.base, self.model = base, model
        self._kept, self._dialect, self._stall = kept, dialect, stall
        self._effective: Mapping[str, Any] = {}
        self._zero: dict[str, float] = {}
        self._heard, self._active = time.monotonic(), 0
        self._cpu = 0.0

    def settle(self, effective: Mapping[str, Any]) -> None:
        """What runs, once it is known; counters start here."""
        self._effective = effective
        self._mark()

    async def stream(self, generation: Generation) -> AsyncIterator[Chunk]:
        """Tokens as they come, each with the time of its arrival here.

        The server's own count (`usage`) must agree with what it streamed, else RequestError: the figures would lie.
        """
        import aiohttp

        body = {**self._dialect.request(generation, self.model), **self._dialect.body}
        waits = aiohttp.ClientTimeout(total=None, sock_connect=10)
        counted = _Count(len(generation.prompt), self._dialect.event)
        # One that begins alone hears nothing of others; with others under way it must not excuse their silence.
        self._heard = self._heard if self._active else time.monotonic()
        self._active += 1
        try:
            async with (
                aiohttp.ClientSession(timeout=waits) as session,
                await self._patient(session.post(f"{self.base}{self._dialect.complete}", json=body)) as answer,
            ):
                if answer.status != 200:
                    raise RequestError(f"HTTP {answer.status}: {_message(await answer.text())}")
                async for line, at in self._lines(answer.content):
                    chunk = counted.read(line, at)
                    if chunk is not None:
                        yield chunk
        except (aiohttp.ClientError, RequestError, ConnectionError) as error:
            await self._verdict(str(error) or type(error).__name__)
        finally:
            self._active -= 1
        wrong = counted.wrong()
        if wrong:
            raise RequestError(wrong)

    async def _lines(self, content: Any) -> AsyncIterator[tuple[bytes, float]]:
        """Whole lines and when they came. Raises EngineError (hang) when no request hears anything any more."""
        rest = b""
        while True:
            try:
                async with asyncio.timeout(self._stall / 4):
                    data = await content.readany()
            except TimeoutError:
                self._check_silence()
                continue
            at = self._heard = time.monotonic()
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                yield line, at

    async def _patient(self, wait: Awaitable[T]) -> T:
        """What ``wait`` gives, however long that takes, unless the engine has ended or hangs."""
        task = asyncio.ensure_future(wait)
        try:
            while not task.done():
                await asyncio.wait([task], timeout=self._stall / 4)
                if not task.done():
                    self._check_silence()
            return task.result()
        finally:
            task.cancel()

    def _check_silence(self) -> None:
        if self._kept.code() is not None or time.monotonic() - self._heard > self._stall:
            raise self._gone(hang=True)

    async def _verdict(self, said: str) -> None:
        """One failed request, or the end of the engine? Raises RequestError or EngineError."""
        loop = asyncio.get_running_loop()
        for _ in range(3):
            if self._kept.code() is not None:
                raise self._gone()
            if await loop.run_in_executor(None, self._healthy):
                raise RequestError(said)
            await asyncio.sleep(0.3)
        raise self._gone()

    def _healthy(self) -> bool:
        try:
            self._ask("/health", seconds=HEALTH_S)
        except (OSError, RequestError):
            return False
        return True

    def _gone(self, hang: bool = False) -> EngineError:
        code, text = self._kept.code(), self._kept.text()
        if hang and code is None:
            line = f"no request heard anything for {self._stall:g} s"
            return failures.named("hang", line, "measure", self._kept.tail())
        return failures.error(failures.recognise(text, code, serving=True), "measure", self._kept.tail())

    def score(self, sequences: Sequence[Sequence[int]], top: int) -> list[Score]:
        """Teacher-forced log-probabilities, ``top`` cut so that one answer holds at most SCORED of them."""
        return [self._score(list(sequence), top) for sequence in sequences]

    def _score(self, sequence: list[int], top: int) -> Score:
        count = len(sequence) - 1
        most = min(top, max(SCORED // max(count, 1), LEAST_TOP))
        body = {"model": self.model, "prompt": sequence, "max_tokens": 1, "temperature": 0,
                self._dialect.score_top: -1 if most > LEAST_TOP * 100 else most}  # fmt: skip
        found = self._call("/v1/completions", body)
        rows = found["choices"][0][self._dialect.score_top][1:]
        return _scored(rows, sequence[1:], most)

    def effective(self) -> Mapping[str, Any]:
        return self._effective

    def counters(self) -> Mapping[str, float]:
        """The server's own counts since the last reset, CPU seconds and memory of its whole process tree."""
        now = self._metrics()
        found = {k: v if k in self._dialect.gauges else v - self._zero.get(k, 0.0) for k, v in now.items()}
        seconds, held = self._kept.usage()
        return {**found, "cpu_seconds": seconds - self._cpu, "peak_bytes": float(held)}

    def reset(self) -> None:
        """Empty the prefix cache where the server can, and count from here."""
        if self._dialect.reset:
            self._call(self._dialect.reset, {})
        self._mark()

    def adopt(self, config: Config) -> bool:
        """No server here changes a setting without a launch."""
        return False

    def _mark(self) -> None:
        self._zero, self._cpu = self._metrics(), self._kept.usage()[0]

    def _metrics(self) -> dict[str, float]:
        if not self._dialect.counters:
            return {}
        return pick(self.ask("/metrics"), self._dialect.counters)

    def ask(self, path: str) -> str:
        """The body of a GET. A server that does not answer it has ended: EngineError."""
        return self._guarded(lambda: self._ask(path))

    def told(self, *paths: str) -> Any:
        """The JSON of the first path that this server answers with one; None when it has none of them."""
        for path in paths:
            try:
                return json.loads(self._ask(path))
            except (RequestError, ValueError):
                continue
            except OSError:
                raise self._gone() from None
        return None

    def _call(self, path: str, body: Any) -> Any:
        text = self._guarded(lambda: self._ask(path, json.dumps(body).encode()))
        return json.loads(text) if text.strip() else None

    def _guarded(self, call: Callable[[], str]) -> str:
        try:
            return call()
        except TimeoutError:
            raise self._gone(hang=True) from None
        except RequestError as error:
            if self._healthy():
                raise failures.named("crash", str(error), "measure", self._kept.tail()) from None
            raise self._gone() from None
        except OSError:
            end = time.monotonic() + 2  # the exit code may come a moment after the socket's end
            while self._kept.code() is None and time.monotonic() < end:
                time.sleep(0.05)
            raise self._gone() from None

    def _ask(self, path: str, body: bytes | None = None, seconds: float = CALL_S) -> str:
        request = urllib.request.Request(self.base + path, body, {"Content-Type": "application/json"})
        try:
            with _direct.open(request, timeout=seconds) as answer:
                text: str = answer.read().decode(errors="replace")
                return text
        except urllib.error.HTTPError as error:
            with error:
                said = _message(error.read().decode(errors="replace"))
            raise RequestError(f"{path} answered HTTP {error.code}: {said}") from None
        except urllib.error.URLError as error:
            raise error.reason if isinstance(error.reason, OSError) else OSError(str(error.reason)) from None


_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""A proxy in the environment is for the internet, not for the engine beside us."""


class _Count:
    """What one stream has given so far, and what the server says it gave."""

    def __init__(self, prompt: int, said: Callable[[Fields, int], Fields]) -> None:
        self._prompt, self._said, self._tokens = prompt, said, 0
        self._usage: Mapping[str, Any] | None = None
        self._finish = ""

    def read(self, line: bytes, at: float) -> Chunk | None:
        """The chunk of one server-sent line, if it holds any. Raises RequestError for an error event."""
        if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
            return None
        try:
            event = self._said(json.loads(line[5:]), self._tokens)
        except ValueError:
            raise RequestError(f"the server sent no JSON: {line[:80]!r}") from None
        if "error" in event:
            raise RequestError(_message(json.dumps(event)))
        self._usage = event.get("usage") or self._usage
        if not event.get("choices"):
            return None
        choice = event["choices"][0]
        tokens = tuple(choice.get("token_ids") or ())
        finish = choice.get("finish_reason")
        self._tokens += len(tokens)
        self._finish = finish or self._finish
        return Chunk(tokens, at, finish) if tokens or finish else None

    def wrong(self) -> str:
        """Why the server's own count contradicts the stream; empty when it does not."""
        if not self._finish:
            return "" if self._tokens else "the server sent no token"
        if self._usage is None:
            return "the server gave no usage to check its tokens against"
        said = (self._usage.get("prompt_tokens"), self._usage.get("completion_tokens"))
        if said != (self._prompt, self._tokens):
            return (
                f"the server counted {said[0]} prompt and {said[1]} output tokens, "
                f"but {self._prompt} were sent and {self._tokens} came"
            )
        return ""


def _message(text: str) -> str:
    """The sentence in an error body."""
    with contextlib.suppress(ValueError, AttributeError, KeyError, TypeError):
        table = json.loads(text)
        inner = table.get("error", table)
        return str(inner["message"] if isinstance(inner, dict) else inner)[:300]
    return " ".join(text.split())[:300]


def pick(text: str, wanted: Mapping[str, str]) -> dict[str, float]:
    """{our name: value} from Prometheus text, summed over labels; those that are absent or not finite are left out."""
    found: dict[str, float] = {}
    for ours, theirs in wanted.items():
        lines = re.findall(rf"^{re.escape(theirs)}(?:{{[^\n]*}})? (\S+)", text, re.MULTILINE)
        values = [float(value) for value in lines]
        if values and all(math.isfinite(value) for value in values):
            found[ours] = math.fsum(values)
    return found


def labels(text: str, metric: str) -> dict[str, str]:
    """The labels of the first sample of ``metric``; empty when it is absent."""
    line = re.search(rf"^{re.escape(metric)}{{([^\n]*)}} ", text, re.MULTILINE)
    return dict(re.findall(r'(\w+)="([^"]*)"', line.group(1))) if line else {}


def _scored(rows: Sequence[Mapping[str, Any]], nexts: Sequence[int], top: int) -> Score:
    """Rows of {token id: {logprob}} as arrays; each may hold the actual token beside its ``top`` likeliest."""
    ranked = [
        sorted(((float(entry["logprob"]), int(token)) for token, entry in row.items()), key=lambda pair: -pair[0])
        for row in rows
    ]
    width = min([top, *(len(pairs) for pairs in ranked)])
    return Score(
        np.array([row[str(token)]["logprob"] for row, token in zip(rows, nexts, strict=True)], np.float32),
        np.array([[token for _, token in pairs[:width]] for pairs in ranked], np.int32).reshape(len(ranked), width),
        np.array([[log for log, _ in pairs[:width]] for pairs in ranked], np.float32).reshape(len(ranked), width),
    )
