"""What a build of an engine offers, from its own words: its version, and the flags and choices of its help text."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import platformdirs

from autotune.outcome import EngineError
from autotune.runtimes.server import failures
from search_spaces import Knob, Space, Value

SECONDS = 300.0
LEAST = 5
"""Fewer flags than this are no engine's help."""


@dataclass(frozen=True, slots=True)
class Build:
    """``flags``: {flag: its choices, empty where it takes anything}; ``digest`` is of the help text."""

    version: str
    flags: Mapping[str, tuple[str, ...]]
    digest: str

    def has(self, flag: str) -> bool:
        return flag in self.flags

    def choices(self, knob: Knob) -> tuple[tuple[Value, ...], str]:
        """The knob's values that this build takes, and why the others are left out (empty when none is).

        A build that lacks the flag leaves the default, which is then not passed.
        """
        flag = knob.flag.split(" ")[0]
        values = knob.domain.values
        if not flag.startswith("--") or flag == "--model":
            return values, ""
        if flag not in self.flags:
            return (knob.default,), f"this build ({self.version}) has no {flag}; it is not passed"
        if all(isinstance(value, bool) for value in values) and len(values) > 1 and not self.has(no(flag)):
            return (knob.default,), f"this build ({self.version}) has no {no(flag)}"
        listed = self.flags[flag]
        if " " in knob.flag or not listed:
            return values, ""
        kept = tuple(v for v in values if isinstance(v, bool) or str(v) in listed)
        return kept, f"this build's {flag} takes {', '.join(listed)}" if len(kept) < len(values) else ""


def offered(build: Build, space: Space) -> Space:
    """``space`` with what ``build`` takes; each knob or value that it lacks is left out with the reason."""
    for knob in space.knobs:
        kept, reason = build.choices(knob)
        if reason and not kept:
            raise failures.named("unsupported", f"no value of {knob.name} is left: {reason}", "launch")
        if reason:
            space = space.limit({knob.name: kept}, reason)
    return space


def no(flag: str) -> str:
    """The flag that turns ``flag`` off."""
    return "--no-" + flag.removeprefix("--")


def parse(version: str, text: str) -> Build:
    """A build from its help in the layout of Python's `argparse`: flags begin a line, choices stand in braces."""
    flags: dict[str, tuple[str, ...]] = {}
    for line in re.findall(r"^ {1,4}(-[^\n]*)", text, re.MULTILINE):
        head = re.split(r"  +", line)[0]
        found = re.search(r"\{([^}]*)\}?", head)
        listed = tuple(choice.strip() for choice in found.group(1).split(",")) if found else ()
        for flag in re.findall(r"(?<![\w-])--[a-z][\w.-]*", head.replace("{" + (found.group(1) if found else ""), "")):
            flags[flag] = listed
    return Build(version, flags, hashlib.sha256(text.encode()).hexdigest()[:16])


def ask(prefix: Sequence[str], version: Iterable[str], help_: Iterable[str]) -> Build:
    """Run the engine twice, for its version and its help; the answers of an unchanged local executable are kept.

    Raises EngineError where the command cannot be run or says nothing useful.
    """
    place = _place(prefix)
    if place is not None and place.is_file():
        kept = json.loads(place.read_text(encoding="utf-8"))
        return Build(kept["version"], {k: tuple(v) for k, v in kept["flags"].items()}, kept["digest"])
    said = _run([*prefix, *version]).strip().splitlines()
    build = parse(_version(said), _run([*prefix, *help_]))
    if len(build.flags) < LEAST:
        raise failures.named("unsupported", f"`{' '.join([*prefix, *help_])}` lists no flags", "launch")
    if place is not None:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.with_suffix(f".{os.getpid()}").write_text(json.dumps(asdict(build)), encoding="utf-8")
        place.with_suffix(f".{os.getpid()}").replace(place)
    return build


def _version(lines: Sequence[str]) -> str:
    """The last line that looks like one; engines print warnings before it."""
    found = [m.group(0) for line in lines if (m := re.search(r"\d+\.\d+\S*", line))]
    return found[-1] if found else "unknown"


def _place(prefix: Sequence[str]) -> Path | None:
    """Where the answers of this executable, as it is now, are kept; None for one that runs another command."""
    path = shutil.which(prefix[0]) if len(prefix) == 1 else None
    if path is None:
        return None
    # The packages beside an executable of a Python environment change when that environment does.
    beside = [Path(path).resolve(), *sorted(Path(path).parent.parent.glob("lib/python*/site-packages"))]
    facts = [[str(p), p.stat().st_mtime_ns] for p in beside]
    name = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]
    return Path(platformdirs.user_cache_dir("autotune")) / "engines" / f"{name}.json"


def _run(argv: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, errors="replace", timeout=SECONDS, stdin=subprocess.DEVNULL,
            env={**os.environ, "COLUMNS": "200"}, check=False,
        )  # fmt: skip
    except OSError as error:
        raise _unusable(f"the engine's command cannot be run: {argv[0]}: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise _unusable(f"`{' '.join(argv)}` gave no answer in {SECONDS:g} s") from None
    if done.returncode:
        raise _unusable(f"`{' '.join(argv)}` ended with code {done.returncode}: {done.stderr.strip()[-300:]}")
    return done.stdout


def _unusable(line: str) -> EngineError:
    return failures.named("unsupported", line, "launch")
