"""A small process that has torch loaded and forks a child a launch, so that a launch costs no import. Runs no op.

Both sides are here: `Zygote` in the tuner, `main` in the process. Children are leaders of their own sessions and die
with the zygote, which dies with the tuner.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from functools import cache
from multiprocessing import reduction
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from autotune.outcome import Status

QUIET = {
    "OMP_WAIT_POLICY": "PASSIVE",  # busy cores make waiting OpenMP threads spin
    "GOMP_SPINCOUNT": "0",
    "OPENBLAS_NUM_THREADS": "1",  # no thread may exist before the fork
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


class Child:
    """A forked engine process: its pipe and its end."""

    def __init__(self, zygote: Zygote, pid: int, pipe: Connection) -> None:
        self.pid, self.pipe, self._zygote = pid, pipe, zygote
        self._status: int | None = None

    def end(self, patience: float = 0.0) -> int:
        """Wait ``patience`` seconds, then kill the whole session; the wait status of `os.waitpid`."""
        if self._status is None:
            status = self._zygote.wait(self.pid, patience) if patience else None
            if status is None:
                for kill in (os.killpg, os.kill):
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        kill(self.pid, signal.SIGKILL)
                status = self._zygote.wait(self.pid, 30.0)
            self._status = -1 if status is None else status
            self.pipe.close()
        return self._status


class Zygote:
    """The tuner's handle of the forking process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._control, theirs = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import main; main()", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, **QUIET, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            start_new_session=True,
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        atexit.register(self.close)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def spawn(self, log: Path, run: str, *args: Any) -> Child:
        """Fork a child that calls ``run`` (``module:function``) with its pipe and ``args``, its output in ``log``."""
        ours, theirs = Pipe()
        with self._lock:
            self._control.send(("spawn", str(log), run, args))
            reduction.send_handle(self._control, theirs.fileno(), self._process.pid)
            pid = self._control.recv()
        theirs.close()
        return Child(self, pid, ours)

    def wait(self, pid: int, seconds: float) -> int | None:
        """The wait status of a child, None while it still runs after ``seconds``."""
        with self._lock:
            self._control.send(("wait", pid, seconds))
            found: int | None = self._control.recv()
            return found

    def close(self) -> None:
        """End the process and, with it, whatever children are left."""
        self._control.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()


@cache
def _shared(pid: int) -> Zygote:
    return Zygote()


def zygote() -> Zygote:
    """This process's zygote, started at first use and again should it have died."""
    found = _shared(os.getpid())
    if not found.alive:
        _shared.cache_clear()
        found = _shared(os.getpid())
    return found


def main() -> None:
    """Serve one tuner until its end of the pipe closes."""
    control = Connection(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # a killed child's own ranks become ours to wait for
    from autotune.runtimes.native import graphs, worker  # noqa: F401

    graphs.preload()

    # A killed child removes no temporary files, and torch unpacks each compiled region into some: they go with it.
    with contextlib.suppress(EOFError, OSError), tempfile.TemporaryDirectory(prefix="autotune-") as temporary:
        while True:
            order = control.recv()
            if order[0] == "wait":
                status = _wait(order[1], order[2])
                if status is not None:
                    shutil.rmtree(Path(temporary) / str(order[1]), ignore_errors=True)
                control.send(status)
                continue
            handle = reduction.recv_handle(control)
            pid = os.fork()
            if pid == 0:
                control.close()
                _become(order[1], Path(temporary))
                module, _, name = order[2].partition(":")
                getattr(importlib.import_module(module), name)(Connection(handle), *order[3])
                os._exit(0)
            os.close(handle)
            control.send(pid)
    os._exit(0)  # unloading torch takes seconds


def _become(log: str, temporary: Path) -> None:
    """A session of its own, output to the log, temporary files in a folder of its own, death with the parent."""
    os.setsid()
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(target, 1)
    os.dup2(target, 2)
    tempfile.tempdir = os.environ["TMPDIR"] = str(temporary / str(os.getpid()))
    Path(tempfile.tempdir).mkdir()


def die_with_parent() -> None:
    """This process is killed as soon as the one that forked it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def died(status: int, who: str) -> tuple[Status, str]:
    """What the wait status of a process that should still run says: (status, one-line reason)."""
    if status >= 0 and os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number == signal.SIGKILL:
            return Status.OOM, f"the kernel killed {who}, most likely for memory"
        return Status.CRASH, f"{who} died of signal {number}"
    code = os.waitstatus_to_exitcode(status) if status >= 0 else status
    return Status.CRASH, f"{who} ended with code {code}"


def _wait(pid: int, seconds: float) -> int | None:
    end = time.monotonic() + seconds
    while True:
        try:
            done, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return 0
        if done:
            _reap(pid, 5.0)
            return status
        if time.monotonic() >= end:
            return None
        time.sleep(0.002)


def _reap(group: int, seconds: float) -> None:
    """Wait for the ranks of a child that has ended; they die with it, and nothing of them may be left behind."""
    end = time.monotonic() + seconds
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < end:
            if not os.waitpid(-group, os.WNOHANG)[0]:
                time.sleep(0.002)
