"""An engine's process tree as its owner sees it: start, death, sockets, CPU time, end. Knows no engine and no HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from autotune.runtimes.server import keeper

GRACE_S = 10.0
"""Seconds between TERM and KILL. vLLM takes 1–2 when idle, and with requests in flight as long as its clients wait."""
MARKER = "AUTOTUNE_LAUNCH"
"""Environment variable that marks the processes of one launch, for the day when their keeper is killed too."""
TAIL = 2000
READ = 2_000_000
"""Characters of a log that an error carries, and bytes of it that are searched for a reason."""


class Kept:
    """One engine under a keeper. Never touches a process that is not a descendant of that keeper.

    ``log`` takes its output; ``environment`` is added to ours. The keeper, and so the engine, has a session of its own
    and ends when this process does, however that ends.
    """

    def __init__(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str], grace: float = GRACE_S
    ) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log, self.started = log, time.monotonic()
        with log.open("w", encoding="utf-8") as file:
            file.write(" ".join([*(f"{k}={v}" for k, v in environment.items()), *command]) + "\n")
        self._start = log.stat().st_size
        self._mark, self._grace = uuid.uuid4().hex, grace
        self._words = b""
        self._facts: dict[str, Any] = {}
        self._seen: dict[int, float] = {}
        with log.open("ab") as errors:
            self._keeper = subprocess.Popen(
                [sys.executable, keeper.__file__, str(log), str(grace), *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **environment, MARKER: self._mark},
                start_new_session=True,
            )

    def code(self) -> int | None:
        """The engine's exit code (negative: killed by that signal) as soon as it has ended, else None."""
        self._listen(0)
        if "exit" in self._facts:
            return int(self._facts["exit"])
        if "refused" in self._facts or self._keeper.poll() is not None:
            return 127
        return None

    @property
    def refusal(self) -> str:
        """Why the command could not even be started; empty when it was."""
        self._listen(0)
        return str(self._facts.get("refused", ""))

    def tree(self) -> list[psutil.Process]:
        """The engine's living processes, the keeper left out."""
        try:
            found: list[psutil.Process] = psutil.Process(self._keeper.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        self._seen |= {process.pid: process.create_time() for process in found if process.is_running()}
        return found

    def listens(self, port: int) -> bool:
        """Whether a listening TCP socket on ``port`` belongs to this engine."""
        for process in self.tree():
            with contextlib.suppress(psutil.Error):
                for socket in process.net_connections("tcp"):
                    if socket.status == psutil.CONN_LISTEN and socket.laddr.port == port:
                        return True
        return False

    def usage(self) -> tuple[float, int]:
        """CPU seconds, and bytes of memory held by its processes alone (USS), of the whole tree."""
        seconds, held = 0.0, 0
        for process in self.tree():
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                seconds += times.user + times.system
                held += int(process.memory_full_info().uss)
        return seconds, held

    def text(self) -> str:
        """What the engine has said so far: its log without our own first line, at most the last READ bytes."""
        try:
            with self.log.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(self._start, size - READ))
                return file.read().decode(errors="replace")
        except OSError:
            return ""

    def tail(self) -> str:
        return self.text()[-TAIL:].strip()

    def stop(self) -> list[int]:
        """End the whole tree; the process ids of what could not be ended. Once ended, it stays so."""
        with contextlib.suppress(OSError, ValueError):
            if self._keeper.stdin is not None:
                os.write(self._keeper.stdin.fileno(), b"stop")
                self._keeper.stdin.close()
        try:
            self._keeper.wait(self._grace + keeper.AFTER_S + keeper.KILL_S + 5)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()
        self._listen(0)
        left = list(self._facts.get("left", ()))
        if self._keeper.returncode not in (0, 127) and not left:
            left = self._sweep()
        if self._keeper.stdout is not None:
            self._keeper.stdout.close()
        return left

    def _listen(self, seconds: float) -> None:
        """Take in what the keeper has said."""
        out = self._keeper.stdout
        if out is None or out.closed:
            return
        while select.select([out], [], [], seconds)[0]:
            words = os.read(out.fileno(), 65536)
            if not words:
                break
            self._words += words
        *lines, self._words = self._words.split(b"\n")
        for line in lines:
            self._facts |= json.loads(line)

    def _sweep(self) -> list[int]:
        """The keeper itself was killed: end what carries this launch's mark, or was seen below the keeper before."""
        end = time.monotonic() + keeper.KILL_S
        while (left := self._marked()) and time.monotonic() < end:
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(0.02)
        return [process.pid for process in left]

    def _marked(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                # A process that renames itself overwrites its environment, but not the time at which it began.
                known = self._seen.get(process.pid) == process.create_time()
                if process.status() != psutil.STATUS_ZOMBIE and (known or process.environ().get(MARKER) == self._mark):
                    found.append(process)
        return found
