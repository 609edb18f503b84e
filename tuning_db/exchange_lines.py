"""The lines of an exported database: how a record is written, and how a line is read and checked. Knows no database.

Each line is canonical JSON with one key, its kind: ``autotune_tuning_db`` (the head, with format and schema), then
``hardware``, ``scenario`` and ``reference`` by key, ``trial`` by id, and ``end`` with the SHA-256 of all before.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn

import orjson

from tuning_db import rows
from tuning_db.canonical import DEEPEST, canonical
from tuning_db.errors import BadValue, Refused
from tuning_db.records import Hardware, Reference, Scenario, Trial
from tuning_db.schema import SCHEMA_VERSION

HEAD = "autotune_tuning_db"
FORMAT = 1
KINDS = ("hardware", "scenario", "reference", "trial")
LONGEST_LINE = 256 << 20
"""Bytes of one line; a reference with every probability of a long text stays far below."""

Values = dict[str, Any]

_FIELDS: Mapping[str, Mapping[str, tuple[type, ...]]] = {
    "hardware": {"key": (str,), "kind": (str,), "host": (str,), "facts": (dict,)},
    "scenario": {
        **dict.fromkeys(("key", "hardware_key", "engine"), (str,)),
        **dict.fromkeys(("engine_build", "model", "workload", "objective"), (dict,)),
        "created_at": (float, int),
    },
    "reference": {"key": (str,), "kind": (str,), "facts": (dict,), "blob": (str,), "created_at": (float, int)},
    "trial": {
        **dict.fromkeys(("id", "scenario_key", "stage", "config_key", "status", "reason"), (str,)),
        **dict.fromkeys(("config", "metrics", "seconds", "effective", "counters", "provenance"), (dict,)),
        **dict.fromkeys(("block", "seed"), (int,)),
        **dict.fromkeys(("started_at", "ended_at"), (float, int)),
        "counted": (bool,),
        "samples": (dict, type(None)),
    },
}
_JSON = ("config", "metrics", "seconds", "effective", "counters", "provenance")
_ZERO = re.compile(rb"-0(?!\.?\d*[1-9])")  # which `canonical` writes without its sign
_SMALL = re.compile(rb"e-(\d)(?=[],}]|$)")  # 1e-7 of orjson is 1e-07 of Python
_ID = re.compile(r"[0-9a-f]{8,32}")


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number that JSON has")


_decode = json.JSONDecoder(parse_constant=_no_constant).decode
_write = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode


def _dumped(value: object) -> bytes:
    """What `canonical` writes, eight times faster, but for floats from 1e16 on, some below 1e-4, and -0.0."""
    text = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    return _SMALL.sub(rb"e-0\1", text) if b"e-" in text else text


def _read(line: bytes) -> tuple[Any, bool]:
    """The value of a line, and whether the line and so each part of it is as `canonical` and `_dumped` write it.

    Raises ValueError, or RecursionError. Written by orjson again, the line differs wherever orjson read less than stood
    there: integers of more than 64 bits, keys that stand twice.
    """
    try:
        value = orjson.loads(line)
        again = _dumped(value) + b"\n"
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):  # Python's own says it better, or knows it
        again = b""
    odd = b"\\u0000" in line or b"0.0000" in line or (b"-0" in line and _ZERO.search(line))
    if again == line and not odd:
        return value, True
    return _decode(line.decode("utf-8")), False


class Writer:
    """Writes lines and keeps their digest and their numbers for the last one."""

    def __init__(self, tool: str) -> None:
        self.tool = tool
        self.counts = dict.fromkeys(KINDS, 0)
        self._digest = hashlib.sha256()

    def head(self) -> bytes:
        return self._line(HEAD, {"format": FORMAT, "schema": SCHEMA_VERSION, "tool": self.tool})

    def record(self, kind: str, values: Mapping[str, Any]) -> bytes:
        """The line of a record; bytes become base64."""
        self.counts[kind] += 1
        return self._line(kind, values)

    def end(self) -> bytes:
        return self._line("end", {**self.counts, "sha256": self._digest.hexdigest()})

    def _line(self, kind: str, values: Mapping[str, Any]) -> bytes:
        line = (_write({kind: values}) + "\n").encode()
        self._digest.update(line)
        return line


def checked(lines: Iterable[bytes], name: str) -> Iterator[tuple[str, Values]]:
    """Each record of an export as its kind and table row, JSON of trials as text. Raises Refused naming the line.

    The last line is checked too, so that an export that was read to its end is whole; ``name`` stands in messages.
    """
    reader = _Reader(name)
    for number, line in enumerate(lines, 1):
        found = reader.take(number, line)
        if found is not None:
            yield found
    reader.finish()


def encoded(blob: bytes) -> str:
    """Bytes as text of a line."""
    return base64.b64encode(blob).decode("ascii")


class _Reader:
    def __init__(self, name: str) -> None:
        self.name, self.number = name, 0
        self.counts = dict.fromkeys(KINDS, 0)
        self.machines: dict[str, Hardware] = {}
        self.questions: set[str] = set()
        self.last = (-1, "")
        self.ended = False
        self._digest = hashlib.sha256()

    def take(self, number: int, line: bytes) -> tuple[str, Values] | None:
        self.number = number
        if self.ended:
            raise self.refused("there is more after the last line; import exports one by one")
        if len(line) > LONGEST_LINE or not line.endswith(b"\n"):
            raise self.refused("the line is cut short or too long; export again")
        try:
            record, is_canonical = _read(line)
            ((kind, values),) = record.items()
        except RecursionError as error:
            raise self.refused(f"it is nested more than {DEEPEST} deep") from error
        except (ValueError, AttributeError) as error:
            raise self.refused(f"it is no line of an export ({error})") from error
        if not isinstance(values, dict):
            raise self.refused("it is no line of an export")
        if number == 1:
            self._head(kind, values)
        elif kind == "end":
            self._end(values)
        else:
            self._digest.update(line)
            nested = line.count(b"{") + line.count(b"[") >= DEEPEST
            return kind, self._record(kind, values, is_canonical and not nested)
        self._digest.update(line)
        return None

    def finish(self) -> None:
        if not self.ended:
            raise self.refused("it ends too early, so records are missing; export or copy it again")

    def refused(self, why: str) -> Refused:
        return Refused(f"{self.name}, line {self.number}: {why}. Nothing was imported")

    def _head(self, kind: str, values: Values) -> None:
        if kind != HEAD or type(values.get("format")) is not int or type(values.get("schema")) is not int:
            raise self.refused("it is no export of a tuning database; make one with `autotune db export`")
        if values["format"] > FORMAT or values["schema"] > SCHEMA_VERSION:
            raise self.refused(
                f"it was written by autotune {str(values.get('tool'))[:40]} with schema {values['schema']} (format "
                f"{values['format']}), and this tool knows up to {SCHEMA_VERSION} ({FORMAT}); update it with "
                "`pip install -U autotune`"
            )

    def _end(self, values: Values) -> None:
        if values != {**self.counts, "sha256": self._digest.hexdigest()}:
            raise self.refused("the records before it are not those that were exported; export or copy it again")
        self.ended = True

    def _record(self, kind: str, values: Values, is_canonical: bool) -> Values:
        fields = _FIELDS.get(kind)
        if fields is None:
            raise self.refused(f"it holds a {kind[:40]!r}, which this tool does not know")
        if values.keys() != fields.keys():
            raise self.refused(f"the fields of a {kind} are {', '.join(fields)}")
        wrong = [field for field, value in values.items() if type(value) not in fields[field]]
        if wrong:
            raise self.refused(f"{wrong[0]} is {str(values[wrong[0]])[:40]!r}, which is of the wrong type")
        here = (KINDS.index(kind), values["id" if kind == "trial" else "key"])
        if here <= self.last:
            raise self.refused(f"{kind} {here[1][:80]} stands twice or out of order")
        self.last = here
        self.counts[kind] += 1
        try:
            return self._row(kind, values, is_canonical)
        except (ValueError, OverflowError, BadValue, binascii.Error) as error:
            raise self.refused(str(error)) from error

    def _row(self, kind: str, values: Values, is_canonical: bool) -> Values:
        if kind == "trial":
            return self._trial(values, is_canonical)
        if kind == "reference":
            blob = base64.b64decode(values["blob"], validate=True)
            record = Reference(values["key"], values["kind"], values["facts"], blob)
            return rows.reference_row(record, self._finite(values["created_at"]))
        if kind == "hardware":
            machine = Hardware(values["kind"], values["facts"], values["host"])
            row = rows.hardware_row(machine)
            self.machines[machine.key] = machine
        else:
            known = self.machines.get(values["hardware_key"])
            if known is None:
                raise self.refused(f"its hardware {values['hardware_key'][:80]!r} does not stand before it")
            parts = [values[name] for name in ("engine", "engine_build", "model", "workload", "objective")]
            row = rows.scenario_row(Scenario(known, *parts), self._finite(values["created_at"]))
            self.questions.add(row["key"])
        if row["key"] != values["key"]:
            raise self.refused(f"its content has the key {row['key']}, not {values['key'][:80]!r}")
        return row

    def _trial(self, values: Values, is_canonical: bool) -> Values:
        if values["scenario_key"] not in self.questions:
            raise self.refused(f"the scenario {values['scenario_key'][:80]!r} of the trial does not stand before it")
        samples = values.pop("samples")
        count, blob = self._samples(samples) if samples is not None else (None, None)
        if is_canonical and self._is_simple(values):
            row = {**values, **{name: _dumped(values[name]).decode() for name in _JSON}}
        else:
            row = rows.trial_row(Trial(**values))
            row |= {name: canonical(row[name]).decode() for name in _JSON}
        return {**row, "samples_count": count, "samples_blob": blob}

    def _is_simple(self, values: Values) -> bool:
        """Whether a canonical trial can be stored as it is read; others go through the checks of a measured one."""
        kinds = {*map(type, values["metrics"].values()), *map(type, values["seconds"].values())}
        return (
            _ID.fullmatch(values["id"]) is not None
            and max(len(values["config_key"]), len(values["stage"])) <= rows.LONGEST_KEY
            and abs(values["seed"]) < 1 << 63
            and abs(values["block"]) < 1 << 31
            and kinds <= {float}
            and math.isfinite(values["started_at"])
            and math.isfinite(values["ended_at"])
        )

    def _samples(self, samples: Values) -> tuple[int, bytes]:
        count, blob = samples.get("count"), samples.get("blob")
        if len(samples) != 2 or type(count) is not int or type(blob) is not str or not 0 < count < 1 << 31:
            raise self.refused("the samples of a trial are a count and a blob")
        return count, base64.b64decode(blob, validate=True)

    def _finite(self, value: float) -> float:
        if not math.isfinite(value):
            raise self.refused(f"{value} is not a time")
        return float(value)
