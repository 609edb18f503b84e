"""The filter language of ``autotune query``: parsed to a small tree, never evaluated as code. Knows no field.

``ttft_p99<500ms and (kv_dtype=int8 or status!=ok) and gpu~A100``: comparisons ``= != < <= > >= ~`` (~ is "contains",
in any case), joined by ``and``, ``or`` and parentheses. Values may be quoted, and numbers may carry a unit.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal, DecimalException

from tuning_db.errors import QueryError

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


@dataclass(frozen=True, slots=True)
class Compare:
    """One comparison. ``number`` is the value in SI units when the text reads as one, else None.

    It holds for no row without the field, not even with ``!=``.
    """

    field: str
    op: str
    text: str
    number: float | None


@dataclass(frozen=True, slots=True)
class All:
    """Every part holds."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Some:
    """At least one part holds."""

    parts: tuple[Node, ...]


Node = Compare | All | Some


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
