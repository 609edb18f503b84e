"""The native engine in the caller's own process: prompts in, completions out. Launches nothing and serves nothing."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from autotune.runtimes.base import Score
from autotune.runtimes.native.kernels import tuning
from autotune.runtimes.native.layout import Layout
from autotune.runtimes.native.text import Growing, Text
from search_spaces import Value, load

Event = tuple[Any, Sequence[int], str | None]
"""A request's id, the tokens that one step gave it, and why it ended, if it did."""


class Stepping(Protocol):
    """What is needed of an engine, by this module and by the server."""

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

    def step(self) -> Sequence[Event]:
        """One batch of prefill and decode."""

    def abort(self, request_id: Any) -> None:
        """Forget a request; unknown ones are ignored."""

    def score(self, sequences: Sequence[Sequence[int]], top: int) -> list[Score]:
        """Teacher-forced log-probabilities."""

    def effective(self) -> Mapping[str, Any]:
        """The configuration that really runs."""

    def counters(self) -> Mapping[str, float]:
        """Counts and gauges."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What one prompt gave. ``text`` is empty without a tokenizer; ``finish`` is ``length`` or ``stop``."""

    text: str
    tokens: tuple[int, ...]
    finish: str


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a completion as it grows; ``finish`` is None until the last."""

    text: str
    tokens: tuple[int, ...]
    finish: str | None


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to go on from a prompt. Temperature 0 takes the likeliest token; ``seed`` fixes every other draw."""

    max_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False


class LLM:
    """A checkpoint under one configuration. A context manager; threads may share it, one step at a time."""

    def __init__(
        self, model: str | Path, config: Mapping[str, Value] | None = None, kernels: tuning.Entries | None = None
    ) -> None:
        """Load ``model``; knobs that ``config`` leaves out take the space's defaults.

        ``kernels`` is a tuned table; it is the whole process's until another LLM is made.

        Raises SpaceError for a knob or value that the engine does not have, and the engine's own one-line errors.
        """
        self.folder = Path(model)
        self.config = load("native").complete(config or {})
        self.text = Text(self.folder)
        self._engine: Stepping | None = _engine(self.folder, self.config, kernels or {})
        self._lock = threading.Lock()
        self._waiting: dict[int, deque[tuple[Sequence[int], str | None]]] = {}
        self._next = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Drop the engine and its memory. Closing twice is allowed; anything else afterwards is an error."""
        if self._engine is not None:
            getattr(self._engine, "close", lambda: None)()  # ranks are processes; an engine in this one is only dropped
        self._engine = None

    @property
    def engine(self) -> Stepping:
        """The engine itself. Raises RuntimeError once closed."""
        if self._engine is None:
            raise RuntimeError("this LLM is closed; make a new one")
        return self._engine

    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        max_tokens: int = 64,
        temperature: float = 0.0,
        seed: int = 0,
        ignore_eos: bool = False,
    ) -> list[Completion]:
        """Complete prompts, given as texts or as token ids, together; answers come in the prompts' order.

        Prompt i draws with ``seed + i``, so an answer does not depend on what else runs. Raises TextError for text
        without a tokenizer, ValueError for a prompt that is empty or does not fit.
        """
        if isinstance(prompts, str):
            raise TypeError("prompts is one text; wrap it in a list: generate([prompt])")
        asked = [self._ids(prompt) for prompt in prompts]
        numbers: list[int] = []
        try:
            for index, ids in enumerate(asked):
                numbers.append(self._submit(ids, Sampling(max_tokens, temperature, seed + index, ignore_eos)))
            return [self._whole(number) for number in numbers]
        finally:
            for number in numbers:
                self._forget(number)

    def stream(self, prompt: str | Sequence[int], sampling: Sampling | None = None) -> Iterator[Piece]:
        """Complete one prompt, giving out each step's part. Begins when first asked; closing it early aborts."""
        growing = Growing(self.text) if self.text.there else None
        number = self._submit(self._ids(prompt), sampling or Sampling())
        try:
            for tokens, finish in self._steps(number):
                text = growing.push(tokens, last=finish is not None) if growing else ""
                yield Piece(text, tuple(tokens), finish)
        finally:
            self._forget(number)

    def score(self, sequences: Sequence[str] | Sequence[Sequence[int]], top: int = 1) -> list[Score]:
        """Log-probabilities of given texts or token ids, and the ``top`` likeliest tokens at each position."""
        with self._lock:
            return self.engine.score([self._ids(sequence) for sequence in sequences], top)

    @property
    def vocabulary(self) -> int:
        """How many token ids there are."""
        from autotune.model import facts

        return facts(self.folder).vocab

    @property
    def capacity(self) -> int:
        """The most tokens that a prompt and its answer may have together."""
        return int(self.config["kv_tokens"])

    def effective(self) -> Mapping[str, Any]:
        """The configuration that really runs, read back from the engine."""
        return self.engine.effective()

    def counters(self) -> Mapping[str, float]:
        """The engine's counts and gauges: cache hits, preemptions, bytes, seconds of loading."""
        return self.engine.counters()

    def _ids(self, prompt: str | Sequence[int]) -> list[int]:
        return self.text.encode(prompt) if isinstance(prompt, str) else [int(token) for token in prompt]

    def _submit(self, prompt: Sequence[int], sampling: Sampling) -> int:
        with self._lock:
            self._next += 1
            self.engine.add(
                self._next, prompt, sampling.max_tokens, sampling.temperature, sampling.seed, sampling.ignore_eos
            )
            self._waiting[self._next] = deque()
            return self._next

    def _forget(self, number: int) -> None:
        with self._lock:
            if self._waiting.pop(number, None) is not None and self._engine is not None:
                self._engine.abort(number)

    def _steps(self, number: int) -> Iterator[tuple[Sequence[int], str | None]]:
        """What each step gives one request, until it ends. Whose turn pays for a step does not matter."""
        mine = self._waiting[number]
        finish: str | None = None
        while finish is None:
            with self._lock:
                if not mine:  # else another thread's step has served this request meanwhile
                    for other, tokens, ended in self.engine.step():
                        if other in self._waiting:
                            self._waiting[other].append((tokens, ended))
            while mine:
                tokens, finish = mine.popleft()
                if finish is not None:
                    del self._waiting[number]
                yield tokens, finish

    def _whole(self, number: int) -> Completion:
        steps = list(self._steps(number))
        tokens = tuple(token for new, _ in steps for token in new)
        return Completion(self.text.decode(tokens) if self.text.there else "", tokens, steps[-1][1] or "")


def _engine(folder: Path, config: Mapping[str, Value], kernels: tuning.Entries) -> Stepping:
    """One rank is an engine in this process, several are processes of their own."""
    if Layout.of(config).world > 1:
        from autotune.runtimes.native.remote import RemoteEngine

        return RemoteEngine(folder, config, kernels)
    from autotune.runtimes.native.engine import Engine

    tuning.use(kernels)
    return Engine(folder, config)
