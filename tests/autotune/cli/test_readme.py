"""Every command that README shows is run here, in its order, with a small budget and workload in place of its own."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()
SMALL = {
    "--budget 200": "--budget 3",
    "autotune effects": "autotune effects --blocks 1",
    "--target kernels": "--target kernels --budget 2 --only int8-fp32/512x128/1",
}
SETTINGS = {
    "AUTOTUNE_QUALITY_TOKENS": "128",
    "AUTOTUNE_FINALISTS": "1",
    "AUTOTUNE_BLOCKS": "2",
    "AUTOTUNE_DB": "readme.db",
}


def shown() -> list[str]:
    """The `autotune …` commands of fences and code spans, once each, in order."""
    fenced = re.findall(r"^(?:\S+/bin/)?(autotune .+)$", "\n".join(re.findall(r"```sh\n(.*?)```", README, re.S)), re.M)
    chained = re.findall(r"&& \S*(autotune [^\n&|]+)", README)
    spans = re.findall(r"`(autotune [^`]+)`", README)
    return list(dict.fromkeys(command.strip() for command in (*fenced, *chained, *spans)))


COMMANDS = shown()


def test_readme_shows_the_main_verbs() -> None:
    verbs = {command.split()[1] for command in COMMANDS}
    assert verbs >= {"search", "query", "show", "effects", "export", "serve", "space", "probe"}


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.split()[1] != "serve"])
def test_command(command: str, autotune, home: Path) -> None:
    for long, short in SMALL.items():
        command = command.replace(long, short)
    words = shlex.split(command)[1:]
    if words[:2] == ["show", "ID"]:
        rows = json.loads(autotune("query", "--format", "json", **SETTINGS).stdout)["trials"]
        words[1] = rows[0]["id"]
    done = autotune(*words, **SETTINGS)
    assert done.returncode == 0, done.stderr
    if "json" in words:
        json.loads(done.stdout)


@pytest.fixture
def exported(autotune, home: Path) -> Path:
    """best.json, from the commands above or, when only one test is run, from them again."""
    file = home / "best.json"
    if not file.exists():
        for words in (("search", "--budget", "3"), ("export", "-o", "best.json")):
            assert autotune(*words, **SETTINGS).returncode == 0
    return file


@pytest.mark.usefixtures("exported")
def test_serve(environment: dict[str, str], home: Path) -> None:
    (command,) = [c for c in COMMANDS if c.split()[1] == "serve"]
    running = subprocess.Popen(
        [sys.executable, "-m", *shlex.split(command), "--port", "0"],
        env={**environment, **SETTINGS},
        cwd=home,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert running.stdout is not None
        address = re.search(r"http://\S+?(?=/v1)", running.stdout.readline())
        assert address is not None
        with urllib.request.urlopen(address.group() + "/health", timeout=30) as answer:
            assert answer.status == 200
    finally:
        running.send_signal(signal.SIGTERM)
        assert running.wait(30) == 0


@pytest.mark.usefixtures("exported")
def test_the_python_example(environment: dict[str, str], home: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=home, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_set_up_commands_are_the_ones_that_ci_runs() -> None:
    assert "pip install -c constraints.txt ." in README
    assert "\nscripts/check.sh\n" in README
    assert "scripts/check.sh" in (ROOT / ".ci" / "run").read_text()
    assert "--constraint constraints.txt" in (ROOT / "scripts" / "check.sh").read_text()
