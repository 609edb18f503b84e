"""What is asked of an engine: workloads as TOML files, and the conversations that a seed makes of one.

Knows nothing of how requests are sent or of what they cost.
"""

from __future__ import annotations

import math
import random
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any

from autotune.recorded import Encode, RecordedError, Session, digest, read

KINDS = ("chat", "long", "shared", "task")
HEAD = 8
"""First tokens of a conversation, drawn one by one, so that no two of any seed begin alike and a prefix cache that
outlived a run finds nothing."""
SLO_LIMITS = ("ttft", "tpot", "itl", "e2e")
"""What an SLO may limit, in seconds a request; see `metrics.meets`."""
RANGES = ("turns", "prompt", "output")
LIMITS: Mapping[str, tuple[float, float]] = {
    "conversations": (1, 100_000),
    "concurrency": (0, 10_000),
    "turns": (1, 1_000),
    "prompt": (1, 2_000_000),
    "output": (1, 200_000),
    "prefix": (0, 2_000_000),
    "rate": (0, 100_000),
    "speed": (0, 100_000),
    "seed": (0, 2**31),
    "warmup": (0, 10_000),
}


class WorkloadError(ValueError):
    """A workload that cannot be run; the message names the file, the key and what to write instead."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: the new ``tokens`` of this turn, and how many to generate."""

    tokens: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns in order; each prompt is everything before it, generated output included, and the turn's new tokens.

    ``arrival``: seconds after the run's start at which the first turn is due (0 in closed loop).
    """

    id: int
    arrival: float
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """A kind of load. Ranges are (least, most), both included.

    ``conversations`` of ``turns`` turns; each turn adds ``prompt`` new tokens and asks for ``output``; the first
    ``prefix`` tokens are the same in all. ``concurrency`` conversations are under way at once (closed loop), or, with
    it 0, they arrive at ``rate`` a second (Poisson). ``warmup`` conversations of other text run before measuring.
    ``slo``: {one of SLO_LIMITS: seconds}, each per request.

    With ``file`` the conversations are recorded ones (see `recorded.FORMATS`), a run of them from a place that the seed
    draws, and the ranges are limits that they are cut to; ``speed`` above 0 lets them arrive as recorded, that many
    times as fast. `recorded_in` reads the file.
    """

    name: str
    sentence: str
    kind: str
    conversations: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    concurrency: int = 0
    rate: float = 0.0
    turns: tuple[int, int] = (1, 1)
    prefix: int = 0
    seed: int = 0
    warmup: int = 1
    slo: Mapping[str, float] = field(default_factory=dict)
    file: str = ""
    speed: float = 0.0
    sessions: tuple[Session, ...] = ()

    @property
    def longest(self) -> int:
        """The most tokens, prompt and output, that one sequence can reach."""
        return self.prefix + self.turns[1] * (self.prompt[1] + self.output[1])

    def identity(self) -> dict[str, Any]:
        """All that can change a measurement, as plain JSON values; the wording is left out."""
        plain = {name: getattr(self, name) for name in KEYS if name not in ("sentence", *RECORDED)}
        if self.file:
            plain |= {"file": digest(self.sessions), "speed": self.speed}
        return {k: list(v) if k in RANGES else dict(v) if k == "slo" else v for k, v in plain.items()}


RECORDED = ("file", "speed")
KEYS = tuple(f.name for f in fields(Workload) if f.name != "sessions")
REQUIRED = tuple(f.name for f in fields(Workload) if f.default is MISSING and f.default_factory is MISSING)


def names() -> list[str]:
    """The built-in workloads."""
    folder = resources.files("autotune") / "workloads"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_workload(name_or_path: str | Path) -> Workload:
    """A built-in workload by name, or one from a TOML file. Raises WorkloadError."""
    text, where = _read(str(name_or_path))
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise WorkloadError(f"workload {where} is not valid TOML: {error}") from None
    workload = parse(table, where)
    return replace(workload, file=str(Path(where).parent / workload.file)) if workload.file else workload


def recorded_in(workload: Workload, encode: Encode) -> Workload:
    """``workload`` with the sessions of its file as tokens; as it is without one. Raises WorkloadError."""
    if not workload.file:
        return workload
    try:
        return replace(workload, sessions=read(Path(workload.file), encode))
    except RecordedError as error:
        raise WorkloadError(str(error)) from None


def _read(name: str) -> tuple[str, str]:
    known = names()
    if name in known:
        return (resources.files("autotune") / "workloads" / f"{name}.toml").read_text(encoding="utf-8"), name
    path = Path(name)
    if path.suffix != ".toml" and not path.exists():
        near = get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]}?" if near else f"built in are {', '.join(known)}; or give the path of a .toml"
        raise WorkloadError(f"unknown workload {name!r}; {hint}")
    try:
        return path.read_text(encoding="utf-8"), name
    except OSError as error:
        raise WorkloadError(f"cannot read workload {name}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise WorkloadError(f"workload {name} is not UTF-8 text") from None


def parse(table: Mapping[str, Any], where: str) -> Workload:
    """A Workload from the keys of a TOML table; ``where`` names it in errors. Raises WorkloadError."""
    for key in table:
        if key not in KEYS:
            near = get_close_matches(key, KEYS, 1)
            hint = f"did you mean {near[0]}?" if near else f"keys are {', '.join(KEYS)}"
            raise WorkloadError(f"{where}: unknown key {key!r}; {hint}")
    missing = [key for key in REQUIRED if key not in table]
    if missing:
        raise WorkloadError(f"{where}: {missing[0]} is missing; `chat.toml` in the package shows every key")
    values = {key: _value(key, value, where) for key, value in table.items()}
    workload = Workload(**values)
    if (workload.concurrency > 0) + (workload.rate > 0) + (workload.speed > 0) != 1:
        raise WorkloadError(
            f"{where}: give one of concurrency (conversations at once), rate (arrivals a second) and speed (times as "
            "fast as recorded)"
        )
    if workload.speed > 0 and not workload.file:
        raise WorkloadError(f"{where}: speed needs a file of recorded conversations, with their times")
    if workload.kind not in KINDS:
        raise WorkloadError(f"{where}: kind cannot be {workload.kind!r}; it is one of {', '.join(KINDS)}")
    return workload


def _value(key: str, value: Any, where: str) -> Any:
    if key in ("name", "sentence", "kind", "file"):
        if not isinstance(value, str) or not value.strip():
            raise WorkloadError(f"{where}: {key} wants text, not {value!r}")
        return value
    if key == "slo":
        return _slo(value, where)
    if key in RANGES:
        pair = value if isinstance(value, list) else [value, value]
        if len(pair) != 2:
            raise WorkloadError(f"{where}: {key} wants a number or [least, most], not {value!r}")
        low, high = (_number(key, v, where) for v in pair)
        if low > high:
            raise WorkloadError(f"{where}: {key} wants [least, most], not {value!r}")
        return (low, high)
    return _number(key, value, where)


def _number(key: str, value: Any, where: str) -> float | int:
    low, high = LIMITS[key]
    whole = key not in ("rate", "speed")
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        raise WorkloadError(f"{where}: {key} wants a {'whole ' if whole else ''}number, not {value!r}")
    if not low <= value <= high:
        raise WorkloadError(f"{where}: {key} must lie between {low:g} and {high:,.0f}, not {value!r}")
    number: float | int = value if whole else float(value)
    return number


def _slo(value: Any, where: str) -> dict[str, float]:
    if not isinstance(value, dict):
        raise WorkloadError(f"{where}: slo must be a table: [slo] with lines such as ttft = 0.5 (seconds)")
    for name, limit in value.items():
        if name not in SLO_LIMITS:
            raise WorkloadError(f"{where}: slo cannot limit {name!r}; it limits {', '.join(SLO_LIMITS)}")
        number = isinstance(limit, (int, float)) and not isinstance(limit, bool)
        if not number or not 0 < limit < 86_400:
            raise WorkloadError(f"{where}: slo.{name} wants seconds between 0 and 86400, not {limit!r}")
    return {name: float(limit) for name, limit in value.items()}


def build(workload: Workload, source: Sequence[int], seed: int, warmup: bool = False) -> list[Conversation]:
    """The conversations of one run: the same for the same workload, ``source`` (token ids) and ``seed``.

    Lengths are spread evenly over their ranges and dealt out in random order, so that every seed asks for the same
    total work. ``warmup`` gives the warm-up conversations, of other text. Raises WorkloadError.
    """
    if len(set(source)) < 2:
        raise WorkloadError("prompts are cut from a text, and this one has fewer than two different tokens")
    # Only random() is promised to stay the same over Python versions, so everything is drawn through it.
    rng = random.Random(f"w1/{workload.seed}/{seed}/{'warmup' if warmup else 'run'}")
    count = workload.warmup if warmup else workload.conversations
    if workload.sessions:
        return list(_recorded(workload, source, rng, count))
    turns = _spread(rng, workload.turns, count)
    lengths = iter(_spread(rng, workload.prompt, sum(turns)))
    outputs = iter(_spread(rng, workload.output, sum(turns)))
    prefix = _text(rng, source, workload.prefix, HEAD)
    arrivals = _arrivals(rng, workload.rate)
    conversations = []
    for index, turn_count in enumerate(turns):
        first = Turn(prefix + _text(rng, source, next(lengths), HEAD), next(outputs))
        later = [Turn(_text(rng, source, next(lengths), 0), next(outputs)) for _ in range(turn_count - 1)]
        conversations.append(Conversation(index, next(arrivals), (first, *later)))
    return conversations


def _recorded(workload: Workload, source: Sequence[int], rng: random.Random, count: int) -> Iterator[Conversation]:
    """``count`` recorded conversations in a row; where only a length was recorded, text of ``source``."""
    known, start = workload.sessions, int(rng.random() * len(workload.sessions))
    arrivals, began, now = _arrivals(rng, workload.rate), known[start].arrival, 0.0
    for index in range(count):
        session = known[(start + index) % len(known)]
        turns = []
        for said in session.turns[: workload.turns[1]]:
            length = min(max(said.length, 1), workload.prompt[1])
            tokens = said.tokens[:length] or _text(rng, source, length, HEAD)
            turns.append(Turn(tokens, min(said.output or workload.output[1], workload.output[1])))
        if workload.speed > 0:  # past the file's end the clock goes on from where it stopped
            now += max(session.arrival - began, 0.0) / workload.speed
            began = session.arrival
            yield Conversation(index, now, tuple(turns))
        else:
            yield Conversation(index, next(arrivals), tuple(turns))


def _spread(rng: random.Random, limits: tuple[int, int], count: int) -> list[int]:
    """``count`` whole numbers evenly spaced over the range (its middle when one), in random order."""
    low, high = limits
    values = [low + math.floor((high - low) * (i + 0.5) / count + 0.5) for i in range(count)]
    return [value for _, value in sorted(zip([rng.random() for _ in values], values, strict=True))]


def _text(rng: random.Random, source: Sequence[int], length: int, head_length: int) -> tuple[int, ...]:
    """``length`` tokens: a head drawn token by token, then a slice of ``source`` (a circle when it is too short)."""
    head = tuple(source[int(rng.random() * len(source))] for _ in range(min(head_length, length)))
    start = int(rng.random() * len(source))
    return head + tuple(source[(start + i) % len(source)] for i in range(length - len(head)))


def _arrivals(rng: random.Random, rate: float) -> Iterator[float]:
    now = 0.0
    while True:
        if rate > 0:
            now += -math.log(1 - rng.random()) / rate
        yield now
