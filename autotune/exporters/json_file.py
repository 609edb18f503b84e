"""The export as a JSON document, `autotune-export/1`: rendered, and read back strictly. Knows no engine's meaning."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from autotune.exporters.base import Evidence, Export, ExportError
from autotune.runtimes.native.kernels.tuning import Table
from autotune.stats import Interval, Verdict
from search_spaces import Space, SpaceError, load
from search_spaces.kernels import SPACES

FORMAT = "autotune-export/1"
LARGEST = 4 << 20
"""Bytes of a file that may still be an export; a longer one is refused unread."""

_EXPORT = {field.name: field.type for field in fields(Export)}
_EVIDENCE = {field.name: field.type for field in fields(Evidence)}
_AGAIN = "write it again with `autotune export`"


class JsonFile:
    """One file, `best.json`: sorted and indented ASCII, so that two exports differ only where they differ."""

    name = "json"

    def render(self, export: Export) -> dict[str, str]:
        """See `Exporter`. Raises ExportError for a value that JSON lacks, such as NaN."""
        ratio = export.evidence.ratio
        document = {
            "format": FORMAT,
            **{name: getattr(export, name) for name in _EXPORT},
            "evidence": {
                **{name: getattr(export.evidence, name) for name in _EVIDENCE},
                "ratio": {"mean": ratio.mean, "low": _bound(ratio.low), "high": _bound(ratio.high), "n": ratio.n},
            },
        }
        try:
            text = json.dumps(document, sort_keys=True, indent=2, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ExportError(f"this configuration cannot be written as JSON: {error}") from None
        return {"best.json": text + "\n"}


def read(path: Path) -> Export:
    """The export in a file. Raises ExportError, naming the file and the part, unless it is whole and understood."""
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
    except OSError as error:
        raise ExportError(
            f"cannot read {path}: {error.strerror}; `autotune export -o FILE` writes such a file"
        ) from None
    return parse(data, str(path))


def parse(data: bytes, where: str) -> Export:
    """The export in ``data``; ``where`` names it in errors. Raises ExportError."""
    if len(data) > LARGEST:
        raise ExportError(f"{where} is larger than {LARGEST >> 20} MiB, so it is no export; {_AGAIN}")
    reader = _Reader(where)
    document = reader.document(data)
    found = document.pop("format", None)
    if found != FORMAT:
        kind = "an export of another version" if str(found).startswith("autotune-export/") else "no autotune export"
        raise ExportError(f"{where} is {kind}: format is {found!r}, this version reads {FORMAT!r}; {_AGAIN}")
    parts = reader.typed(document, _EXPORT, "")
    parts["evidence"] = reader.evidence(parts["evidence"])
    try:
        parts["kernels"] = kernels(parts["kernels"])
    except ValueError as error:
        reader.fail(f"'kernels': {error}")
    export = Export(**parts)
    reader.config(export)
    return export


def kernels(table: Any) -> dict[str, dict[str, Any]]:
    """``table`` if it is one of tuned kernels: known operators, and meta-parameters that a backend has. ValueError."""
    if not isinstance(table, dict) or not all(isinstance(choice, dict) for choice in table.values()):
        raise ValueError("a table of tables is wanted, one for each operator")
    for key, choice in Table(table).entries.items():
        if not any(_has(space, choice) for space in SPACES.values()):
            raise ValueError(f"{key} has settings that no kernel takes: {json.dumps(choice)[:80]}")
    return table


def _has(space: Space, choice: Mapping[str, Any]) -> bool:
    try:
        return dict(space.complete(choice)) == dict(choice)
    except SpaceError:
        return False


class _Reader:
    """Checks one document, naming its file in every error."""

    def __init__(self, where: str) -> None:
        self.where = where

    def fail(self, message: str) -> NoReturn:
        raise ExportError(f"{self.where}: {message}; {_AGAIN}")

    def document(self, data: bytes) -> dict[str, Any]:
        try:
            document = json.loads(
                data, object_pairs_hook=self._once, parse_constant=self._constant, parse_float=self._float
            )
        except ExportError:
            raise
        except (ValueError, RecursionError) as error:
            self.fail(f"not valid JSON ({error})")
        if not isinstance(document, dict):
            self.fail("not a JSON object")
        return document

    def _once(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = next(name for name, _ in pairs if [key for key, _ in pairs].count(name) > 1)
            self.fail(f"{twice!r} is there twice")
        return found

    def _constant(self, text: str) -> NoReturn:
        self.fail(f"{text} is not a number that may stand in an export")

    def _float(self, text: str) -> float:
        value = float(text)
        return value if math.isfinite(value) else self._constant(text)

    def typed(self, table: Mapping[str, Any], wanted: Mapping[str, Any], at: str) -> dict[str, Any]:
        """``table`` with exactly the keys of ``wanted``, each of its declared kind."""
        for name in table:
            if name not in wanted:
                near = get_close_matches(name, wanted, 1)
                self.fail(f"unknown key {at + name!r}" + (f", did you mean {at + near[0]!r}?" if near else ""))
        for name, kind in wanted.items():
            if name not in table:
                self.fail(f"{at + name!r} is missing")
            self._kind(table[name], kind, at + name)
        return dict(table)

    def _kind(self, value: Any, kind: Any, name: str) -> None:
        text = str(kind)
        if text == "str":
            good, words = isinstance(value, str), "text"
        elif text == "int":
            good, words = type(value) is int and value >= 0, "a whole number"
        elif text.startswith("tuple"):
            good, words = isinstance(value, list) and all(isinstance(v, str) for v in value), "a list of texts"
        elif text == "Mapping[str, float]":
            good, words = isinstance(value, dict) and all(map(_number, value.values())), "a table of numbers"
        else:
            good, words = isinstance(value, dict), "a table"
        if not good:
            self.fail(f"{name!r} must be {words}, not {json.dumps(value)[:60]}")

    def evidence(self, table: Mapping[str, Any]) -> Evidence:
        parts = self.typed(table, _EVIDENCE, "evidence.")
        if parts["verdict"] not in list(Verdict):
            self.fail(f"'evidence.verdict' must be one of {', '.join(Verdict)}, not {parts['verdict']!r}")
        if parts["better"] not in ("higher", "lower"):
            self.fail(f"'evidence.better' must be higher or lower, not {parts['better']!r}")
        ratio = parts["ratio"]
        whole = set(ratio) == {"mean", "low", "high", "n"} and type(ratio["n"]) is int and ratio["n"] >= 1
        bounds = [ratio[name] for name in ("low", "high")] if whole else []
        if not whole or not _number(ratio["mean"]) or not all(b is None or _number(b) for b in bounds):
            self.fail("'evidence.ratio' must have the numbers mean, low, high and the count n")
        low = -math.inf if ratio["low"] is None else float(ratio["low"])
        high = math.inf if ratio["high"] is None else float(ratio["high"])
        parts["ratio"] = Interval(float(ratio["mean"]), low, high, ratio["n"])
        parts["trials"] = tuple(parts["trials"])
        return Evidence(**parts)

    def config(self, export: Export) -> None:
        """Every knob known, with a value it takes; none missing, none without meaning; no rule broken."""
        for name, value in export.config.items():
            if not isinstance(value, (str, int, float, bool)):
                self.fail(f"knob {name!r} must be text, a number or a truth value, not {json.dumps(value)[:60]}")
        try:
            space = load(export.engine)
            whole = space.complete(export.config)
        except SpaceError as error:
            self.fail(str(error))
        wrong = set(whole) ^ set(export.config)
        if wrong:
            name = min(wrong)
            self.fail(
                f"knob {name!r} is missing" if name in whole else f"knob {name!r} means nothing beside the others"
            )
        broken = space.broken(whole)
        if broken:
            self.fail("the configuration breaks a rule: " + "; ".join(broken))


def _bound(value: float) -> float | None:
    """An interval's end, None where it has none."""
    return value if math.isfinite(value) else None


def _number(value: Any) -> bool:
    """Whether ``value`` is a finite number; a whole number too large for a float is not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
