"""The device script where there is no device: it says so, and nothing of it passes for a check."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="a GPU is here: scripts/device.sh itself is the check"
)


def script(out: Path, *arguments: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": python, "OUT": str(out)}
    command = ["bash", str(ROOT / "scripts" / "device.sh"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_without_a_gpu_it_checks_nothing_and_exits_3(tmp_path: Path) -> None:
    done = script(tmp_path / "out")
    assert done.returncode == 3, done.stdout + done.stderr
    assert "no GPU was found" in done.stderr and "--check" in done.stderr
    assert f"torch {torch.__version__}" in (tmp_path / "out" / "environment.txt").read_text()
    assert " ok " not in done.stdout


def test_a_wrong_argument_and_a_python_without_torch_are_said(tmp_path: Path) -> None:
    assert script(tmp_path, "--chek").returncode == 2
    blind = tmp_path / "python"
    blind.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    blind.chmod(0o755)
    done = script(tmp_path, python=str(blind))
    assert done.returncode == 1
    assert "torch cannot be imported" in done.stderr


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing() -> None:
    done = subprocess.run(["shellcheck", str(ROOT / "scripts" / "device.sh")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_timings_need_a_gpu(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "bench_kernels.py"), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert (done.returncode, done.stdout) == (3, "")
    assert "no GPU was found" in done.stderr
