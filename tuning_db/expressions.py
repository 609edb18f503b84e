"""Fields and filters as SQL expressions over ``trials``, on SQLite and PostgreSQL alike; every value is bound.

Knows how the two databases take JSON apart; knows nothing of which fields there are.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from sqlalchemy import (
    Boolean,
    ColumnElement,
    Double,
    Integer,
    Select,
    Text,
    and_,
    case,
    cast,
    collate,
    column,
    false,
    func,
    literal,
    or_,
    select,
    true,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

from tuning_db.errors import QueryError
from tuning_db.fields import Field, Path
from tuning_db.filters import UNITS, All, Compare, Node
from tuning_db.schema import hardware, scenarios, trials

Expression = ColumnElement[Any]
TABLES = {"trials": trials, "scenarios": scenarios, "hardware": hardware}

_ORDER: Mapping[str, Callable[[Any, Any], Any]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_EASY_KEY = re.compile(r"[\w /:+@%,;#&*-]+", re.ASCII)
_NEVER_STORED = re.compile("[\x00\ud800-\udfff]")


class Expressions:
    """SQL for one of the two dialects, ``sqlite`` or ``postgresql``."""

    def __init__(self, dialect: str) -> None:
        self.on_sqlite = dialect == "sqlite"

    def condition(self, node: Node, fields: Mapping[str, Field]) -> Expression:
        """What rows of ``trials`` must satisfy; ``fields`` has every name of the tree. Raises QueryError."""
        if isinstance(node, Compare):
            return self.compare(node, fields[node.field])
        join = and_ if isinstance(node, All) else or_
        return join(*(self.condition(part, fields) for part in node.parts))

    def compare(self, node: Compare, field: Field) -> Expression:
        """One comparison, false or NULL for a row without the field. Raises QueryError for a text as a number."""
        if field.numeric and node.number is None and node.op != "~":
            raise QueryError(f"{field.name} is a number and {node.text!r} is not; units are {', '.join(UNITS)}")
        check_storable(node.text)
        holds = self.holds(node, field)
        return holds if field.table == "trials" else trials.c.scenario_key.in_(scenario_keys(holds))

    def holds(self, node: Compare, field: Field) -> Expression:
        """The comparison over the field's own table."""
        return self._json(node, field) if field.paths else self._plain(node, field)

    def present(self, field: Field) -> Expression:
        """Whether the row has the field; for a field of a scenario over ``scenarios`` and ``hardware``."""
        return self.kind(field).is_not(None)

    def sorting(self, field: Field, down: bool) -> list[Expression]:
        """Terms of ORDER BY: numbers before texts, the other way round with ``down``, rows without the field last."""

        def turned(term: Expression) -> Expression:
            return term.desc() if down else term

        if not field.paths:
            return [turned(self._of_trial(field, self._by_code(field)))]
        value = self.value(field)
        lacks = self._of_trial(field, value.is_(None))
        if self.on_sqlite:  # whose own order is numbers, then texts by code point
            return [lacks, turned(self._of_trial(field, value))]
        kind, text = self.kind(field), _text(value)
        flag = func.to_jsonb(cast(cast(text, Boolean), Integer))
        terms = [
            case((kind.in_(("number", "boolean")), 0), else_=1),
            case((kind == "number", value), (kind == "boolean", flag)),
            collate(case((kind.in_(("string", "array")), text)), "C"),
        ]
        return [lacks, *(turned(self._of_trial(field, term)) for term in terms)]

    def grouping(self, field: Field) -> tuple[Expression, Expression]:
        """The kind of the field's value (NULL for a column) and the value itself, to group and to select."""
        kind = self.kind(field) if field.paths else literal(None, Text)
        value = self.value(field) if field.paths else TABLES[field.table].c[field.column]
        return self._of_trial(field, kind), self._of_trial(field, value)

    def number(self, field: Field) -> Expression:
        """A field of ``metrics`` or ``seconds`` as a float."""
        value = self.value(field)
        return value if self.on_sqlite else cast(value, Double)

    def value(self, field: Field) -> Expression:
        """The value in a JSON column, NULL where there is none: an SQL value on SQLite, ``jsonb`` on PostgreSQL."""
        stored = TABLES[field.table].c[field.column]
        values = [self._at(stored, path)[1] for path in field.paths]
        return values[0] if len(values) == 1 else func.coalesce(*values, type_=values[0].type)

    def kind(self, field: Field) -> Expression:
        """The JSON type of the value, by the database's own word; NULL where there is none."""
        stored = TABLES[field.table].c[field.column]
        kinds = [self._at(stored, path)[0] for path in field.paths]
        return kinds[0] if len(kinds) == 1 else func.coalesce(*kinds, type_=Text())

    def _json(self, node: Compare, field: Field) -> Expression:
        value, compare = self.value(field), _ORDER.get(node.op)
        amount = literal(node.number, Double) if node.number is not None else None
        if field.column in ("metrics", "seconds") and compare and amount is not None:
            return compare(value, amount) if self.on_sqlite else compare(value, func.to_jsonb(amount))  # type: ignore[no-any-return]
        kind = self.kind(field)
        shown = case((kind.in_(("true", "false")), kind), else_=cast(value, Text)) if self.on_sqlite else _text(value)
        if compare is None:
            return and_(kind != "object", kind != "null", _icontains(shown, node.text))
        is_number = kind.in_(("integer", "real") if self.on_sqlite else ("number",))
        is_flag = kind.in_(("true", "false") if self.on_sqlite else ("boolean",))
        numbers: Expression = true() if node.op == "!=" else false()
        if amount is not None:
            numbers = compare(value, amount if self.on_sqlite else func.to_jsonb(amount))
        texts = compare(shown if self.on_sqlite else collate(shown, "C"), literal(node.text, Text))
        flags = compare(shown, literal(node.text.lower() if node.op in ("=", "!=") else node.text, Text))
        is_text = kind.in_(("text", "array") if self.on_sqlite else ("string", "array"))
        return or_(and_(is_number, numbers), and_(is_text, texts), and_(is_flag, flags))

    def _plain(self, node: Compare, field: Field) -> Expression:
        stored, compare = TABLES[field.table].c[field.column], _ORDER.get(node.op)
        if compare is None:
            return _icontains(_flag(stored) if field.name == "counted" else cast(stored, Text), node.text)
        if field.numeric:
            return compare(stored, literal(node.number, Double))  # type: ignore[no-any-return]
        if field.name == "counted":
            return compare(_flag(stored), literal(node.text.lower(), Text))  # type: ignore[no-any-return]
        ordered = node.op not in ("=", "!=")  # equality goes by an index, whatever its collation
        return compare(self._by_code(field) if ordered else stored, literal(node.text, Text))  # type: ignore[no-any-return]

    def _by_code(self, field: Field) -> Expression:
        stored = TABLES[field.table].c[field.column]
        return collate(stored, "C") if not self.on_sqlite and isinstance(stored.type, Text) else stored

    def _of_trial(self, field: Field, value: Expression) -> Expression:
        return value if field.table == "trials" else _scenario(select(value)).scalar_subquery()

    def _at(self, stored: Expression, path: Path) -> tuple[Expression, Expression]:
        """The kind and the value at a path of keys."""
        if not self.on_sqlite:
            value = func.jsonb_extract_path(stored, *path, type_=JSONB())
            return func.jsonb_typeof(value, type_=Text()), func.nullif(
                value, cast(literal("null", Text), JSONB), type_=JSONB()
            )
        if all(map(_EASY_KEY.fullmatch, path)):
            where = "$" + "".join(f'."{key}"' for key in path)
            return func.json_type(stored, where, type_=Text()), func.json_extract(stored, where)
        # SQLite's paths cannot spell every key; json_each compares whole keys.
        kind: Expression = literal(None, Text)
        for key in path:
            entry = func.json_each(stored).table_valued(column("key"), column("value"), column("type"))
            here = entry.c.key == literal(key, Text)
            kind = select(entry.c.type).where(here).scalar_subquery()
            stored = select(entry.c.value).where(here).scalar_subquery()
        return kind, stored


def check_storable(text: str) -> None:
    """Refuse with QueryError a text that neither database can hold, and so cannot be asked for either."""
    if _NEVER_STORED.search(text):
        raise QueryError(f"no stored text holds a NUL character or half a surrogate pair, as {text[:40]!r} does")


def scenario_keys(*holds: Expression) -> Select[Any]:
    """The keys of the scenarios for which all expressions over ``scenarios`` and ``hardware`` hold."""
    return select(scenarios.c.key).select_from(scenarios.join(hardware)).where(*holds)


def _scenario(query: Select[Any]) -> Select[Any]:
    here = scenarios.c.key == trials.c.scenario_key
    return query.select_from(scenarios.join(hardware)).where(here).correlate(trials)


def _icontains(value: Expression, text: str) -> Expression:
    return value.icontains(text, autoescape=True)


def _text(value: Expression) -> Expression:
    return value.op("#>>", return_type=Text())(cast(literal("{}", Text), ARRAY(Text)))


def _flag(stored: Expression) -> Expression:
    return case((stored, literal("true", Text)), else_=literal("false", Text))
