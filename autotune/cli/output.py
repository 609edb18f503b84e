"""The only writer to the terminal: results on stdout in five formats, progress and warnings on stderr."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import click

FORMATS = ("table", "json", "jsonl", "csv", "md")
SCHEMA = 1

format_option = click.option(
    "--format", "form", type=click.Choice(FORMATS), default="table", show_default=True, help="How results are printed."
)


def emit(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], form: str, what: str = "rows") -> None:
    """Print rows: raw SI units in the machine formats, short cells in table and md."""
    click.echo(render(rows, columns, form, what), nl=False)


def render(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], form: str, what: str = "rows") -> str:
    """The text that `emit` prints; pure."""
    if form == "json":
        return json.dumps({"schema": SCHEMA, what: [dict(row) for row in rows]}, indent=2, ensure_ascii=False) + "\n"
    if form == "jsonl":
        return "".join(json.dumps({"schema": SCHEMA, **row}, ensure_ascii=False) + "\n" for row in rows)
    if form == "csv":
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([_plain(row.get(name)) for name in columns] for row in rows)
        return buffer.getvalue()
    cells = [[cell(row.get(name), name) for name in columns] for row in rows]
    if form == "md":
        lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
        lines += ["| " + " | ".join(c.replace("|", "\\|") for c in line) + " |" for line in cells]
        return "\n".join(lines) + "\n"
    cells.insert(0, list(columns))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() + "\n" for line in cells)


def cell(value: Any, name: str = "") -> str:
    """One short cell for people; metric values in their own unit."""
    if value is None:
        return "-"
    if isinstance(value, float) or (isinstance(value, int) and name.endswith("bytes")):
        from autotune.metrics import METRICS

        known = {"bytes": "B", "s": "s"}.get(name.rpartition("_")[2], "")
        metric = name if name in METRICS else name.rpartition("_")[0]  # as in kl_mean and in kl_mean_best
        unit = METRICS[metric].unit if metric in METRICS else known
        return quantity(float(value), unit)
    if isinstance(value, (dict, list, tuple)):
        return json.dumps(value, ensure_ascii=False)
    return _printable(str(value))


def quantity(value: float, unit: str) -> str:
    """A number with its unit at a readable size: seconds down to µs, bytes up to GiB."""
    if unit == "s":
        for scale, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
            if abs(value) >= scale or name == "µs":
                return f"{value / scale:.3g} {name}"
    if unit == "B":
        for scale, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
            if abs(value) >= scale:
                return f"{value / scale:.3g} {name}"
        return f"{value:.0f} B"
    return f"{value:.4g}"


def _plain(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (dict, list, tuple)) else value


def _printable(text: str) -> str:
    """Control characters from stored text never reach the terminal raw."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def note(text: str) -> None:
    """One line of progress or a warning."""
    click.echo(text, err=True)


def fail(message: str, code: int) -> NoReturn:
    """End with one clear message."""
    click.echo(f"autotune: {message}", err=True)
    raise SystemExit(code)


class Live:
    """One line that is redrawn on a terminal; nothing where there is none, or with TERM=dumb."""

    def __init__(self) -> None:
        self._on = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"

    def show(self, text: str) -> None:
        if self._on:
            width = os.get_terminal_size(sys.stderr.fileno()).columns - 1
            sys.stderr.write("\r\x1b[K" + text[:width])
            sys.stderr.flush()

    def clear(self) -> None:
        if self._on:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


@contextmanager
def clear_errors() -> Iterator[None]:
    """Turn the one-line errors of all parts into one line and an exit code; bugs keep their traceback."""
    wrong_usage, nothing, failed = _error_types()
    try:
        with _clear_warnings():
            yield
    except wrong_usage as error:
        fail(str(error), 2)
    except nothing as error:
        fail(str(error), getattr(error, "code", 3))
    except failed as error:
        fail(str(error), 1)


@contextmanager
def _clear_warnings() -> Iterator[None]:
    """Show what the database warns about as one line for people; other warnings stay as they are."""
    from tuning_db import StoreWarning

    usual = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if issubclass(category, StoreWarning):
            note(f"warning: {message}")
        else:
            usual(message, category, *where, **more)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = usual


def _error_types() -> tuple[tuple[type[Exception], ...], ...]:
    from autotune.catalogue import HardwareError
    from autotune.decision import TuneError
    from autotune.model import ModelError
    from autotune.objective import ObjectiveError
    from autotune.outcome import EngineError
    from autotune.plan import PlanError
    from autotune.slo import SloError
    from autotune.workload import WorkloadError
    from search_spaces import SpaceError
    from tuning_db import StoreError

    wrong = (PlanError, HardwareError, SloError, ModelError, ObjectiveError, WorkloadError, SpaceError, StoreError)
    return wrong, (TuneError,), (EngineError,)
