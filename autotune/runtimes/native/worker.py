"""The child's side of a launch: builds an engine, then steps it and answers the pipe until the pipe closes."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from autotune.outcome import Status
from autotune.runtimes.native.capture import GraphError
from autotune.runtimes.native.config import CheckpointError
from autotune.runtimes.native.engine import Engine
from autotune.runtimes.native.kernels import tuning
from autotune.runtimes.native.layout import Layout
from autotune.runtimes.native.probe import probe
from search_spaces import SpaceError

MEMORY_WORDS = ("not enough memory", "can't allocate memory", "out of memory", "Cannot allocate memory")


def probed(pipe: Connection) -> None:
    """Say what this machine can run."""
    pipe.send(("ready", probe()))


def sensed(pipe: Connection, folder: Path, group: int) -> None:
    """Say what narrow weights would cost the model; see `quant.fisher.sensitivities`."""
    from autotune.runtimes.native.quant.fisher import sensitivities, stored

    try:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        pipe.send(("ready", sensitivities(folder, stored(group))))
    except Exception as error:
        traceback.print_exc()
        pipe.send(("failed", *classify(error, "sensitivities")))


def run(pipe: Connection, folder: Path, config: Mapping[str, Any], kernels: tuning.Entries) -> None:
    """Serve one launch with this table of tuned kernels."""
    try:
        tuning.use(kernels)
        layout = Layout.of(config)
        if layout.world > 1:
            from autotune.runtimes.native import ranks

            ranks.serve(pipe, folder, config, layout)
            return
        engine = Engine(folder, config)
        pipe.send(("ready", engine.effective()))
    except Exception as error:
        traceback.print_exc()
        pipe.send(("failed", *classify(error, "launch")))
        return
    try:
        _serve(engine, pipe)
    except (EOFError, OSError):
        return
    except Exception as error:
        traceback.print_exc()
        pipe.send(("failed", *classify(error, "measure")))


def classify(error: BaseException, phase: str) -> tuple[str, str, str]:
    """(status, phase, one-line reason) of an exception; a graph that cannot be captured has a phase of its own."""
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    uncaptured = isinstance(error, GraphError) and "captur" in str(error.__cause__).lower()
    phase = "graphs" if isinstance(error, GraphError) else phase
    if isinstance(error, MemoryError) or any(words in str(error) for words in MEMORY_WORDS):
        return Status.OOM, phase, reason
    if isinstance(error, (CheckpointError, NotImplementedError, SpaceError)) or uncaptured:
        return Status.UNSUPPORTED, phase, str(error)
    return Status.CRASH, phase, reason


def _serve(engine: Engine, pipe: Connection) -> None:
    while True:
        while not engine.busy or pipe.poll():
            answer(engine, pipe.send, pipe.recv())
        events = engine.step()
        if events:
            pipe.send(("events", time.monotonic(), events))


def answer(engine: Engine, send: Callable[[Any], None], message: tuple[Any, ...]) -> None:
    """Obey one message of `runtime.NativeEndpoint`; what there is to reply goes to ``send``."""
    kind, number, *rest = message
    if kind == "add":
        try:
            engine.add(number, *rest)
        except ValueError as error:
            send(("refused", number, str(error)))
    elif kind == "abort":
        engine.abort(number)
    else:
        call: Callable[..., Any] = getattr(engine, rest[0])
        try:
            send(("result", number, call(*rest[1:])))
        except ValueError as error:
            send(("result", number, error))
