"""The child's side of kernel tuning: one operator, checked and timed under any choice.

Timed are the engine's own objects, called one after another over as many copies as the engine would read between two
uses of one, so that weights come from where they come from in a decode step: the last-level cache, or memory.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch

from autotune.outcome import Status
from autotune.runtimes.native.kernels import tuning
from autotune.runtimes.native.kernels.process import Timing
from autotune.runtimes.native.kernels.products import Product
from autotune.runtimes.native.kernels.tuning import Operator
from autotune.runtimes.native.quant.linear import Stored

SAMPLES = (5, 31)
SAMPLE_SECONDS = 0.0005
"""Short enough that most samples fall between two interruptions, so that their median has none."""
MEASURE_SECONDS = 0.025
MOST_COPIES = 512


class Bench:
    """One operator over fresh random weights of ``footprint`` bytes together."""

    def __init__(self, operator: Operator, footprint: int) -> None:
        self.operator, self.product = operator, Product(operator)
        self.count = min(max(footprint // max(self.product.first.nbytes, 1), 1), MOST_COPIES)
        self.copies: list[Stored] = []
        self._next = 0

    def measure(self, choice: Mapping[str, Any]) -> Timing:
        """Take ``choice`` for every copy, check one answer and time them all."""
        if not self.copies:
            self.reference = self.product.reference()
            self.copies = [self.product.copy() for _ in range(self.count)]
        tuning.use({self.operator.key: choice})
        for copy in self.copies:
            copy.tune()
        answer, limit = self.copies[-1](self.product.x).double(), self.product.limit
        error = float((answer - self.reference).norm() / self.reference.norm().clamp(min=1e-30))
        if not error <= limit:  # also when it is not a number
            return Timing(error, limit, ())
        once = max(min(self._sample(1) for _ in range(3)), 1e-9)
        calls = max(1, round(SAMPLE_SECONDS / once))
        samples = min(max(round(MEASURE_SECONDS / (calls * once)), SAMPLES[0]), SAMPLES[1])
        return Timing(error, limit, tuple(self._sample(calls) for _ in range(samples)))

    def _sample(self, calls: int) -> float:
        """Seconds a call, a mean of ``calls``; each takes the copy that was used longest ago."""
        x, first = self.product.x, self._next
        batch = [self.copies[(first + index) % self.count] for index in range(calls)]
        self._next = (first + calls) % self.count
        start = _clock()
        for copy in batch:
            copy(x)
        return (_clock() - start) / calls


def _clock() -> float:
    """Seconds when all work so far is done. On a CPU this thread's own: the products run on no other, and what other
    processes take meanwhile is not the kernel's."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.thread_time()


def serve(pipe: Connection, key: str, footprint: int) -> None:
    """Describe the operator of ``key``, then answer each choice with a `Timing` until the pipe closes."""
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    try:
        bench = Bench(Operator.parse(key), footprint)
        pipe.send(("ready", bench.product.first.tunable(bench.operator.rows)))
        while True:
            choice = pipe.recv()
            try:
                pipe.send(("timed", bench.measure(choice)))
            except (RuntimeError, ValueError, NotImplementedError) as error:
                traceback.print_exc()
                pipe.send(("failed", *classify(error)))
    except (EOFError, OSError):
        return
    except Exception as error:
        traceback.print_exc()
        pipe.send(("failed", *classify(error)))


def classify(error: BaseException) -> tuple[str, str]:
    """(status, one-line reason) of an exception."""
    from autotune.runtimes.native import worker

    status, _, reason = worker.classify(error, "measure")
    if status == Status.CRASH and "out of resource" in reason:  # what Triton says of shared memory and registers
        return Status.UNSUPPORTED, reason
    return status, reason
