"""The interface of an engine: `Runtime` launches configurations, `Endpoint` talks to a running one. Knows no engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from search_spaces import Config


class RequestError(Exception):
    """One request that the engine refused or broke off while it goes on serving others (an HTTP 500, say)."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One request: ``prompt`` token ids in, at most ``max_tokens`` out. Temperature 0 is greedy."""

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = True


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens that one engine step produced for a request, with the `time.monotonic` second at which it produced them.

    ``finish`` is ``length`` or ``stop`` on the last chunk, else ``None``.
    """

    tokens: tuple[int, ...]
    at: float
    finish: str | None = None


@dataclass(frozen=True, slots=True)
class Score:
    """Teacher-forced log-probabilities (natural log) of one sequence of T tokens: position i predicts token i + 1.

    ``logprobs``: [T-1] of the actual next tokens; ``ids``, ``top``: [T-1, k], the k likeliest tokens and their
    log-probabilities, in descending order. With k equal to the vocabulary the whole distribution is there.
    """

    logprobs: NDArray[np.float32]
    ids: NDArray[np.int32]
    top: NDArray[np.float32]


class Endpoint(Protocol):
    """A configuration that is running.

    A failure of the engine raises `outcome.EngineError` from any method; of one request only, `RequestError`.
    """

    def stream(self, generation: Generation) -> AsyncIterator[Chunk]:
        """Generate; closing the iterator early aborts the request."""

    def score(self, sequences: Sequence[Sequence[int]], top: int) -> list[Score]:
        """Score given tokens; ``top`` is cut to the vocabulary size."""

    def effective(self) -> Mapping[str, Any]:
        """The configuration that really runs, read back from the engine: knob names, plus engine facts it adds."""

    def counters(self) -> Mapping[str, float]:
        """Counts and gauges since the last reset: cache hits, preemptions, bytes, peak memory, compile seconds …"""

    def reset(self) -> None:
        """Forget cached prefixes and counters; running requests must have ended."""

    def adopt(self, config: Config) -> bool:
        """Run ``config``, which differs in live knobs alone, from now on, as `reset`; False where that cannot be."""


class Runtime(Protocol):
    """An engine that can be launched. On every way out of `launch` its processes are gone and its memory is back."""

    name: str

    def version(self) -> Mapping[str, str]:
        """Everything about the build that can change a measurement: versions and digests, taken from the engine."""

    def capabilities(self) -> Mapping[str, Any]:
        """Facts that narrow the space here: devices, cores, layers, and ``refused``: {"knob=value": reason}."""

    def command(self, config: Config) -> list[str]:
        """The argv that starts ``config`` outside the tuner; used by --dry-run and exporters alike."""

    def launch(self, config: Config, log: Path) -> AbstractContextManager[Endpoint]:
        """Start ``config``, ready to serve, its log in ``log``. Raises EngineError(phase="launch")."""
