"""Several engine processes as one: a front that forks them, deals out requests, and ends all when one ends.

Each rank runs an engine; those of one replica get the same orders and step together. The front computes nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from autotune.outcome import Status
from autotune.runtimes.native.layout import Layout, Place
from autotune.runtimes.native.merge import merge
from autotune.runtimes.native.zygote import die_with_parent, died

CULPRIT_SECONDS = 3.0
"""How long a broken exchange waits for news of the rank that broke it, before it is the reason itself."""
Message = tuple[Any, ...]


class RankError(RuntimeError):
    """A rank ended or failed; ``status``, the phase (empty: the present one) and the message say why."""

    def __init__(self, status: Status, reason: str, phase: str = "") -> None:
        super().__init__(reason)
        self.status, self.phase = status, phase


@dataclass(frozen=True, slots=True)
class Failure:
    """What a rank said of its end. ``bereft``: it failed for want of another rank."""

    status: Status
    phase: str
    reason: str
    bereft: bool


@dataclass(slots=True, eq=False)
class Rank:
    """One process; ``failed`` once it said so."""

    place: Place
    pid: int
    pipe: Connection
    failed: Failure | None = None

    @property
    def name(self) -> str:
        layout = self.place.layout
        return f"rank {self.place.replica * layout.replica + self.place.rank} of {layout.world}"


@dataclass(slots=True, eq=False)
class Replica:
    """The ranks of one copy of the model. ``orders`` wait for the end of the turn that ``answers`` are missing of."""

    ranks: list[Rank]
    orders: list[Message] = field(default_factory=list)
    live: set[int] = field(default_factory=set)
    answers: dict[Rank, Message] | None = None
    busy: bool = False

    def turn(self) -> None:
        """Hand everything ordered, and a step, to all ranks alike; nothing while they are at it."""
        if self.answers is None and (self.orders or self.busy):
            for rank in self.ranks:
                with contextlib.suppress(OSError):  # a dead one is found out when its answer is read
                    rank.pipe.send(self.orders)
            self.orders, self.answers = [], {}


@dataclass(slots=True)
class Call:
    """A question to all ranks: its name, and the results by replica and rank as they come."""

    name: str
    results: dict[tuple[int, int], Any] = field(default_factory=dict)


def serve(pipe: Connection, folder: Path, config: Mapping[str, Any], layout: Layout) -> None:
    """Run ``layout`` until ``pipe`` closes, answering as `worker.run` does. No thread may exist in this process."""
    front = Front(pipe, layout, config)
    try:
        front.start(folder)
        while True:
            front.turn()
    except RankError as error:
        front.end()  # first, so that nobody who reads the reason finds a process left
        with contextlib.suppress(OSError):
            pipe.send(("failed", error.status, error.phase or front.phase, str(error)))
    except (EOFError, OSError):
        return
    finally:
        front.end()


class Front:
    """One engine to the tuner; to the ranks the one that says when to step."""

    def __init__(self, pipe: Connection, layout: Layout, config: Mapping[str, Any]) -> None:
        self.pipe, self.layout, self.config = pipe, layout, config
        self.ranks: list[Rank] = []
        self.replicas: list[Replica] = []
        self.calls: dict[int, Call] = {}
        self.phase = "launch"

    def start(self, folder: Path) -> None:
        """Fork the ranks and wait until all have loaded. Raises RankError."""
        with contextlib.ExitStack() as stack:
            for replica in range(self.layout.dp):
                # Ranks meet at a file without a name: nobody else finds it, and no end of whomever leaves it behind.
                meeting = stack.enter_context(tempfile.TemporaryFile())
                first = replica * self.layout.replica
                for number in range(first, first + self.layout.replica):
                    self._fork(self.layout.place(number), folder, f"/proc/self/fd/{meeting.fileno()}")
                self.replicas.append(Replica(self.ranks[first:]))
            ready: dict[Rank, Message] = {}
            while len(ready) < len(self.ranks):
                for rank, message in self._read([r for r in self.ranks if r not in ready]):
                    ready[rank] = message
        found = [[ready[rank][1] for rank in replica.ranks] for replica in self.replicas]
        self.pipe.send(("ready", merge("effective", found, self.config)))
        self.phase = "measure"

    def _fork(self, place: Place, folder: Path, store: str) -> None:
        ours, theirs = Pipe()
        front = os.getpid()
        pid = os.fork()
        if pid == 0:
            die_with_parent()
            if os.getppid() == front:
                for end in (self.pipe, ours, *(rank.pipe for rank in self.ranks)):
                    end.close()
                from autotune.runtimes.native.member import run

                run(theirs, place, folder, self.config, store)
            os._exit(0)
        theirs.close()
        self.ranks.append(Rank(place, pid, ours))

    def turn(self) -> None:
        """Wait for whoever speaks next, and deal with it. Raises RankError, or EOFError when the tuner is gone."""
        for replica in self.replicas:
            replica.turn()
        ready = wait([self.pipe, *(rank.pipe for rank in self.ranks)])
        for rank, message in self._read([rank for rank in self.ranks if rank.pipe in ready]):
            self._answered(rank, message)
        if self.pipe in ready:
            self._order(self.pipe.recv())

    def _order(self, message: Message) -> None:
        kind, number, *rest = message
        if kind == "add":
            replica = min(self.replicas, key=lambda r: len(r.live))
            replica.live.add(number)
            replica.orders.append(message)
        elif kind == "abort":
            for replica in self.replicas:
                if number in replica.live:
                    replica.live.remove(number)
                    replica.orders.append(message)
        else:
            self.calls[number] = Call(rest[0])
            for index, replica in enumerate(self.replicas):
                if rest[0] == "score":  # each replica scores some of the sequences
                    replica.orders.append((kind, number, "score", rest[1][index :: self.layout.dp], *rest[2:]))
                else:
                    replica.orders.append(message)

    def _answered(self, rank: Rank, message: Message) -> None:
        replica = self.replicas[rank.place.replica]
        assert replica.answers is not None
        replica.answers[rank] = message
        if len(replica.answers) < len(replica.ranks):
            return
        first, *others = (replica.answers[rank] for rank in replica.ranks)
        for other, answer in zip(replica.ranks[1:], others, strict=True):
            if answer[3:] != first[3:]:
                raise RankError(Status.CRASH, f"{other.name} and {replica.ranks[0].name} computed different tokens")
        for place, answer in enumerate((first, *others)):
            for reply in answer[0]:
                self._reply(replica, place, reply)
        _, replica.busy, moment, events = first
        replica.answers = None
        replica.live -= {number for number, _, finish in events if finish is not None}
        if events:
            self.pipe.send(("events", moment, events))

    def _reply(self, replica: Replica, place: int, reply: Message) -> None:
        kind, number, what = reply
        if kind == "refused":
            if place == 0:
                replica.live.discard(number)
                self.pipe.send(reply)
            return
        call = self.calls[number]
        call.results[self.replicas.index(replica), place] = what
        if len(call.results) == len(self.ranks):
            del self.calls[number]
            size = self.layout.replica
            found = [[call.results[r, i] for i in range(size)] for r in range(self.layout.dp)]
            errors = [one for group in found for one in group if isinstance(one, Exception)]
            self.pipe.send(("result", number, errors[0] if errors else merge(call.name, found, self.config)))

    def _read(self, ranks: list[Rank]) -> list[tuple[Rank, Message]]:
        """What these ranks say next, of all that have something to say. Raises RankError when one has failed."""
        ready = wait([rank.pipe for rank in ranks]) if ranks else []
        found = []
        for rank in ranks:
            if rank.pipe in ready:
                try:
                    message = rank.pipe.recv()
                except (EOFError, OSError):
                    raise self._cause() from None
                if message[0] == "failed":
                    rank.failed = Failure(*message[1:])
                    raise self._cause()
                found.append((rank, message))
        return found

    def _cause(self) -> RankError:
        """Which rank to blame: one that was killed or failed by itself, not one that lost its peer."""
        end = time.monotonic() + CULPRIT_SECONDS
        silent = [rank for rank in self.ranks if rank.failed is None]
        while True:
            for rank in self.ranks:
                if rank.failed is not None and not rank.failed.bereft:
                    return RankError(rank.failed.status, f"{rank.name}: {rank.failed.reason}", rank.failed.phase)
            for rank in silent:
                pid, status = os.waitpid(rank.pid, os.WNOHANG)
                if pid and rank.failed is None:
                    return RankError(*died(status, rank.name))
            left = end - time.monotonic()
            if left <= 0 or not silent:
                break
            for pipe in wait([rank.pipe for rank in silent], left):
                rank = next(rank for rank in silent if rank.pipe is pipe)
                self._last_words(rank, silent)
        blamed = next((rank for rank in self.ranks if rank.failed is not None), self.ranks[0])
        return RankError(Status.CRASH, f"{blamed.name}: {blamed.failed.reason if blamed.failed else 'ended'}")

    def _last_words(self, rank: Rank, silent: list[Rank]) -> None:
        try:
            message = rank.pipe.recv()
        except (EOFError, OSError):
            time.sleep(0.005)  # ended: its wait status comes at once
            return
        if message[0] == "failed":
            rank.failed = Failure(*message[1:])
            silent.remove(rank)

    def end(self) -> None:
        """Kill and reap every rank."""
        for rank in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGKILL)
        for rank in self.ranks:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(rank.pid, 0)
            rank.pipe.close()
        self.ranks = []
