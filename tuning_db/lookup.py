"""Finds what was confirmed for this machine, or for the nearest one, and names every difference. Knows no statistics.

Only confirming trials that ended well are returned, and a configuration with a counted confirmation that failed is left
out altogether. Nothing is substituted silently: a match that is not exact carries its tier, its distance and its
differences. The objective is no part of what must be the same: it is applied to what was stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from sqlalchemy import ColumnElement, and_, not_, select

from tuning_db import distance
from tuning_db.canonical import digest
from tuning_db.distance import Difference
from tuning_db.records import Facts, Hardware, Scenario, Trial
from tuning_db.schema import scenarios

if TYPE_CHECKING:
    from tuning_db.store import Store

Goodness = Callable[[Mapping[str, float]], float | None]
"""Metrics to a number, larger is better; None when they do not answer the question."""
Meets = Callable[[Sequence[Trial]], bool]
"""Whether the confirming runs of one configuration keep what is asked of it, such as an SLO."""

PARTS = ("hardware", "engine", "model", "workload")
_LIGHT = [scenarios.c[name] for name in ("key", "created_at", *(f"{part}_key" for part in PARTS))]


@dataclass(frozen=True, slots=True)
class Match:
    """A scenario with confirmed trials: how near it is (``tier``), what differs, and the trials that ended well."""

    tier: str
    differs: tuple[Difference, ...]
    scenario: Scenario
    trials: tuple[Trial, ...]

    @property
    def distance(self) -> float:
        """0 for an exact match; see `tuning_db.distance`."""
        return distance.total(self.differs)


@dataclass(frozen=True, slots=True)
class Best:
    """The best configuration of a match: ``value`` is the median goodness over ``trials``, its confirming runs.

    ``refused`` counts the configurations that were better and did not meet what was asked of them.
    """

    match: Match
    config: Mapping[str, Any]
    config_key: str
    value: float
    trials: tuple[Trial, ...]
    refused: int = 0


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The facts of each part to compare with, None for a part that is not compared; names that must be the same."""

    hardware: Hardware
    engine: str | None
    parts: Mapping[str, Facts | None]
    objective: Facts | None
    where: tuple[ColumnElement[bool], ...]

    def same(self) -> ColumnElement[bool]:
        """What holds in SQL for an exact match."""
        keys = {"hardware_key": self.hardware.key}
        build, model, workload = (self.parts[part] for part in PARTS[1:])
        if build is not None:
            keys["engine_key"] = digest("e1", {"engine": self.engine, "build": build})
        if model is not None:
            keys["model_key"] = digest("md1", model)
        if workload is not None:
            keys["workload_key"] = digest("w1", workload)
        return and_(*(scenarios.c[name] == key for name, key in keys.items()))

    def differences(self, part: str, have: Scenario) -> tuple[Difference, ...]:
        """What differs in one part of a stored scenario."""
        want = self.parts[part]
        return () if want is None else distance.differences(part, want, _facts(part, have))


def matches(
    store: Store,
    wanted: Scenario | Hardware,
    *,
    engine: str | None = None,
    build: Facts | None = None,
    model: str | None = None,
    workload: str | None = None,
) -> Iterator[Match]:
    """Every scenario with confirmed trials, nearest first, and the newest first among equals; read as asked for.

    A whole scenario is compared fact by fact, and its engine and model name must be the same; given hardware alone,
    only machines are compared, and with ``engine`` and ``build`` the build of that engine. ``engine``, ``model`` and
    ``workload`` keep the scenarios of exactly that name. Raises StoreError.
    """
    asked = _wanted(wanted, engine, build, {"model": model, "workload": workload})
    ranked = ((name, have) for rank in (_exact, _others) for name, have in rank(store, asked))
    for name, have in ranked:
        trials = confirmed(store, have.key)
        if trials:
            yield Match(name, _all_differences(asked, have), have, trials)


def best(
    store: Store, wanted: Scenario | Hardware, goodness: Goodness, meets: Meets | None = None, **names: Any
) -> Best | None:
    """The best confirmed configuration of the nearest match (look at its ``tier``), or None when there is none.

    A configuration is as good as the median of its runs, and is passed over when ``meets`` refuses those runs.
    ``names`` are those of `matches`.
    """
    for match in matches(store, wanted, **names):
        runs: dict[str, list[Trial]] = {}
        for trial in match.trials:
            runs.setdefault(trial.config_key, []).append(trial)
        judged = [(_median([goodness(trial.metrics) for trial in trials]), trials) for trials in runs.values()]
        good = sorted(((v, t) for v, t in judged if v is not None), key=lambda pair: pair[0], reverse=True)
        for refused, (value, trials) in enumerate(good):
            if meets is None or meets(trials):
                return Best(match, trials[0].config, trials[0].config_key, value, tuple(trials), refused)
    return None


def confirmed(store: Store, scenario_key: str) -> tuple[Trial, ...]:
    """The confirming trials that ended well, without any of a configuration that once failed its confirmation."""
    rows = [trial for trial in store.trials(scenario_key, stage="confirm") if trial.counted]
    failed = {trial.config_key for trial in rows if trial.status != "ok"}
    return tuple(trial for trial in rows if trial.config_key not in failed)


def differences(wanted: Scenario | Hardware, have: Scenario) -> tuple[Difference, ...]:
    """Every fact that is not the same, by name. An unknown fact differs from another machine's unknown fact."""
    return _all_differences(_wanted(wanted, None, None, {}), have)


def _wanted(
    wanted: Scenario | Hardware, engine: str | None, build: Facts | None, names: Mapping[str, str | None]
) -> _Wanted:
    conditions = [scenarios.c[part]["name"].as_string() == name for part, name in names.items() if name is not None]
    if isinstance(wanted, Hardware):
        if engine is not None:
            conditions.append(scenarios.c.engine == engine)
        parts: dict[str, Facts | None] = {
            "hardware": distance.machine(wanted), "engine": build if engine else None, "model": None, "workload": None,
        }  # fmt: skip
        return _Wanted(wanted, engine, parts, None, tuple(conditions))
    conditions.append(scenarios.c.subject_key == wanted.subject_key)
    parts = {part: _facts(part, wanted) for part in PARTS}
    return _Wanted(wanted.hardware, wanted.engine, parts, wanted.objective, tuple(conditions))


def _exact(store: Store, asked: _Wanted) -> Iterable[tuple[str, Scenario]]:
    """The scenarios of the same measured key, those with the same objective first, then the newest first."""
    query = select(*_LIGHT).where(*asked.where, asked.same()).order_by(scenarios.c.created_at.desc(), scenarios.c.key)
    found = list(store.scenarios_of([row.key for row in store.rows(query)]))
    return [("exact", have) for have in sorted(found, key=lambda have: have.objective != asked.objective)]


def _others(store: Store, asked: _Wanted) -> Iterator[tuple[str, Scenario]]:
    """The scenarios that differ, nearest first.

    Many scenarios share few machines, builds, models and workloads, so that each of those is compared once.
    """
    rows = [tuple(row) for row in store.rows(select(*_LIGHT).where(*asked.where, not_(asked.same())))]
    examples = [{row[at]: row[0] for row in rows} for at in range(2, 2 + len(PARTS))]
    keys = sorted({key for found in examples for key in found.values()})
    known = {have.key: have for have in store.scenarios_of(keys)}
    gaps = [
        {place: distance.gap(asked.differences(part, known[key])) for place, key in found.items()}
        for part, found in zip(PARTS, examples, strict=True)
    ]
    loose = {place: known[key].hardware.loose == asked.hardware.loose for place, key in examples[0].items()}
    machines, builds, models, workloads = gaps
    ranked = [
        (*distance.rank((machines[m], builds[b], models[o], workloads[w]), loose[m]), -created, key)
        for key, created, m, b, o, w in rows
    ]
    for place, _, _, key in sorted(ranked):
        yield distance.TIERS[place], store.scenario(key)


def _all_differences(asked: _Wanted, have: Scenario) -> tuple[Difference, ...]:
    found = [difference for part in PARTS for difference in asked.differences(part, have)]
    if asked.objective is not None:
        found += distance.differences("objective", asked.objective, have.objective)
    return tuple(sorted(found, key=lambda difference: difference.field))


def _facts(part: str, scenario: Scenario) -> Facts:
    facts: Mapping[str, Facts] = {
        "hardware": distance.machine(scenario.hardware),
        "engine": scenario.engine_build,
        "model": scenario.model,
        "workload": scenario.workload,
    }
    return facts[part]


def _median(values: list[float | None]) -> float | None:
    good = [value for value in values if value is not None]
    return median(good) if len(good) == len(values) else None
