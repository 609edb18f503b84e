"""Measured tables to replay a search on: how they are stored, read, turned into a space and scored.

Knows nothing of who searches. A table is either ours (JSON lines: a header, then one line a configuration with its raw
blocks or its failure) or a plain CSV of one value a configuration.
"""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import math
import random
import statistics
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from search_spaces import Choice, Config, Knob, Rule, Space, Value

SCHEMA = 1
BESIDE = 15
"""Runs before and after one whose median deviation counts as the machine's."""
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

    A configuration of which most blocks failed is a failure. The machine's drift is removed, see `steady`. A default
    outside the recorded values is stood for by the nearest recorded one.
    """
    with gzip.open(path, "rt", encoding="utf-8") as file:
        head = json.loads(next(file))
        if head.get("schema") != SCHEMA:
            raise ValueError(f"{path}: schema {head.get('schema')!r} instead of {SCHEMA}; record the table again")
        rows = [json.loads(line) for line in file]
    knobs = {name: tuple(values) for name, values in head["knobs"].items()}
    kept = steady(knobs, {tuple(row["c"]): row["v"] for row in rows})
    blocks = {codes: tuple(v for v in values if not math.isnan(v)) for codes, values in kept.items()}
    blocks = {codes: values if 2 * len(values) > len(kept[codes]) else () for codes, values in blocks.items()}
    default = tuple(_nearest(values, head["default"][name]) for name, values in knobs.items())
    about = {key: head[key] for key in ("machine", "build", "workload", "recorded", "unit") if key in head}
    return Table(head["name"], head["metric"], head["higher"], knobs, default, blocks, about)


def steady(
    knobs: Mapping[str, Sequence[Value]], rows: Mapping[Codes, Sequence[float | None]]
) -> dict[Codes, tuple[float, ...]]:
    """Each block's values, NaN where one failed, without what the machine's own speed did to them.

    First each block is divided by its median over configurations. Then every run is divided by the median deviation of
    the BESIDE runs before and after it, from its configuration's median over blocks, three times over: what runs one
    after another share is the machine's. The order of runs in a block is that of `record_table.measure`.
    """
    values = np.log(np.array([[math.nan if v is None else v for v in row] for row in rows.values()], float))
    places = {codes: i for i, codes in enumerate(rows)}
    every = list(itertools.product(*(range(len(v)) for v in knobs.values())))
    flat = values - np.nanmedian(values, axis=0) + np.nanmedian(values)
    level = flat.copy()
    for _ in range(3):
        with warnings.catch_warnings():  # a configuration of which every block failed has no median
            warnings.simplefilter("ignore", RuntimeWarning)
            true = np.nanmedian(level, axis=1)
        for block in range(flat.shape[1]):
            order = every.copy()
            random.Random(block + 1).shuffle(order)
            index = np.array([places[codes] for codes in order if codes in places])
            apart = (flat[:, block] - true)[index]
            for i, place in enumerate(index):
                beside = np.concatenate([apart[max(0, i - BESIDE) : i], apart[i + 1 : i + 1 + BESIDE]])
                level[place, block] = flat[place, block] - np.nanmedian(beside)
    return {codes: tuple(map(float, np.exp(row))) for codes, row in zip(rows, level, strict=True)}


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
