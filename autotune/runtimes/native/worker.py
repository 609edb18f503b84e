"""The child's side of a launch: builds an engine, then steps it and answers the pipe until the pipe closes."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from autotune.outcome import Status
from autotune.runtimes.native.config import CheckpointError
from autotune.runtimes.native.engine import Engine
from autotune.runtimes.native.probe import probe

MEMORY_WORDS = ("not enough memory", "can't allocate memory", "out of memory", "Cannot allocate memory")


def run(pipe: Connection, folder: Path, config: Mapping[str, Any]) -> None:
    """Serve one launch. An empty ``config`` asks only what this machine can run."""
    if not config:
        pipe.send(("ready", probe()))
        return
    try:
        engine = Engine(folder, config)
        pipe.send(("ready", engine.effective()))
    except Exception as error:
        traceback.print_exc()
        pipe.send(("failed", *classify(error)))
        return
    try:
        _serve(engine, pipe)
    except (EOFError, OSError):
        return
    except Exception as error:
        traceback.print_exc()
        pipe.send(("failed", *classify(error)))


def classify(error: BaseException) -> tuple[str, str]:
    """(status, one-line reason) of an exception."""
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    if isinstance(error, MemoryError) or any(words in str(error) for words in MEMORY_WORDS):
        return Status.OOM, reason
    if isinstance(error, (CheckpointError, NotImplementedError)):
        return Status.UNSUPPORTED, str(error)
    return Status.CRASH, reason


def _serve(engine: Engine, pipe: Connection) -> None:
    while True:
        while not engine.busy or pipe.poll():
            _answer(engine, pipe, pipe.recv())
        events = engine.step()
        if events:
            pipe.send(("events", time.monotonic(), events))


def _answer(engine: Engine, pipe: Connection, message: tuple[Any, ...]) -> None:
    kind, number, *rest = message
    if kind == "add":
        try:
            engine.add(number, *rest)
        except ValueError as error:
            pipe.send(("refused", number, str(error)))
    elif kind == "abort":
        engine.abort(number)
    else:
        call: Callable[..., Any] = getattr(engine, rest[0])
        try:
            pipe.send(("result", number, call(*rest[1:])))
        except ValueError as error:
            pipe.send(("result", number, error))
