"""The child's side of kernel tuning: one operator, built as an engine builds it, checked and timed under any choice.

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
from torch import Tensor

from autotune.outcome import Status
from autotune.runtimes.native.kernels import tuning
from autotune.runtimes.native.kernels.process import Timing
from autotune.runtimes.native.kernels.tuning import Operator
from autotune.runtimes.native.quant.linear import Stored, make_linear

SAMPLES = 7
SAMPLE_SECONDS = 0.002
"""A sample repeats the product for at least this long: the clock and one interruption then weigh little."""
MOST_COPIES = 512
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
"""Largest error, relative to the answer's norm, by the type of the product; bf16 keeps eight bits."""


class Product:
    """One operator over fresh random weights. Raises NotImplementedError where the engine stores them otherwise."""

    def __init__(self, operator: Operator, footprint: int) -> None:
        self.operator = operator
        source = torch.Generator().manual_seed(operator.outputs * 1_000_003 + operator.inputs)
        shape = (operator.outputs, operator.inputs)
        weight = torch.randn(shape, generator=source, device="cpu") * operator.inputs**-0.5
        self.x = torch.randn(operator.rows, operator.inputs, generator=source, device="cpu")
        if torch.cuda.is_available():
            weight, self.x = weight.cuda(), self.x.cuda()
        self.footprint, self._next = footprint, 0
        storage, _, compute = operator.dtype.partition("-")
        kind, _, group = storage.partition("g")
        self.limit = TOLERANCE[compute or storage]
        bits = {"int8": 8, "int4": 4}.get(kind, 16)
        self._weight = (weight, bits, compute or storage, int(group or 64))
        self.copies: list[Stored] = [self._make()]
        if self.copies[0].dtype != operator.dtype:
            raise NotImplementedError(f"an engine stores {shape} as {self.copies[0].dtype}, not {operator.dtype}")
        self.reference = self.x.double() @ self.copies[0].dense().double().t()

    def _make(self) -> Stored:
        return make_linear(*self._weight)

    def describe(self) -> dict[str, Any]:
        """Backend, facts and defaults of `search_spaces.kernels.kernel_space`."""
        return dict(self.copies[0].tunable(self.operator.rows))

    def measure(self, choice: Mapping[str, Any]) -> Timing:
        """Take ``choice`` for every copy, check one answer and time them all."""
        tuning.use({self.operator.key: choice})
        count = min(max(self.footprint // max(self.copies[0].nbytes, 1), 1), MOST_COPIES)
        self.copies += [self._make() for _ in range(count - len(self.copies))]
        for copy in self.copies:
            copy.tune()
        answer = self.copies[-1](self.x).double()
        error = float((answer - self.reference).norm() / self.reference.norm().clamp(min=1e-30))
        if not error <= self.limit:  # also when it is not a number
            return Timing(error, self.limit, ())
        calls = max(1, round(SAMPLE_SECONDS / max(self._sample(1), 1e-9)))
        return Timing(error, self.limit, tuple(self._sample(calls) for _ in range(SAMPLES)))

    def _sample(self, calls: int) -> float:
        """Seconds a call, a mean of ``calls``; each takes the copy that was used longest ago."""
        x, count, first = self.x, len(self.copies), self._next
        batch = [self.copies[(first + index) % count] for index in range(calls)]
        self._next = (first + calls) % count
        _wait(x)
        start = time.perf_counter()
        for copy in batch:
            copy(x)
        _wait(x)
        return (time.perf_counter() - start) / calls


def _wait(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize()


def serve(pipe: Connection, key: str, footprint: int) -> None:
    """Describe the operator of ``key``, then answer each choice with a `Timing` until the pipe closes."""
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    try:
        product = Product(Operator.parse(key), footprint)
        pipe.send(("ready", product.describe()))
        while True:
            choice = pipe.recv()
            try:
                pipe.send(("timed", product.measure(choice)))
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
