"""Knobs, rules and the space they span: narrowing by facts, completing and judging a configuration.

Knows nothing of how a configuration is measured or sampled.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

from search_spaces.domain import Choice, Value, same

RESTARTS = ("live", "launch", "reload")
GROUPS = ("attention", "bits", "layout", "graphs", "cache", "scheduler", "speculation", "kernel")
Facts = Mapping[str, Any]


class SpaceError(ValueError):
    """A knob or value that the space does not have; the message names the nearest one."""


class Config(Mapping[str, Value]):
    """One complete configuration: every active knob of a space and its value, in the space's order."""

    __slots__ = ("_values", "key")

    def __init__(self, values: Mapping[str, Value]) -> None:
        self._values = dict(values)
        text = json.dumps(self._values, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        self.key: str = "c1:" + hashlib.sha256(text.encode()).hexdigest()[:32]

    def __getitem__(self, name: str) -> Value:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self.key == other.key

    def __repr__(self) -> str:
        return "Config(" + ", ".join(f"{k}={v!r}" for k, v in self._values.items()) + ")"


@dataclass(frozen=True, slots=True)
class Knob:
    """One setting of an engine, written once.

    ``when`` says for which configurations the knob exists at all (it reads only knobs listed before this one);
    ``refuse(value, facts)`` returns a sentence when this machine, engine or model excludes a value, else ``""``;
    ``quality`` marks knobs that may change what the model answers; ``flag`` is the engine's own spelling.
    ``admit`` makes the knob an open one: beside its listed values, which are all that a search tries, a configuration
    or a plan may give any value for which ``admit(value, facts)`` returns ``""`` (else a sentence).
    ``restart`` is the cost of a change, one of RESTARTS, the cheapest first.
    """

    name: str
    group: str
    domain: Choice
    default: Value
    sentence: str
    when: Callable[[Mapping[str, Value]], bool] | None = None
    refuse: Callable[[Value, Facts], str] | None = None
    quality: bool = False
    restart: str = "launch"
    flag: str = ""
    admit: Callable[[Value, Facts], str] | None = None

    def __post_init__(self) -> None:
        if self.group not in GROUPS:
            raise ValueError(f"knob {self.name}: group {self.group!r} is none of {', '.join(GROUPS)}")
        if self.restart not in RESTARTS:
            raise ValueError(f"knob {self.name}: restart {self.restart!r} is none of {', '.join(RESTARTS)}")
        if not self.domain.contains(self.default):
            raise ValueError(f"knob {self.name}: default {self.default!r} is not among its values")


@dataclass(frozen=True, slots=True)
class Rule:
    """A relation between knobs: ``broken(config, facts)`` is True where the configuration cannot run."""

    name: str
    sentence: str
    broken: Callable[[Mapping[str, Value], Facts], bool]


@dataclass(frozen=True, slots=True)
class Removal:
    """One value (or a whole knob's freedom) that narrowing took away, and why."""

    knob: str
    value: Value
    reason: str


@dataclass(frozen=True, slots=True)
class Space:
    """All that may vary for one engine; immutable, each narrowing makes a new one.

    ``reference`` are the values of the quality reference: the same engine at full width.
    """

    engine: str
    knobs: tuple[Knob, ...]
    rules: tuple[Rule, ...] = ()
    reference: Mapping[str, Value] = field(default_factory=dict)
    removals: tuple[Removal, ...] = ()
    facts: Facts = field(default_factory=dict)

    def knob(self, name: str) -> Knob:
        for knob in self.knobs:
            if knob.name == name:
                return knob
        near = get_close_matches(name, [k.name for k in self.knobs], 1)
        hint = f"; did you mean {near[0]}?" if near else f"; `autotune space --engine {self.engine}` lists them"
        raise SpaceError(f"engine {self.engine} has no knob {name!r}{hint}")

    def narrow(self, facts: Facts) -> Space:
        """Remove every value that ``facts`` exclude, keeping each reason.

        A refused default moves to the first value left.
        Raises SpaceError when a knob has no value left, naming the reasons.
        """
        knobs, removals = [], list(self.removals)
        for knob in self.knobs:
            reasons = {v: knob.refuse(v, facts) for v in knob.domain.values} if knob.refuse else {}
            gone = [Removal(knob.name, v, reason) for v, reason in reasons.items() if reason]
            left = tuple(v for v in knob.domain.values if not reasons.get(v))
            if not left:
                said = dict.fromkeys(removal.reason for removal in gone)
                raise SpaceError(f"no value of {knob.name} is possible here: " + "; ".join(said))
            removals += gone
            knobs.append(_with_values(knob, left))
        return replace(self, knobs=tuple(knobs), removals=tuple(removals), facts=dict(facts))

    def limit(self, allowed: Mapping[str, Iterable[Value]], reason: str) -> Space:
        """Keep only ``allowed`` values of the named knobs (a user's overlay). It may narrow, never widen; of an open
        knob it lists the values that are searched from now on."""
        knobs, removals = {k.name: k for k in self.knobs}, list(self.removals)
        for name, wanted in allowed.items():
            knob = self.knob(name)
            keep = tuple(wanted)
            for value in keep:
                self.check(name, value)
            if not keep:
                raise SpaceError(f"knob {name}: no value is allowed; leave the knob out or list at least one value")
            removals += [Removal(name, v, reason) for v in knob.domain.values if not any(same(v, k) for k in keep)]
            knobs[name] = replace(_with_values(knob, keep), admit=None)
        return replace(self, knobs=tuple(knobs.values()), removals=tuple(removals))

    def check(self, name: str, value: Value) -> None:
        """Raise SpaceError unless ``value`` is one of the knob's values, or one that an open knob admits."""
        knob = self.knob(name)
        if knob.domain.contains(value):
            return
        why = next((r.reason for r in self.removals if r.knob == name and same(r.value, value)), "")
        if knob.admit is not None and not why:
            why = knob.admit(value, self.facts)
            if not why:
                return
        values = ", ".join(json.dumps(v) for v in knob.domain.values)
        raise SpaceError(f"knob {name} cannot be {json.dumps(value)}: " + (why or f"it takes {values}"))

    def complete(self, values: Mapping[str, Value]) -> Config:
        """A configuration from some values: defaults for the rest, inactive knobs left out. Raises SpaceError."""
        for name, value in values.items():
            self.check(name, value)
        chosen: dict[str, Value] = {}
        for knob in self.knobs:
            if knob.when is None or knob.when(chosen):
                chosen[knob.name] = values.get(knob.name, knob.default)
        return Config(chosen)

    def default(self) -> Config:
        return self.complete({})

    def broken(self, config: Mapping[str, Value]) -> tuple[str, ...]:
        """The sentences of the rules that ``config`` breaks; empty when it may be launched."""
        return tuple(rule.sentence for rule in self.rules if rule.broken(config, self.facts))

    def free(self) -> tuple[Knob, ...]:
        """The knobs that still have a choice."""
        return tuple(knob for knob in self.knobs if knob.domain.size > 1)

    def size(self) -> int:
        """Upper bound on the number of configurations: the product of the free domains, ignoring rules."""
        total = 1
        for knob in self.free():
            total *= knob.domain.size
        return total

    def quality_part(self, config: Mapping[str, Value]) -> dict[str, Value]:
        """The values that may change the model's answers: configurations equal in them share one quality result."""
        return {k.name: config[k.name] for k in self.knobs if k.quality and k.name in config}

    def restart_part(self, config: Mapping[str, Value], least: str) -> dict[str, Value]:
        """The values whose change costs ``least`` (one of RESTARTS) or more: what configurations must agree in to
        share a launch (``least="launch"``) or the loaded weights (``"reload"``)."""
        costly = RESTARTS[RESTARTS.index(least) :]
        return {k.name: config[k.name] for k in self.knobs if k.restart in costly and k.name in config}

    def reference_part(self) -> dict[str, Value]:
        """The values of the quality reference that this space still offers."""
        return {name: value for name, value in self.reference.items() if self.knob(name).domain.contains(value)}

    def neighbours(self, config: Config) -> Iterator[Config]:
        """Configurations that differ in one active knob by one step, nearest first."""
        for knob in self.free():
            if knob.name in config:
                for value in knob.domain.neighbours(config[knob.name]):
                    yield self.complete({**config, knob.name: value})


def _with_values(knob: Knob, left: tuple[Value, ...]) -> Knob:
    listed = all(knob.domain.contains(value) for value in left)
    domain = knob.domain.keep(left) if listed else Choice(tuple(dict.fromkeys(left)), knob.domain.ordered)
    default = knob.default if domain.contains(knob.default) else domain.values[0]
    return replace(knob, domain=domain, default=default)
