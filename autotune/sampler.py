"""What to measure next: the only file that imports Optuna, whose study lives in memory, rebuilt from what is known."""

from __future__ import annotations

import json
import math
import operator
import warnings
from dataclasses import dataclass

import numpy as np
import optuna
from numpy.typing import NDArray

from autotune.candidates import Pool, Row, Rows
from autotune.surrogate import Surrogate
from search_spaces import Config, Knob, Space, Value

optuna.logging.set_verbosity(optuna.logging.ERROR)

STARTUP = 6
"""Configurations known before the model chooses. On three measured tables (80 seeds) 3 to 6 are alike and reach 95 % of
the optimum in 4 to 16 evaluations less than 10 do."""
MODELLED = 200
"""Known configurations that the Gaussian process learns from at most, for its cost grows with their cube: of more, the
best half and the latest half."""
AHEAD = 8
"""Choices made at once from then on: what one more result could change is less than what asking again costs."""
TOP = 5
"""Best configurations around which candidates are looked for."""
HOPS = 2
"""In how many knobs a candidate near the best may differ: of 22 points of a measured kernel table that no change of one
knob improves, a change of two leaves 4."""
ALIKE = 0.9
"""Share of the greatest expected improvement from which a candidate that needs no launch is preferred."""
CANDIDATES = 300
"""Candidates near the best, and as many from anywhere, among which the expected improvement is compared."""
FIRST_STEPS, STEPS = 40, 5
SETTLED = 60
"""Known configurations from which the model's own parameters move less and less with each new one."""
RETRIES = 20  # asks that TPE may waste on points already known before we step in


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
    """Default first, then points far from each other, then the greatest expected improvement under a model.

    An Optuna study, in memory, is asked and told; the model is a Gaussian process over valid configurations (``gp``),
    whose choices are enqueued there, or Optuna's TPE (``tpe``). Values are goodness on the log scale.
    """

    def __init__(self, space: Space, budget: int, seed: int = 0, method: str = "gp") -> None:
        self.space = space
        self._narrowed = False
        self.budget = budget
        self.seed = seed
        self.startup = max(2, min(STARTUP, budget // 4))
        self.known: dict[str, Known] = {}
        self._pool = Pool(space, seed)
        self._rows: dict[Row, Known] = {}
        self._random = np.random.default_rng(seed)
        self._surrogate: Surrogate | None = None
        self._method = method
        self._ahead: list[Config] = []
        self._asked: dict[str, optuna.Trial] = {}
        self._study = optuna.create_study(
            direction="maximize", sampler=_tpe(seed) if method == "tpe" else optuna.samplers.RandomSampler(seed)
        )

    def tell(self, config: Config, value: float | None, violation: float = 0.0) -> None:
        """Learn a result, asked for or not; None for a failure. Raises ValueError for a value that is not finite."""
        if value is not None and not math.isfinite(value):
            raise ValueError(f"a measured value must be finite, not {value!r}; tell None for a failure")
        known = Known(config, value, violation if value is not None else max(violation, 1.0))
        self.known[config.key] = known
        row = self._pool.row(config)
        if row is not None:
            self._rows[row] = known
            self._pool.drop(row)
            trial = self._asked.pop(config.key, None)
            if trial is None:
                self._study.add_trial(self._frozen(known))
            else:
                self._learn(trial, known)

    def narrow(self, space: Space) -> None:
        """Go on in ``space``, which has the same knobs and values and perhaps more rules."""
        self.space, self._narrowed = space, True

    def ask(self, near: Config | None = None) -> Config | None:
        """A configuration not measured yet that breaks no rule; None when there is none left.

        Of candidates expected to gain about as much, one that differs from ``near`` in live knobs alone is preferred:
        it needs no launch.
        """
        default = self.space.default()
        feasible = sum(known.feasible for known in self._rows.values())
        if self._fresh(default):
            chosen: Config | None = default
        elif len(self.known) < self.startup or feasible < 2:
            chosen = self._spread()
        elif self._method == "tpe":
            return self._proposed() or self._asked_for(self._spread())
        else:
            chosen = self._planned() or self._expected(near) or self._spread()
        return self._asked_for(chosen)

    def _asked_for(self, config: Config | None) -> Config | None:
        """``config`` as the study's next trial."""
        if config is not None:
            free = [knob.name for knob in self.space.free() if knob.name in config]
            self._study.enqueue_trial({name: json.dumps(config[name]) for name in free})
            self._asked[config.key] = self._study.ask()
            self._suggested(self._asked[config.key])
        return config

    def _proposed(self) -> Config | None:
        """Optuna's own proposal, told at once what is known of it already."""
        for _ in range(RETRIES):
            trial = self._study.ask()
            config = self._suggested(trial)
            if self._fresh(config):
                self._asked[config.key] = trial
                return config
            self._learn(trial, self.known.get(config.key) or Known(config, None, 1.0))
        return None

    def _learn(self, trial: optuna.Trial, known: Known) -> None:
        trial.set_constraint("feasible", known.violation)
        self._study.tell(trial, self._told(known))

    def _told(self, known: Known) -> float:
        """A failure is told as the worst value so far with a violated constraint: TPE ignores failed trials altogether
        and would propose a never-successful choice for ever."""
        return self._worst() if known.value is None else known.value

    def _planned(self) -> Config | None:
        """What an earlier choice left for now."""
        while self._ahead:
            config = self._ahead.pop(0)
            if self._fresh(config):
                return config
        return None

    def best(self) -> Known | None:
        """The best feasible configuration so far."""
        feasible = [known for known in self.known.values() if known.feasible]
        return max(feasible, key=lambda known: known.value or 0.0, default=None)

    def _fresh(self, config: Config) -> bool:
        return config.key not in self.known and not self.space.broken(config)

    def _worst(self) -> float:
        return min((k.value for k in self.known.values() if k.value is not None), default=0.0)

    def _spread(self) -> Config | None:
        """Of some random points, the one farthest from all that is known (maximin over differing knobs)."""
        while points := self._pool.scattered(64):
            points = [row for row in points if self._allowed(row)]
            if points:
                break
        else:
            return None
        known = np.array(list(self._rows), np.intp).reshape(len(self._rows), -1)
        near = [int((known != np.array(point)).sum(1).min(initial=len(point))) for point in points]
        return self._pool.config(points[int(np.argmax(near))])

    def _allowed(self, row: Row) -> bool:
        """Whether ``row`` breaks no rule learned since the pool took it in; else it is dropped."""
        if self._narrowed and self.space.broken(self._pool.config(row)):
            self._pool.drop(row)
            return False
        return True

    def _expected(self, near: Config | None) -> Config | None:
        """The candidate with the greatest expected improvement of the share of the best value.

        A failure counts as the worst value seen, and makes its surroundings less likely to be any answer.
        """
        rows = self._learned()
        known = [self._rows[row] for row in rows]
        points, worst = np.array(rows, np.intp), self._worst()
        failed = np.array([not k.feasible for k in known])
        values = np.array([k.value if k.feasible and k.value is not None else worst for k in known])
        order = [rows[i] for i in np.argsort(-values, kind="stable") if not failed[i]][:TOP]
        candidates = self._candidates(order)
        if not len(candidates):
            return None
        steps = STEPS if len(rows) < SETTLED else int(len(rows) % (len(rows) // SETTLED * 2) == 0)
        if self._surrogate is None:
            self._surrogate, steps = Surrogate(self._pool.tables(), self.seed), FIRST_STEPS
        self._surrogate.fit(points, np.exp(values - values.max()), failed, steps)
        gains = self._surrogate.improvement(candidates)
        if len(self._rows) > MODELLED:
            self._ahead = self._apart(candidates[np.argsort(-gains, kind="stable")])
            return self._planned()
        return self._preferred(candidates, gains, near)

    def _learned(self) -> list[Row]:
        """What the model is told: all that is known, or MODELLED of it."""
        rows = list(self._rows)
        if len(rows) <= MODELLED:
            return rows
        half = MODELLED // 2
        latest, older = rows[-half:], rows[:-half]
        worth = {row: k.value if k.feasible and k.value is not None else -math.inf for row, k in self._rows.items()}
        return sorted(older, key=lambda row: -worth[row])[:half] + latest

    def _apart(self, rows: Rows) -> list[Config]:
        """The first AHEAD allowed ones of which no two differ in one knob alone."""
        picked: list[Row] = []
        for row in map(tuple, rows.tolist()):
            if all(sum(map(operator.ne, row, other)) > 1 for other in picked) and self._allowed(row):
                picked.append(row)
                if len(picked) == AHEAD:
                    break
        return [self._pool.config(row) for row in picked]

    def _preferred(self, candidates: Rows, gains: NDArray[np.float64], near: Config | None) -> Config | None:
        """The allowed candidate with the greatest gain, or one of ALIKE gain that shares a launch with ``near``."""
        first, least = None, 0.0
        shared = self.space.restart_part(near, "launch") if near is not None else None
        for number in np.argsort(-gains, kind="stable"):
            if first is not None and gains[number] < least:
                break
            row = tuple(map(int, candidates[number]))
            if not self._allowed(row):
                continue
            config = self._pool.config(row)
            if shared is None or self.space.restart_part(config, "launch") == shared:
                return config
            if first is None:
                first, least = config, ALIKE * gains[number]
        return first

    def _candidates(self, best: list[Row]) -> Rows:
        self._pool.grow(best)
        rows, left = self._pool.rows, self._pool.left()
        near = np.zeros(len(rows), bool)
        for row in best:
            near |= (rows != np.array(row)).sum(1) <= HOPS
        chosen = [np.flatnonzero(left & mask) for mask in (near, ~near)]
        some = [self._random.choice(part, min(CANDIDATES, len(part)), replace=False) for part in chosen]
        picked: Rows = rows[np.concatenate(some)]
        return picked

    def _suggested(self, trial: optuna.Trial) -> Config:
        """Values are coded as strings in one categorical a knob: integer coding of sizes with many excluded points
        makes TPE stall on duplicates, and Optuna takes 1, 1.0 and True for one value."""
        chosen: dict[str, Value] = {}
        for knob in self.space.knobs:
            if knob.when is None or knob.when(chosen):
                chosen[knob.name] = knob.default if knob.domain.size == 1 else _suggest(trial, knob)
        return Config(chosen)

    def _frozen(self, known: Known) -> optuna.trial.FrozenTrial:
        free = [knob for knob in self.space.free() if knob.name in known.config]
        return optuna.trial.create_trial(
            params={knob.name: json.dumps(known.config[knob.name]) for knob in free},
            distributions={knob.name: _distribution(knob) for knob in free},
            value=self._told(known),
            constraints={"feasible": known.violation},
        )


def _tpe(seed: int) -> optuna.samplers.BaseSampler:
    with warnings.catch_warnings():  # `group` is marked experimental; it is how TPE models conditional knobs
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.samplers.TPESampler(seed=seed, n_startup_trials=0, multivariate=True, group=True)


def _suggest(trial: optuna.Trial, knob: Knob) -> Value:
    value: Value = json.loads(str(trial.suggest_categorical(knob.name, _distribution(knob).choices)))
    return value


def _distribution(knob: Knob) -> optuna.distributions.CategoricalDistribution:
    return optuna.distributions.CategoricalDistribution([json.dumps(value) for value in knob.domain.values])
