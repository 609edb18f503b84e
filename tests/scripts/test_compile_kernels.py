"""Ahead-of-time compilation for an A100 on a machine without one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OPS = sorted(path.parent.name for path in ROOT.glob("autotune/runtimes/native/kernels/*/triton.py"))


def compiled(cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache), "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    script = str(ROOT / "scripts" / "compile_kernels.py")
    return subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, env=environment)


def test_every_kernel_compiles_for_sm80_and_fits(tmp_path: Path) -> None:
    done = compiled(tmp_path, "--first")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert {line.split(".")[0] for line in lines[1:-1]} == set(OPS)
    assert re.fullmatch(r"\d+ specimens for cuda sm_80, Triton \S+: 0 wrong", lines[-1])
    targets = {re.search(r"^\.target (\w+)", ptx.read_text(), re.MULTILINE)[1] for ptx in tmp_path.rglob("*.ptx")}
    assert targets == {"sm_80"}


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("w8a8", "--first", "--shared", "1000"), r"asks for \d+ bytes of shared memory too many\n"),
        (("w9a9",), "no kernel is called w9a9; there are .*w8a8"),
    ],
)
def test_it_fails_and_says_why(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    done = compiled(tmp_path, *arguments)
    assert done.returncode == 1
    assert re.search(message, done.stdout + done.stderr)
