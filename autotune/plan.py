"""What a search is asked to do: flags, environment, TOML file and defaults in one Plan, with each value's origin."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from autotune.slo import SloError, parse
from search_spaces import Value


class PlanError(ValueError):
    """A plan that cannot be followed; the message names the key, where it came from and what to write instead."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One search. ``model`` empty means the reference model in the package; ``db`` empty the platform's data folder.

    ``target`` is ``engine``, or ``kernels``: then ``budget`` is each operator's, and ``only`` keeps those whose name
    contains it. ``bits``: the search sees a ladder of allocations as one knob, or a width for each kind of group.
    ``sampler`` chooses what to measure next: a Gaussian process over valid configurations, or Optuna's TPE.
    ``max_kl`` is nats a token and ``max_perplexity`` a factor, both against the full-width model;
    ``slo`` are constraints such as ``ttft_p99<500ms``, applied to stored requests; ``time`` limits one run of the
    command (``2h``, ``30m``, ``90s``; empty: no limit); ``precision`` above 0 repeats each measurement until its
    interval is that narrow. ``engine_command`` is the command that a server's arguments are appended to (empty: its
    usual name), ``port`` the one it gets where that is free (0: any), ``launch_seconds`` its time until it serves.
    ``deadline`` is seconds for one workload run; ``quality_tokens`` is the length of the
    held-out text; ``knobs`` pins or limits knobs of the space: ``{name: (allowed values…)}``.
    """

    target: str = "engine"
    only: str = ""
    engine: str = "native"
    engine_command: str = ""
    port: int = 0
    launch_seconds: float = 900.0
    model: str = ""
    workload: str = "task"
    objective: str = ""
    bits: str = "ladder"
    sampler: str = "gp"
    budget: int = 200
    seed: int = 0
    db: str = ""
    finalists: int = 8
    blocks: int = 15
    slo: tuple[str, ...] = ()
    time: str = ""
    precision: float = 0.0
    max_kl: float = 0.02
    max_perplexity: float = 1.01
    quality_tokens: int = 2048
    deadline: float = 120.0
    knobs: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)
    origin: Mapping[str, str] = field(default_factory=dict)


WORDS: Mapping[str, tuple[str, ...]] = {
    "target": ("engine", "kernels"),
    "bits": ("ladder", "groups"),
    "sampler": ("gp", "tpe"),
}
KEYS = tuple(f.name for f in fields(Plan) if f.name not in ("knobs", "origin"))
LIMITS: Mapping[str, tuple[float, float]] = {
    "budget": (1, 1_000_000),
    "seed": (0, 2**31),
    "finalists": (1, 20),
    "blocks": (2, 100),
    "max_kl": (0, 100),
    "max_perplexity": (1, 1000),
    "quality_tokens": (64, 10_000_000),
    "deadline": (0.1, 86_400),
    "launch_seconds": (0.1, 86_400),
    "port": (0, 65_535),
    "precision": (0, 0.5),
}
SECONDS: Mapping[str, float] = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_TYPES: Mapping[str, type] = {f.name: type(f.default) for f in fields(Plan) if f.name in KEYS}


def resolve(flags: Mapping[str, Any], environment: Mapping[str, str], file: Path | None = None) -> Plan:
    """Flag > ``AUTOTUNE_<KEY>`` > plan file > default. ``flags`` of None were not given. Raises PlanError."""
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    knobs: Mapping[str, tuple[Value, ...]] = {}
    if file is not None:
        table = _read(file)
        knobs = _knobs(table.pop("knobs", {}), file)
        for key, value in table.items():
            _known(key, f"{file}")
            values[key], origin[key] = _typed(key, value, f"{file}"), str(file)
    for key in KEYS:
        name = f"AUTOTUNE_{key.upper()}"
        if environment.get(name):
            values[key], origin[key] = _typed(key, environment[name], name), name
        if flags.get(key) not in (None, ()):
            flag = f"--{key.replace('_', '-')}"
            values[key], origin[key] = _typed(key, flags[key], flag), flag
    return Plan(**values, knobs=knobs, origin={key: origin.get(key, "default") for key in KEYS})


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"cannot read plan {file}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PlanError(f"plan {file} is not valid TOML: {error}") from None


def _known(key: str, where: str) -> None:
    if key not in KEYS:
        near = get_close_matches(key, [*KEYS, "knobs"], 1)
        raise PlanError(
            f"{where}: unknown key {key!r}"
            + (f"; did you mean {near[0]}?" if near else f"; keys are {', '.join(KEYS)}")
        )


def _typed(key: str, value: Any, where: str) -> Any:
    """``value`` in the type of the Plan's default; text from the environment is converted. Raises PlanError."""
    wanted = _TYPES[key]
    if key == "slo":
        return _slos(value, where)
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise PlanError(f"{where}: {key} wants {_words(wanted)}, not {value!r}")
    try:
        typed = wanted(value)
    except ValueError:
        raise PlanError(f"{where}: {key} wants {_words(wanted)}, not {value!r}") from None
    if wanted is int and isinstance(value, float) and value != typed:
        raise PlanError(f"{where}: {key} wants a whole number, not {value!r}")
    if wanted is str and not isinstance(value, str):
        raise PlanError(f"{where}: {key} wants text, not {value!r}")
    if key in WORDS and typed not in WORDS[key]:
        raise PlanError(f"{where}: {key} wants {' or '.join(WORDS[key])}, not {value!r}")
    if key == "time":
        seconds(typed, where)
    if key in LIMITS and not LIMITS[key][0] <= typed <= LIMITS[key][1]:
        low, high = LIMITS[key]
        raise PlanError(f"{where}: {key} must lie between {low:g} and {high:g}, not {value}")
    return typed


def _slos(value: Any, where: str) -> tuple[str, ...]:
    """SLO texts from a list, or from one text with commas between them. Raises PlanError."""
    texts = value.split(",") if isinstance(value, str) else value
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise PlanError(f'{where}: slo wants a list such as ["ttft_p99<500ms"], not {value!r}')
    try:
        return tuple(parse(text).text for text in texts if text.strip())
    except SloError as error:
        raise PlanError(f"{where}: {error}") from None


def seconds(text: str, where: str = "time") -> float:
    """Seconds of ``2h``, ``1h30m``, ``90s`` or a bare number of seconds; 0 for an empty text. Raises PlanError."""
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*(min|[smhd]?)", text)
    if "".join(number + unit for number, unit in parts) != re.sub(r"\s", "", text):
        raise PlanError(f"{where}: time wants a duration such as 2h, 1h30m or 90s, not {text!r}")
    total = sum(float(number) * SECONDS[unit or "s"] for number, unit in parts)
    if text and total <= 0:
        raise PlanError(f"{where}: time must be above 0, not {text!r}")
    return total


def _words(kind: type) -> str:
    return {int: "a whole number", float: "a number", str: "text"}[kind]


def _knobs(table: Any, file: Path) -> Mapping[str, tuple[Value, ...]]:
    """``name = value`` pins a knob, ``name = [value, …]`` limits it."""
    if not isinstance(table, dict):
        raise PlanError(f"{file}: knobs must be a table: [knobs] with one line a knob")
    found: dict[str, tuple[Value, ...]] = {}
    for name, value in table.items():
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(v, (str, int, float, bool)) for v in values):
            raise PlanError(f"{file}: knob {name} wants a value or a list of values, not {value!r}")
        found[name] = tuple(values)
    return found
