"""How a decode step is run: at its own size, or padded to a bucket and replayed. Knows no requests and no scheduler."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from autotune.runtimes.native.model import Decoder, Step

WARM_RUNS = 2
"""Runs before a capture: lazy initialisation (library handles, kernel compilation) may not happen inside one."""
SHORTEST = 256
"""Tokens of the shortest context bucket; halving a shorter one saves nothing that can be measured."""


class GraphError(RuntimeError):
    """A graph that could not be captured; the message names its bucket."""


class Capture(Protocol):
    """One recorded computation on fixed tensors."""

    def record(self, run: Callable[[], Tensor]) -> Tensor:
        """Record what ``run`` does; the tensor that each replay fills."""

    def replay(self) -> None: ...


class Recorder(Protocol):
    """Makes captures that share one memory pool. ``free_bytes`` is what the device has left."""

    def new(self) -> Capture: ...

    def free_bytes(self) -> int: ...


class CudaCapture:
    """A CUDA graph in a shared pool: a replay's output is overwritten by the next replay of any of them."""

    def __init__(self, pool: Any) -> None:
        self._graph, self._pool = torch.cuda.CUDAGraph(), pool

    def record(self, run: Callable[[], Tensor]) -> Tensor:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_RUNS):
                run()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(self._graph, pool=self._pool):
            return run()

    def replay(self) -> None:
        self._graph.replay()


class CudaRecorder:
    """CUDA graphs of the current device."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def new(self) -> Capture:
        return CudaCapture(self._pool)

    def free_bytes(self) -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info()[0])


@dataclass(frozen=True, slots=True)
class Frame:
    """What a step needs beside its rows: tokens a block, and the state slot and block that padding may write to."""

    size: int
    slot: int
    block: int

    def pad(self, rows: Tensor, count: int, blocks: int) -> Tensor:
        """``rows`` [Q, 3 + B] (see `model.Step.of`) as [count, 3 + blocks]; added rows touch only the scratch."""
        filler = torch.tensor([0, self.slot, 0, *[self.block] * blocks], device="cpu")
        padded = filler.repeat(count, 1)
        padded[: len(rows), 3:] = self.block
        padded[: len(rows), : rows.shape[1]] = rows
        return padded


@dataclass(frozen=True, slots=True)
class Buckets:
    """The shapes that are captured: every pair of ``rows`` sequences and ``blocks`` of context, both ascending."""

    rows: tuple[int, ...]
    blocks: tuple[int, ...]

    @classmethod
    def of(cls, up_to: int, blocks: int, size: int, every: bool) -> Buckets:
        """Powers of two of sequences up to ``up_to``, and of context up to ``blocks`` (only the whole unless
        ``every``); the last of each is exact."""
        shortest = max(SHORTEST // size, 1)
        return cls(_powers(1, up_to), _powers(min(shortest, blocks), blocks) if every else (blocks,))

    def fit(self, rows: int, blocks: int) -> tuple[int, int] | None:
        """The smallest shape that holds a step, None where there is none."""
        count = next((n for n in self.rows if n >= rows), None)
        length = next((n for n in self.blocks if n >= blocks), None)
        return None if count is None or length is None else (count, length)


def _powers(low: int, high: int) -> tuple[int, ...]:
    found = []
    while low < high:
        found.append(low)
        low *= 2
    return (*found, high)


class Steps:
    """Decode steps operation by operation, at their own size. ``send`` moves a host tensor to the device."""

    def __init__(self, decoder: Decoder, frame: Frame, send: Callable[[Tensor], Tensor]) -> None:
        self.decoder, self.frame, self.send = decoder, frame, send

    def __call__(self, rows: Tensor) -> Tensor:
        """Host ``rows`` [Q, 3 + B] → logits [Q, V], valid until the next call."""
        length = int(rows[:, 2].max()) + 1
        sent = self.send(rows)
        return self.decoder.decode(sent[:, 0], Step.of(sent, self.frame.size, length))

    def reset(self) -> None:
        """Forget the counts."""

    def counters(self) -> dict[str, float]:
        """What only this way of running counts."""
        return {}


@dataclass(frozen=True, slots=True)
class _Recorded:
    rows: Tensor
    logits: Tensor
    capture: Capture


class CapturedSteps(Steps):
    """Steps padded to the nearest bucket and replayed; one that fits no bucket runs as in `Steps`.

    ``seconds`` and ``nbytes`` are what capturing cost. Raises GraphError naming the bucket that failed.
    """

    def __init__(
        self,
        decoder: Decoder,
        frame: Frame,
        send: Callable[[Tensor], Tensor],
        buckets: Buckets,
        recorder: Recorder,
    ) -> None:
        super().__init__(decoder, frame, send)
        self.buckets, self._graphs = buckets, dict[tuple[int, int], _Recorded]()
        start, free = time.monotonic(), recorder.free_bytes()
        # Largest first: every smaller capture then fits into the memory that the pool already has.
        for count in reversed(buckets.rows):
            for blocks in reversed(buckets.blocks):
                self._graphs[count, blocks] = self._record(count, blocks, recorder)
        self.nbytes = max(free - recorder.free_bytes(), 0)
        self.seconds = time.monotonic() - start
        self.reset()

    def _record(self, count: int, blocks: int, recorder: Recorder) -> _Recorded:
        size = self.frame.size
        rows = self.send(self.frame.pad(torch.empty(0, 3, dtype=torch.int64), count, blocks)).clone()
        try:
            capture = recorder.new()
            logits = capture.record(lambda: self.decoder.decode(rows[:, 0], Step.of(rows, size, blocks * size)))
        except RuntimeError as error:
            raise GraphError(f"capturing {count} sequences × {blocks * size} tokens failed: {error}") from error
        return _Recorded(rows, logits, capture)

    def __call__(self, rows: Tensor) -> Tensor:
        bucket = self.buckets.fit(len(rows), rows.shape[1] - 3)
        if bucket is None:
            self.eager_steps += 1
            return super().__call__(rows)
        graph = self._graphs[bucket]
        graph.rows.copy_(self.send(self.frame.pad(rows, *bucket)))
        graph.capture.replay()
        self.replays += 1
        self.rows += bucket[0]
        self.padding += bucket[0] - len(rows)
        return graph.logits[: len(rows)]

    def reset(self) -> None:
        self.eager_steps = self.replays = self.rows = self.padding = 0

    def counters(self) -> dict[str, float]:
        return {
            "graph_steps": float(self.replays),
            "graph_rows": float(self.rows),
            "graph_padding_rows": float(self.padding),
            "eager_steps": float(self.eager_steps),
            "graph_seconds": self.seconds,
            "graph_bytes": float(self.nbytes),
        }
