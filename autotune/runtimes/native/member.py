"""One rank's process: an engine that obeys the turns of the front. Knows nobody but the front and its mesh."""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping
from collections.abc import Sequence as Ids
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from autotune.runtimes.base import Score
from autotune.runtimes.native.collectives import Mesh, PeerError
from autotune.runtimes.native.engine import Engine, Event
from autotune.runtimes.native.layout import Place
from autotune.runtimes.native.worker import answer, classify


class Member(Engine):
    """The engine of one rank, which knows its place and what its exchanges cost."""

    def __init__(self, folder: Path, config: Mapping[str, Any], place: Place, mesh: Mesh | None) -> None:
        super().__init__(folder, config, mesh=mesh)
        self.place, self.mesh = place, mesh
        self.working_seconds = 0.0

    def step(self) -> list[Event]:
        start = time.perf_counter()
        events = super().step()
        self.working_seconds += time.perf_counter() - start
        return events

    def score(self, sequences: Ids[Ids[int]], top: int) -> list[Score]:
        start = time.perf_counter()
        found = super().score(sequences, top)
        self.working_seconds += time.perf_counter() - start
        return found

    def reset(self) -> None:
        super().reset()
        self.working_seconds = 0.0
        if self.mesh is not None:
            self.mesh.reset()

    def counters(self) -> dict[str, float]:
        """Also seconds in steps and scores, those of them in exchanges, and bytes exchanged."""
        exchanged = {} if self.mesh is None else self.mesh.counters()
        return {**super().counters(), "working_seconds": self.working_seconds, **exchanged}

    def effective(self) -> dict[str, Any]:
        """Also the layout as it came about: sizes of the groups, and the layers of this stage."""
        layers = len(self.decoder.layers)
        sizes = {"tp": 1, "pp": 1, "backend": "none"} if self.mesh is None else self.mesh.sizes()
        return {**super().effective(), **sizes, "stage": (self.place.stage, layers)}


def run(pipe: Connection, place: Place, folder: Path, config: Mapping[str, Any], store: str) -> None:
    """Load, then take turns until the front ends this process. Says why, should it fail."""
    phase = "launch"
    try:
        mesh = Mesh(place, store) if place.layout.replica > 1 else None
        engine = Member(folder, config, place, mesh)
        pipe.send(("ready", engine.effective()))
        phase = "measure"
        while True:
            _turn(engine, pipe)
    except (EOFError, BrokenPipeError):
        return
    except Exception as error:
        traceback.print_exc()
        pipe.send(("failed", *classify(error, phase), isinstance(error, PeerError)))


def _turn(engine: Member, pipe: Connection) -> None:
    """Obey the orders, take one step, and answer with replies, whether there is more to do, and the step's events."""
    orders, replies = pipe.recv(), list[Any]()
    for order in orders:
        answer(engine, replies.append, order)
    events = engine.step() if engine.busy else []
    pipe.send((replies, engine.busy, time.monotonic(), events))
