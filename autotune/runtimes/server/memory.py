"""Whether the memory that an ended engine held is free again. Reads the machine; ends nothing."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from functools import cache

import psutil

PATIENCE_S = 30.0
HOST_SLACK = 0.05
"""Share of the host's memory by which others' shared memory may grow between two launches."""
DEVICE_SLACK = 512 << 20
QUERY = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")

Probe = Callable[[], int]


class Baseline:
    """Bytes in use before the first launch, and the wait for them before every further one.

    ``used`` reads bytes in use, ``slack`` how many more of them are no engine's. The lowest reading is the baseline.
    """

    def __init__(self, used: Probe, slack: int, patience: float = PATIENCE_S) -> None:
        self._used, self._slack, self._patience = used, slack, patience
        self._lowest: int | None = None

    def excess(self) -> int:
        """0 once the memory is back, else how many bytes are still missing after the patience ran out."""
        end = time.monotonic() + self._patience
        while True:
            now = self._used()
            self._lowest = now if self._lowest is None else min(self._lowest, now)
            over = now - self._lowest
            if over <= self._slack:
                return 0
            if time.monotonic() >= end:
                return over
            time.sleep(0.05)


def machine() -> Baseline:
    """The GPUs' memory where there are any, else the host's shared memory.

    An ended process has given back its own memory; the segments that it shared stay when it was killed.
    """
    if _gpus() is not None:
        return Baseline(lambda: _gpus() or 0, DEVICE_SLACK)
    return Baseline(_shared, int(HOST_SLACK * psutil.virtual_memory().total))


def _shared() -> int:
    return int(getattr(psutil.virtual_memory(), "shared", 0))


@cache
def _no_gpu() -> bool:
    try:
        subprocess.run(QUERY, capture_output=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return True
    return False


def _gpus() -> int | None:
    """Bytes in use on all GPUs together; None where `nvidia-smi` finds none."""
    if _no_gpu():
        return None
    try:
        text = subprocess.run(QUERY, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return sum(int(line) << 20 for line in text.split() if line.isdigit())
