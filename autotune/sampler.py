"""What to measure next: the only file that imports Optuna, whose study lives in memory, rebuilt from stored rows."""

from __future__ import annotations

import itertools
import json
import math
import random
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import optuna

from search_spaces import Config, Knob, Space, Value

optuna.logging.set_verbosity(optuna.logging.ERROR)

ENUMERABLE = 20_000  # spaces up to this size are listed, so that "all measured" can be known
RETRIES = 20  # asks that TPE may waste on points already known before we step in
POLISH_FROM = 0.6  # share of the budget after which the neighbours of the best are measured


@dataclass(frozen=True, slots=True)
class Known:
    """A measured configuration. ``value`` is higher-is-better, None when it failed; ``violation`` ≤ 0 is feasible."""

    config: Config
    value: float | None
    violation: float = 0.0

    @property
    def feasible(self) -> bool:
        return self.value is not None and self.violation <= 0


class Sampler:
    """Default first, then points far from each other, then TPE, then the neighbourhood of the best.

    Values are coded as strings in one categorical per knob: integer coding of sizes with many excluded points
    makes TPE stall on duplicates, and Optuna takes 1, 1.0 and True for one value.
    """

    def __init__(self, space: Space, budget: int, seed: int = 0) -> None:
        self.space = space
        self.budget = budget
        self.startup = max(2, min(10, budget // 4))
        self.known: dict[str, Known] = {}
        self._random = random.Random(seed)
        self._pending: dict[str, optuna.Trial] = {}
        with warnings.catch_warnings():  # `group` is marked experimental; it is how TPE models conditional knobs
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            tpe = optuna.samplers.TPESampler(seed=seed, n_startup_trials=self.startup, multivariate=True, group=True)
        self._study = optuna.create_study(direction="maximize", sampler=tpe)

    def tell(self, config: Config, value: float | None, violation: float = 0.0) -> None:
        """Learn a result, asked for or not. A failure is told as the worst value so far with a violated constraint:

        TPE ignores failed trials altogether and would propose a never-successful choice for ever.
        """
        if value is not None and not math.isfinite(value):
            raise ValueError(f"a measured value must be finite, not {value!r}; tell None for a failure")
        known = Known(config, value, violation if value is not None else max(violation, 1.0))
        self.known[config.key] = known
        trial = self._pending.pop(config.key, None)
        if trial is not None:
            trial.set_constraint("feasible", known.violation)
            self._study.tell(trial, self._told(known))
            return
        free = [knob for knob in self.space.free() if knob.name in config]
        if all(knob.domain.contains(config[knob.name]) for knob in free):
            self._study.add_trial(
                optuna.trial.create_trial(
                    params={knob.name: _code(config[knob.name]) for knob in free},
                    distributions={knob.name: _distribution(knob) for knob in free},
                    value=self._told(known),
                    constraints={"feasible": known.violation},
                )
            )

    def ask(self) -> Config | None:
        """A configuration not measured yet that breaks no rule; None when there is none left."""
        default = self.space.default()
        if self._fresh(default):
            return default
        if len(self.known) < self.startup:
            return self._spread()
        if len(self.known) >= POLISH_FROM * self.budget:
            near = next(self._polish(), None)
            if near is not None:
                return near
        return self._model() or next(self._polish(), None) or self._spread()

    def best(self) -> Known | None:
        """The best feasible configuration so far."""
        ranked = self._ranked()
        return ranked[0] if ranked else None

    def _ranked(self) -> list[Known]:
        feasible = [known for known in self.known.values() if known.feasible]
        return sorted(feasible, key=lambda known: -(known.value or 0.0))

    def _told(self, known: Known) -> float:
        if known.value is not None:
            return known.value
        return min((k.value for k in self.known.values() if k.value is not None), default=0.0)

    def _fresh(self, config: Config) -> bool:
        return config.key not in self.known and not self.space.broken(config)

    def _model(self) -> Config | None:
        for _ in range(RETRIES):
            trial = self._study.ask()
            chosen: dict[str, Value] = {}
            for knob in self.space.knobs:
                if knob.when is None or knob.when(chosen):
                    fixed = knob.domain.size == 1
                    chosen[knob.name] = knob.default if fixed else _suggest(trial, knob)
            config = Config(chosen)
            if self._fresh(config):
                self._pending[config.key] = trial
                return config
            known = self.known.get(config.key) or Known(config, None, 1.0)
            trial.set_constraint("feasible", known.violation)
            self._study.tell(trial, self._told(known))
        return None

    def _polish(self) -> Iterator[Config]:
        for known in self._ranked()[:3]:
            near = [config for config in self.space.neighbours(known.config) if self._fresh(config)]
            self._random.shuffle(near)
            yield from near

    def _spread(self) -> Config | None:
        """Of some random points, the one farthest from all that is known (maximin over differing knobs)."""
        points = [p for p in (self._random_point() for _ in range(64)) if p is not None]
        if not points:
            return next((config for config in self._listed() if self._fresh(config)), None)
        return max(points, key=lambda p: min((_distance(p, k.config) for k in self.known.values()), default=0))

    def _random_point(self) -> Config | None:
        for _ in range(RETRIES):
            config = self.space.complete(
                {knob.name: self._random.choice(knob.domain.values) for knob in self.space.free()}
            )
            if self._fresh(config):
                return config
        return None

    def _listed(self) -> Iterator[Config]:
        if self.space.size() <= ENUMERABLE:
            free = self.space.free()
            for values in itertools.product(*(knob.domain.values for knob in free)):
                yield self.space.complete(dict(zip((knob.name for knob in free), values, strict=True)))


def _suggest(trial: optuna.Trial, knob: Knob) -> Value:
    value: Value = json.loads(str(trial.suggest_categorical(knob.name, _distribution(knob).choices)))
    return value


def _code(value: Value) -> str:
    return json.dumps(value)


def _distribution(knob: Knob) -> optuna.distributions.CategoricalDistribution:
    return optuna.distributions.CategoricalDistribution([_code(value) for value in knob.domain.values])


def _distance(left: Mapping[str, Value], right: Mapping[str, Value]) -> int:
    return sum(left.get(name) != right.get(name) for name in {*left, *right})
