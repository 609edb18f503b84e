"""The filter language of ``autotune query``: parsed to a small tree and compared with rows, never evaluated as code.

``ttft_p99<500ms and (kv_dtype=int8 or status!=ok) and gpu~A100``: comparisons ``= != < <= > >= ~`` (~ is "contains",
in any case), joined by ``and``, ``or`` and parentheses. Values may be quoted, and numbers may carry a unit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal, DecimalException
from typing import Any

from tuning_db.errors import QueryError
from tuning_db.fields import Row, flatten, resolve, scenario_fields
from tuning_db.records import Scenario
from tuning_db.store import Store

UNITS = {
    "us": "1e-6",
    "µs": "1e-6",
    "ms": "1e-3",
    "s": "1",
    "min": "60",
    "h": "3600",
    "b": "1",
    "kb": "1e3",
    "mb": "1e6",
    "gb": "1e9",
    "tb": "1e12",
    "kib": "1024",
    "mib": "1048576",
    "gib": "1073741824",
    "tib": "1099511627776",
    "k": "1e3",
    "%": "0.01",
}
"""What one of each unit is in seconds, bytes or ones; case does not matter."""

LONGEST = 10_000
DEEPEST = 40

_TOKEN = re.compile(
    r"""\s*(?:(?P<paren>[()])|(?P<op>!=|<=|>=|==|=|<|>|~)|(?P<quoted>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')"""
    r"""|(?P<word>[^\s()=<>!~"']+))""",
    re.DOTALL,
)
_NUMBER = re.compile(r"([+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)([A-Za-zµ%]*)")
_ORDER: dict[str, Callable[[Any, Any], bool]] = {
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}


@dataclass(frozen=True, slots=True)
class Compare:
    """One comparison. ``number`` is the value in SI units when the text reads as one, else None."""

    field: str
    op: str
    text: str
    number: float | None

    def holds(self, row: Row) -> bool:
        """Whether the row satisfies it; a row without the field satisfies nothing, not even ``!=``."""
        value = row.get(self.field)
        if value is None:
            return False
        if self.op == "~":
            return self.text.lower() in _shown(value).lower()
        if self.op in ("=", "!="):
            return self._equals(value) == (self.op == "=")
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return self.number is not None and _ORDER[self.op](value, self.number)
        return _ORDER[self.op](_shown(value), self.text)

    def _equals(self, value: Any) -> bool:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return self.number is not None and value == self.number
        if isinstance(value, bool):
            return self.text.lower() == _shown(value)
        return bool(value == self.text)


@dataclass(frozen=True, slots=True)
class All:
    """Every part holds."""

    parts: tuple[Node, ...]

    def holds(self, row: Row) -> bool:
        """Whether the row satisfies every part."""
        return all(part.holds(row) for part in self.parts)


@dataclass(frozen=True, slots=True)
class Some:
    """At least one part holds."""

    parts: tuple[Node, ...]

    def holds(self, row: Row) -> bool:
        """Whether the row satisfies a part."""
        return any(part.holds(row) for part in self.parts)


Node = Compare | All | Some


def select(
    store: Store, where: str | None = None, *, sort: str | None = None, limit: int | None = None, **only: str | None
) -> list[Row]:
    """The trials that fit, as flat rows, oldest first unless ``sort`` says otherwise. Raises QueryError.

    ``sort`` lists fields by comma, each with a leading ``-`` for descending; rows without the field come last.
    ``limit`` keeps the first rows. ``only`` may hold ``hardware`` (part of a label, or the beginning of a key),
    ``model`` and ``workload`` (part of a name), ``engine``, ``stage`` and ``status`` (the whole word).
    """
    tree = parse(where) if where and where.strip() else None
    if limit is not None and limit < 0:
        raise QueryError(f"limit is {limit}; give 0 or more")
    stage, status = only.pop("stage", None), only.pop("status", None)
    rows = []
    for scenario in store.scenarios():
        if _is_wanted(scenario, only):
            shared = scenario_fields(scenario)
            rows += [flatten(trial, shared) for trial in store.trials(scenario.key, stage=stage, status=status)]
    rows.sort(key=lambda row: str(row["id"]))
    known = field_names(rows)
    if tree and rows:
        tree = bind(tree, known, rows)
        rows = [row for row in rows if tree.holds(row)]
    if sort and known:
        rows = order(rows, sort, known)
    return rows[:limit]


def pick(rows: list[Row], names: Iterable[str]) -> list[Row]:
    """The rows with only the named fields, under the names as given; None where a row lacks one. Raises QueryError."""
    known = field_names(rows)
    fields = {name: resolve(name, known) for name in names} if rows else {}
    return [{name: row.get(field) for name, field in fields.items()} for row in rows]


def field_names(rows: Iterable[Row]) -> dict[str, None]:
    """Every field of the rows in order of first appearance; also what a shell may complete."""
    return {name: None for row in rows for name in row}


def order(rows: list[Row], sort: str, known: Collection[str]) -> list[Row]:
    """The rows sorted by a comma-separated list of fields, ``-`` for descending. Raises QueryError."""
    for part in reversed(sort.split(",")):
        name = part.strip()
        field = resolve(name.removeprefix("-"), known)
        have = [row for row in rows if row.get(field) is not None]
        lack = [row for row in rows if row.get(field) is None]
        have.sort(key=lambda row, field=field: _rank(row[field]), reverse=name.startswith("-"))  # type: ignore[misc]
        rows = have + lack
    return rows


def bind(node: Node, known: Collection[str], rows: list[Row]) -> Node:
    """The tree with whole field names. Raises QueryError for an unknown field, or a text compared with a number."""
    if not isinstance(node, Compare):
        return replace(node, parts=tuple(bind(part, known, rows) for part in node.parts))
    field = resolve(node.field, known)
    values = [row[field] for row in rows if row.get(field) is not None]
    numeric = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
    if values and numeric and node.number is None and node.op != "~":
        raise QueryError(f"{field} is a number and {node.text!r} is not; units are {', '.join(UNITS)}")
    return replace(node, field=field)


def parse(text: str) -> Node:
    """The tree of a filter. Raises QueryError that shows where it stops making sense."""
    if len(text) > LONGEST:
        raise QueryError(f"the filter has {len(text)} characters; {LONGEST} are the most")
    parser = _Parser(text, _tokens(text))
    node = parser.some(0)
    if parser.at < len(parser.tokens):
        raise parser.error("expected `and`, `or` or the end")
    return node


def number(text: str) -> float | None:
    """The value of a number with an optional unit, in SI units, or None when the text is no such thing."""
    match = _NUMBER.fullmatch(text)
    if not match or match[2].lower() not in ("", *UNITS):
        return None
    try:
        # In decimal, so that 300ms is the very float that 0.3 is.
        value = float(Decimal(match[1]) * Decimal(UNITS.get(match[2].lower(), "1")))
    except (DecimalException, OverflowError):
        return None
    return value if abs(value) != float("inf") else None


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    start: int


def _tokens(text: str) -> list[_Token]:
    tokens, at, end = [], 0, len(text.rstrip())
    while at < end:
        match = _TOKEN.match(text, at)
        if not match or match.lastgroup is None:
            raise QueryError(f"cannot read the filter at {text[at : at + 20].strip()!r}; is a quote left open?")
        tokens.append(_Token(match.lastgroup, match[match.lastgroup], match.start(match.lastgroup)))
        at = match.end()
    return tokens


class _Parser:
    """Recursive descent over the tokens: some (or) of all (and) of comparisons and parentheses."""

    def __init__(self, text: str, tokens: list[_Token]) -> None:
        self.text, self.tokens, self.at = text, tokens, 0

    def some(self, depth: int) -> Node:
        if depth > DEEPEST:
            raise self.error(f"parentheses are nested more than {DEEPEST} deep")
        parts = [self.all(depth)]
        while self._word("or"):
            parts.append(self.all(depth))
        return parts[0] if len(parts) == 1 else Some(tuple(parts))

    def all(self, depth: int) -> Node:
        parts = [self.one(depth)]
        while self._word("and"):
            parts.append(self.one(depth))
        return parts[0] if len(parts) == 1 else All(tuple(parts))

    def one(self, depth: int) -> Node:
        if self._take("paren", "("):
            node = self.some(depth + 1)
            if not self._take("paren", ")"):
                raise self.error("expected `)`")
            return node
        name = self._take("word")
        if not name:
            raise self.error("expected a field")
        op = self._take("op")
        if not op:
            raise self.error(f"expected = != < <= > >= or ~ after {name.text!r}")
        value = self._take("word") or self._take("quoted")
        if not value:
            raise self.error(f"expected a value after {op.text!r}; quote a value that holds signs or spaces")
        if value.kind == "quoted":
            return Compare(
                name.text, op.text.replace("==", "="), re.sub(r"\\(.)", r"\1", value.text[1:-1], flags=re.S), None
            )
        return Compare(name.text, op.text.replace("==", "="), value.text, number(value.text))

    def error(self, what: str) -> QueryError:
        if self.at < len(self.tokens):
            start = self.tokens[self.at].start
            return QueryError(f"{what}, at {self.text[start : start + 20]!r} (character {start + 1})")
        return QueryError(f"{what}, at the end of the filter")

    def _word(self, text: str) -> bool:
        here = self.tokens[self.at] if self.at < len(self.tokens) else None
        if here and here.kind == "word" and here.text.lower() == text:
            self.at += 1
            return True
        return False

    def _take(self, kind: str, text: str | None = None) -> _Token | None:
        here = self.tokens[self.at] if self.at < len(self.tokens) else None
        if here and here.kind == kind and text in (None, here.text):
            self.at += 1
            return here
        return None


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _rank(value: Any) -> tuple[int, Any]:
    if isinstance(value, (int, float)):
        return 0, value
    return 1, str(value)


def _is_wanted(scenario: Scenario, only: Mapping[str, str | None]) -> bool:
    machine = scenario.hardware
    fits: dict[str, Callable[[str], bool]] = {
        "hardware": lambda text: text.lower() in machine.label.lower() or machine.key.startswith(text),
        "model": lambda text: text.lower() in str(scenario.model.get("name", "")).lower(),
        "workload": lambda text: text.lower() in str(scenario.workload.get("name", "")).lower(),
        "engine": lambda text: text == scenario.engine,
    }
    unknown = only.keys() - fits.keys()
    if unknown:
        raise TypeError(f"select() has no filter {sorted(unknown)[0]!r}")
    return all(not text or fits[name](text) for name, text in only.items())
