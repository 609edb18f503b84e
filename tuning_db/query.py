"""Answers of ``autotune query``: trials that fit a filter, sorted, grouped, or as points of a front, found in SQL.

Knows how names become fields; the language is in `filters`, the SQL in `expressions`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import Select, case, func, or_
from sqlalchemy import select as sql

from tuning_db import rows
from tuning_db.errors import QueryError
from tuning_db.expressions import TABLES, Expression, Expressions, check_storable, scenario_keys
from tuning_db.fields import Field, Row, fixed, flatten, guesses, learn, resolve, scenario_fields, shown, unknown
from tuning_db.filters import Compare, Node, parse
from tuning_db.schema import hardware, scenarios, trials
from tuning_db.store import IN_ONE_QUERY, Store

LOOKED_AT = 64
"""The newest trials whose fields are learned first; a name that none of them has is searched for in all."""

_OPTIONS = ("hardware", "model", "workload", "engine", "stage", "status")


def select(
    store: Store, where: str | None = None, *, sort: str | None = None, limit: int | None = None, **only: str | None
) -> list[Row]:
    """The trials that fit, as flat rows, oldest first unless ``sort`` says otherwise. Raises QueryError.

    ``sort`` lists fields by comma, each with a leading ``-`` for descending; rows without the field come last.
    ``limit`` keeps the first rows. ``only`` may hold ``hardware`` (part of a label, or the beginning of a key),
    ``model`` and ``workload`` (part of a name), ``engine``, ``stage`` and ``status`` (the whole word).
    """
    if limit is not None and limit < 0:
        raise QueryError(f"limit is {limit}; give 0 or more")
    asked = Asked(store, where, only)
    if asked.is_empty or limit == 0:
        return []
    order: list[Expression] = []
    for part in sort.split(",") if sort else ():
        name = part.strip()
        order += asked.sql.sorting(asked.fields.find(name.removeprefix("-")), name.startswith("-"))
    return _flat(store, asked.narrow(sql(trials)).order_by(*order, trials.c.id).limit(limit))


def group(
    store: Store, by: str, metrics: Iterable[str] = (), where: str | None = None, **only: str | None
) -> list[Row]:
    """One row for each value of a field, the largest group first: the value, ``trials``, ``ok``, and of each metric

    over the trials that ended well ``NAME_min``, ``NAME_mean`` and ``NAME_max``, None without any. Raises QueryError.
    """
    asked = Asked(store, where, only)
    if asked.is_empty:
        return []
    kind, value = asked.sql.grouping(asked.fields.find(by))
    ok = trials.c.status == "ok"
    totals = [func.count().label("trials"), func.sum(case((ok, 1), else_=0)).label("ok")]
    for name in metrics:
        field = asked.fields.find(name)
        if field.column not in ("metrics", "seconds"):
            raise QueryError(f"{field.name} is not a measured number; group over a metric such as output_tok_s")
        number = case((ok, asked.sql.number(field)))
        totals += [getattr(func, how)(number).label(f"{name}_{how}") for how in ("min", "avg", "max")]
    query = asked.narrow(sql(kind.label("kind"), value.label("value"), *totals)).group_by("kind", "value")
    found = []
    for row in store.rows(query.order_by(func.count().desc(), "kind", "value")):
        values = dict(row._mapping)
        word, key = values.pop("kind"), shown(values.pop("value"))
        key = word == "true" if word in ("true", "false") else key
        found.append({by: key, **{name.replace("_avg", "_mean"): part for name, part in values.items()}})
    return found


def points(store: Store, names: Sequence[str], where: str | None = None, **only: str | None) -> list[Row]:
    """``id``, ``scenario_key`` and the named metrics of every trial that ended well and has them all, oldest first."""
    asked = Asked(store, where, {**only, "status": "ok"})
    if asked.is_empty:
        return []
    fields = {name: asked.fields.find(f"metrics.{name}") for name in names}
    numbers = [asked.sql.number(field).label(f"metrics.{name}") for name, field in fields.items()]
    query = asked.narrow(sql(trials.c.id, trials.c.scenario_key, *numbers)).order_by(trials.c.id)
    for field in fields.values():
        query = query.where(asked.sql.present(field))
    return [dict(row._mapping) for row in store.rows(query)]


def by_id(store: Store, ids: Sequence[str]) -> list[Row]:
    """The flat rows of these trials, in this order; an unknown id has none."""
    found: dict[str, Row] = {}
    for start in range(0, len(ids), IN_ONE_QUERY):
        query = sql(trials).where(trials.c.id.in_(ids[start : start + IN_ONE_QUERY]))
        found |= {row["id"]: row for row in _flat(store, query)}
    return [found[key] for key in ids if key in found]


def pick(rows: list[Row], names: Iterable[str]) -> list[Row]:
    """The rows with only the named fields, under the names as given; None where a row lacks one. Raises QueryError."""
    known = field_names(rows)
    fields = {name: resolve(name, known) for name in names} if rows else {}
    return [{name: row.get(field) for name, field in fields.items()} for row in rows]


def field_names(rows: Iterable[Row]) -> dict[str, None]:
    """Every field of the rows in order of first appearance."""
    return {name: None for row in rows for name in row}


class Fields:
    """The fields of a database: those of its newest trials at first, any other when it is asked for."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.known = fixed()
        self.is_empty = not self._learn(sql(trials).order_by(trials.c.ended_at.desc()).limit(LOOKED_AT))
        self._is_wide = False

    def find(self, name: str) -> Field:
        """The field that a whole or a bare name means. Raises QueryError naming the nearest one."""
        check_storable(name)
        try:
            return self.known[resolve(name, self.known)]
        except QueryError:
            self.widen()
        try:
            return self.known[resolve(name, self.known)]
        except QueryError:
            return self._search(name)

    def widen(self) -> None:
        """Learn also from the newest trial of every stage of every scenario, the newest 500 of them."""
        if not self._is_wide:
            newest = func.max(trials.c.id)
            ids = sql(newest).group_by(trials.c.scenario_key, trials.c.stage).order_by(newest.desc()).limit(500)
            self._learn(sql(trials).where(trials.c.id.in_(ids)))
            self._is_wide = True

    def _search(self, name: str) -> Field:
        """Look into every row, which takes seconds at a million trials: only a rare field or a typo comes here."""
        maybe = guesses(name)
        speak = Expressions(self.store.engine.dialect.name)
        for mine in TABLES:
            here = [field for field in maybe if field.table == mine]
            has = [func.max(case((speak.present(field), 1), else_=0)) for field in here]
            (found,) = self.store.rows(sql(*has).select_from(TABLES[mine])) if has else ((),)
            for field, there in zip(here, found, strict=True):
                if there:
                    return self.known.setdefault(field.name, field)
        raise unknown(name, self.known)

    def _learn(self, query: Select[Any]) -> bool:
        found = [rows.trial_record(row) for row in self.store.rows(query)]
        keys = list(dict.fromkeys(trial.scenario_key for trial in found))
        questions = {scenario.key: scenario for scenario in self.store.scenarios_of(keys)}
        for trial in found:
            learn(self.known, trial, questions[trial.scenario_key])
        return bool(found)


class Asked:
    """A filter and plain options, bound to the fields of a database."""

    def __init__(self, store: Store, where: str | None, only: Mapping[str, str | None]) -> None:
        strange = only.keys() - set(_OPTIONS)
        if strange:
            raise TypeError(f"a query has no option {sorted(strange)[0]!r}")
        tree = parse(where) if where and where.strip() else None
        self.fields = Fields(store)
        self.is_empty = self.fields.is_empty
        self.sql = Expressions(store.engine.dialect.name)
        self._conditions = self._plain({name: text for name, text in only.items() if text})
        if tree and not self.is_empty:
            tree, used = self._bound(tree)
            self._conditions.append(self.sql.condition(tree, used))

    def narrow(self, query: Select[Any]) -> Select[Any]:
        return query.where(*self._conditions)

    def _bound(self, node: Node) -> tuple[Node, dict[str, Field]]:
        """The tree with whole names, and the field of each."""
        if isinstance(node, Compare):
            field = self.fields.find(node.field)
            return replace(node, field=field.name), {field.name: field}
        used: dict[str, Field] = {}
        parts = []
        for part in node.parts:
            bound, more = self._bound(part)
            parts.append(bound)
            used |= more
        return replace(node, parts=tuple(parts)), used

    def _plain(self, only: Mapping[str, str]) -> list[Expression]:
        names = fixed()
        mine, shared = [], []
        for name, text in only.items():
            if name in ("stage", "status"):
                mine.append(trials.c[name] == text)
            elif name == "engine":
                shared.append(scenarios.c.engine == text)
            elif name == "hardware":
                is_key = hardware.c.key.startswith(text, autoescape=True)
                shared.append(or_(hardware.c.label.icontains(text, autoescape=True), is_key))
            else:
                shared.append(self.sql.holds(Compare(name, "~", text, None), names[name]))
        if shared:
            mine.append(trials.c.scenario_key.in_(scenario_keys(*shared)))
        return mine


def _flat(store: Store, query: Select[Any]) -> list[Row]:
    found = [rows.trial_record(row) for row in store.rows(query)]
    keys = list(dict.fromkeys(trial.scenario_key for trial in found))
    questions = {scenario.key: scenario_fields(scenario) for scenario in store.scenarios_of(keys)}
    return [flatten(trial, questions[trial.scenario_key]) for trial in found]
