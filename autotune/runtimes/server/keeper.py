"""Keeps one engine: starts it, says when it ends, leaves none of its processes behind. Knows no engine.

A script that `process.Kept` runs; standard input is the line to its owner, whose end (also by a kill) ends the engine.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from typing import Any

import psutil

PR_SET_CHILD_SUBREAPER = 36
"""prctl(2): whatever an engine's processes leave behind becomes a child of this one, however they detach."""
AFTER_S, KILL_S = 1.0, 10.0
"""Seconds for the rest of the tree after its head ended, and seconds in which a killed process must be gone."""


def main(log: str, grace: float, command: list[str]) -> int:
    """Run ``command`` until it ends or the owner closes the line; then TERM, after ``grace`` seconds KILL, the tree."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        child = _start(log, command)
    except OSError as error:
        _say({"refused": f"{command[0]}: {error.strerror}"})
        return 127
    _say({"pid": child.pid})
    pidfd = os.pidfd_open(child.pid)
    while child.poll() is None:
        ready, _, _ = select.select([sys.stdin.buffer, pidfd], [], [])
        if sys.stdin.buffer in ready:
            os.read(sys.stdin.fileno(), 4096)
            _end(child, grace)
    _say({"exit": child.returncode})
    left = _clear()
    _say({"left": left})
    return 1 if left else 0


def _start(log: str, command: list[str]) -> subprocess.Popen[bytes]:
    with open(log, "ab") as out:  # noqa: PTH123 (a script that starts in milliseconds)
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            restore_signals=True,
            preexec_fn=_usual_signals,
        )


def _usual_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _say(fact: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the owner may be gone
        os.write(1, json.dumps(fact).encode() + b"\n")


def _end(child: subprocess.Popen[bytes], grace: float) -> None:
    child.terminate()
    try:
        child.wait(grace)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _clear() -> list[int]:
    """End every descendant, TERM before KILL; the process ids of those that outlived even that."""
    for number, seconds in ((signal.SIGTERM, AFTER_S), (signal.SIGKILL, KILL_S)):
        told: set[psutil.Process] = set()
        end = time.monotonic() + seconds
        while left := _descendants():
            for process in left:
                if process not in told:
                    told.add(process)
                    with contextlib.suppress(psutil.Error):
                        process.send_signal(number)
            if time.monotonic() > end:
                break
            time.sleep(0.01)
        else:
            return []
    return [process.pid for process in left]


def _descendants() -> list[psutil.Process]:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    found: list[psutil.Process] = psutil.Process().children(recursive=True)
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2]), sys.argv[3:]))
