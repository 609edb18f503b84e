"""Measured tables to replay a search on: how they are stored, read, turned into a space and scored.

Knows nothing of who searches. A table is either ours (JSON lines: a header, then one line a configuration with its raw
blocks or its failure) or a plain CSV of one value a configuration.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from search_spaces import Choice, Config, Knob, Rule, Space, Value

SCHEMA = 1
DATA = Path(__file__).parent / "data"

Codes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """Every configuration that was measured, by the indices of its values.

    ``blocks``: {codes: value of each block that gave one}, empty for a failed configuration; what is not listed breaks
    a declared rule. ``higher`` says which way is better; values are positive.
    """

    name: str
    metric: str
    higher: bool
    knobs: Mapping[str, tuple[Value, ...]]
    default: Codes
    blocks: Mapping[Codes, tuple[float, ...]]
    head: Mapping[str, Any] = field(default_factory=dict)

    def space(self) -> Space:
        """The table as a search space: numbers are ordered knobs, and what is not listed breaks a rule."""
        names = list(self.knobs)
        knobs = tuple(
            Knob(name, "scheduler", Choice(values, ordered(values)), values[code], name)
            for (name, values), code in zip(self.knobs.items(), self.default, strict=True)
        )
        index = [{json.dumps(v): i for i, v in enumerate(values)} for values in self.knobs.values()]

        def unlisted(config: Mapping[str, Value], facts: Mapping[str, Any]) -> bool:
            return tuple(at[json.dumps(config[n])] for at, n in zip(index, names, strict=True)) not in self.blocks

        return Space(self.name, knobs, (Rule("listed", "the table excludes this combination", unlisted),))

    def config(self, codes: Codes) -> Config:
        return Config({n: v[c] for (n, v), c in zip(self.knobs.items(), codes, strict=True)})

    def codes(self, config: Mapping[str, Value]) -> Codes:
        return tuple(values.index(config[name]) for name, values in self.knobs.items())

    def goodness(self, value: float) -> float:
        """Higher is better, on the log scale."""
        return math.log(value) if self.higher else -math.log(value)

    def true(self, codes: Codes) -> float | None:
        """Goodness of the median over blocks; None for a failure."""
        blocks = self.blocks[codes]
        return self.goodness(statistics.median(blocks)) if blocks else None

    def optimum(self) -> float:
        """Goodness of the best configuration's median."""
        return max(true for codes in self.blocks if (true := self.true(codes)) is not None)


def ordered(values: Sequence[Value]) -> bool:
    return all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values)


def read(path: Path) -> Table:
    """A table from ``*.jsonl.gz`` (ours) or ``*.csv.gz``. Raises ValueError when the file is neither."""
    if path.name.endswith(".jsonl.gz"):
        return _read_lines(path)
    if path.name.endswith(".csv.gz"):
        return _read_csv(path)
    raise ValueError(f"{path}: a table ends in .jsonl.gz (see scripts/record_table.py) or .csv.gz")


def _read_lines(path: Path) -> Table:
    """Line 1 the header, then {"c": codes, "v": [value of each block, null where it failed], "s": status, "r": reason}.

    A configuration of which most blocks failed is a failure. Blocks are brought to one level, the median of all: what
    the machine's own speed does between them is no property of a configuration. A default that is not listed is taken
    at its nearest values.
    """
    with gzip.open(path, "rt", encoding="utf-8") as file:
        head = json.loads(next(file))
        if head.get("schema") != SCHEMA:
            raise ValueError(f"{path}: schema {head.get('schema')!r} instead of {SCHEMA}; record the table again")
        rows = [json.loads(line) for line in file]
    knobs = {name: tuple(values) for name, values in head["knobs"].items()}
    blocks, level = {}, _levels([row["v"] for row in rows])
    for row in rows:
        values = tuple(float(v) / by for v, by in zip(row["v"], level, strict=True) if v is not None)
        blocks[tuple(row["c"])] = values if 2 * len(values) > len(row["v"]) else ()
    default = tuple(_nearest(values, head["default"][name]) for name, values in knobs.items())
    about = {key: head[key] for key in ("machine", "build", "workload", "recorded", "unit") if key in head}
    return Table(head["name"], head["metric"], head["higher"], knobs, default, blocks, about)


def _levels(rows: Sequence[Sequence[float | None]]) -> list[float]:
    """Each block's median over that of all blocks together."""
    columns = [[v for v in column if v is not None] for column in zip(*rows, strict=True)]
    whole = statistics.median(v for column in columns for v in column)
    return [statistics.median(column) / whole for column in columns]


def _nearest(values: Sequence[Value], wanted: Value) -> int:
    if wanted in values or not ordered(values):
        return values.index(wanted)
    return min(range(len(values)), key=lambda i: abs(float(values[i]) - float(wanted)))


def _read_csv(path: Path) -> Table:
    """Columns of numbers, the last one the time, empty where the configuration failed; the first row is the default."""
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        reader = csv.reader(file)
        *names, metric = next(reader)
        rows = [(tuple(int(v) for v in row[:-1]), row[-1]) for row in reader]
    values = [tuple(sorted({row[i] for row, _ in rows})) for i in range(len(names))]
    coded = [(tuple(values[i].index(v) for i, v in enumerate(row)), time) for row, time in rows]
    blocks = {codes: (float(time),) if time else () for codes, time in coded}
    name = path.name.removesuffix(".csv.gz")
    return Table(name, metric, False, dict(zip(names, values, strict=True)), coded[0][0], blocks)
