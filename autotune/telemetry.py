"""Whether the machine held back while something was measured: CPU quota and GPU clocks. Absent facts are no fault."""

from __future__ import annotations

import csv
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

CLOCK_SHARE = 0.75
"""SM clock below this share of its maximum under load counts as throttled (nvbench's threshold)."""
QUOTA_SHARE = 0.05
"""Share of the run during which the container's CPU quota may stop its processes."""
GPU_QUERY = ("clocks.sm", "clocks.max.sm", "clocks_event_reasons.hw_slowdown")
TIMEOUT_S = 5.0
CPU_STAT = Path("/sys/fs/cgroup/cpu.stat")

Ask = Callable[[Sequence[str]], str]


class Watch:
    """One run: made at its start, asked at its end."""

    def __init__(self, stat: Path = CPU_STAT, gpu: Ask | None = None) -> None:
        self._stat, self._gpu = stat, gpu
        self._start, self._stopped = time.monotonic(), stopped_seconds(stat)

    def fault(self) -> str:
        """Why the run's figures are too low, empty when nothing is known to have held the machine back."""
        wall = time.monotonic() - self._start
        held = stopped_seconds(self._stat) - self._stopped
        if wall > 0 and held / wall > QUOTA_SHARE:
            return f"throttled: the CPU quota stopped the run for {held:.2f} of {wall:.2f} s"
        return slow_gpu(self._gpu(GPU_QUERY)) if self._gpu is not None else ""


def stopped_seconds(stat: Path) -> float:
    """Seconds that the CPU quota has stopped this container so far (cgroup v2, over all its CPUs); 0 if unknown."""
    try:
        lines = stat.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0.0
    fields = dict(line.split(None, 1) for line in lines if " " in line)
    return int(fields.get("throttled_usec", "0")) / 1e6


def slow_gpu(text: str) -> str:
    """The first GPU that runs below its clock, from what `nvidia-smi` answers to GPU_QUERY as bare CSV."""
    for index, row in enumerate(csv.reader(text.splitlines())):
        cells = [cell.strip() for cell in row]
        if len(cells) != len(GPU_QUERY):
            continue
        if cells[2] == "Active":
            return f"throttled: GPU {index} reports a hardware slow-down"
        if cells[0].isdigit() and cells[1].isdigit() and int(cells[0]) < CLOCK_SHARE * int(cells[1]):
            return f"throttled: GPU {index} runs at {cells[0]} of {cells[1]} MHz"
    return ""


def ask_gpu(query: Sequence[str]) -> str:
    """What `nvidia-smi` says; empty where it does not."""
    command = ["nvidia-smi", f"--query-gpu={','.join(query)}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
