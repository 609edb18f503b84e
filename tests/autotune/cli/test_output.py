"""One implementation prints every list: machine formats raw and complete, people's formats short and safe."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.cli.output import cell, quantity, render

ROWS: list[dict[str, Any]] = [
    {"id": "a1", "ttft_p50": 0.0123, "config": {"x": True}, "weight_bytes": 17_825_792.0},
    {"id": "b|\n\x1b[31m", "ttft_p50": None},
]
COLUMNS = ("id", "ttft_p50", "weight_bytes", "config")


def test_json_has_a_schema_and_raw_units() -> None:
    document = json.loads(render(ROWS, COLUMNS, "json", "trials"))
    assert document["schema"] == 1
    assert document["trials"][0]["ttft_p50"] == 0.0123
    lines = [json.loads(line) for line in render(ROWS, COLUMNS, "jsonl").splitlines()]
    assert [line["schema"] for line in lines] == [1, 1]


def test_csv_reads_back() -> None:
    rows = list(csv.reader(io.StringIO(render(ROWS, COLUMNS, "csv"))))
    assert rows[0] == list(COLUMNS)
    assert rows[1] == ["a1", "0.0123", "17825792.0", '{"x": true}']
    assert rows[2][0] == ROWS[1]["id"]


def test_people_see_units_and_no_control_characters() -> None:
    table = render(ROWS, COLUMNS, "table")
    assert "12.3 ms" in table and "17 MiB" in table
    assert "\x1b" not in table and table.count("\n") == 3
    assert cell(25_769_803_776, "memory_bytes") == "24 GiB"
    assert "b\\|" in render(ROWS, COLUMNS, "md")
    assert render([], COLUMNS, "table").splitlines() == ["  ".join(COLUMNS)]


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(1.5, "s", "1.5 s"), (0.0021, "s", "2.1 ms"), (3e-6, "s", "3 µs"), (3 * 2**30, "B", "3 GiB"), (12, "B", "12 B"),
     (143.21, "1/min", "143.2")],
)  # fmt: skip
def test_quantities(value: float, unit: str, text: str) -> None:
    assert quantity(value, unit) == text


@given(st.text())
def test_no_stored_text_reaches_the_terminal_raw(text: str) -> None:
    assert all(c.isprintable() for c in cell(text))
