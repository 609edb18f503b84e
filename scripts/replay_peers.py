"""Searchers to compare on a replayed table: this tuner, random search, Optuna's samplers and tools from PyPI.

Each gets the same tables, seeds and budgets, and hears of failures in the way its own documentation asks for. Tools of
the `bench` extra are imported where they are used; one that is missing is left out by name.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import random
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from replay import Replay, Spent
from tables import Codes, ordered

from autotune.hints import presets
from autotune.sampler import Sampler
from search_spaces import Config
from search_spaces.presets import starts

STALL = 10
"""Free asks in a row (repeated or invalid points) after which a searcher that must be asked is given a random point."""
PENALTY = 5.0
"""A failure told as a number is this much worse, in nats, than the worst value so far."""


def ours(replay: Replay) -> None:
    """As `autotune search` goes: the default, the published recipes that the table holds, then the sampler. Each is an
    evaluation like any other."""
    engine, _, _ = replay.table.name.partition("-")
    space = replace(replay.table.space(), engine=engine)
    recipes = [candidate.config for candidate in presets(space, starts(space))]
    _sampled(replay, [space.default(), *recipes])


def sampler_alone(replay: Replay) -> None:
    """`autotune.sampler.Sampler` from the table's default on: what it does where no recipe is known."""
    _sampled(replay, [])


def _sampled(replay: Replay, first: Sequence[Config]) -> None:
    sampler, before = Sampler(replay.table.space(), replay.budget, replay.seed), list(first)
    while (config := before.pop(0) if before else sampler.ask()) is not None:
        heard = replay.measure(replay.table.codes(config))
        sampler.tell(config, heard if isinstance(heard, float) else None)


def uniform(replay: Replay) -> None:
    """Random search over the valid configurations, none twice."""
    source = random.Random(replay.seed)
    while True:
        replay.measure(replay.unseen(source))


def _optuna(replay: Replay, sampler: optuna.samplers.BaseSampler, penalty: bool = False) -> None:
    """Numbers are integers by index, all else categorical; what cannot run is told PRUNED, or as the worst value where
    the sampler learns from completed trials alone."""
    study = optuna.create_study(direction="maximize", sampler=sampler)
    source, stalled, worst = random.Random(replay.seed), 0, 0.0
    while True:
        trial = study.ask()
        codes = tuple(
            trial.suggest_int(name, 0, len(values) - 1)
            if ordered(values)
            else int(trial.suggest_categorical(name, list(map(str, range(len(values))))))
            for name, values in replay.table.knobs.items()
        )
        known = codes in replay.heard or codes not in replay.table.blocks
        heard = replay.measure(codes)
        if isinstance(heard, float):
            worst = min(worst, heard)
            study.tell(trial, heard)
        elif penalty:
            study.tell(trial, worst)
        else:
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        stalled = stalled + 1 if known else 0
        if stalled >= STALL:
            names = [(n, ordered(v)) for n, v in replay.table.knobs.items()]
            point = replay.unseen(source)
            study.enqueue_trial({n: c if o else str(c) for (n, o), c in zip(names, point, strict=True)})


def tpe(replay: Replay) -> None:
    """Optuna's TPE with its default settings."""
    _optuna(replay, optuna.samplers.TPESampler(seed=replay.seed))


def gp(replay: Replay) -> None:
    """Optuna's GPSampler with its default settings."""
    _optuna(replay, optuna.samplers.GPSampler(seed=replay.seed), penalty=True)


def kernel_tuner(replay: Replay) -> None:
    """Kernel Tuner's hybrid_vndx in its own simulation mode, on a cache file of this replay's draws."""
    from kernel_tuner import tune_kernel

    table = replay.table
    names = list(table.knobs)

    def listed(*given: Any) -> bool:  # Kernel Tuner passes a mapping in one place and plain arguments in another
        return (tuple(given[0].values()) if isinstance(given[0], dict) else given) in table.blocks

    lowest = min(v for codes in table.blocks if (v := replay._draw(codes)) is not None)
    cache = {}
    for codes in table.blocks:
        value = replay._draw(codes)
        row: dict[str, Any] = dict(zip(names, codes, strict=True))
        cost = {"time": float(np.exp(-value + lowest))} if value is not None else {"__error__": "RuntimeFailedConfig"}
        cache[",".join(map(str, codes))] = {**row, **cost}
    head = {"device_name": "table", "kernel_name": "table", "problem_size": [1], "tune_params_keys": names,
            "tune_params": {n: list(range(len(v))) for n, v in table.knobs.items()}, "objective": "time"}  # fmt: skip
    _seed(replay.seed)
    with tempfile.TemporaryDirectory() as folder, _silent():
        path = Path(folder) / "cache.json"
        path.write_text(json.dumps({**head, "cache": cache}), encoding="utf-8")
        results, _ = tune_kernel(
            "table", "", (1,), [], head["tune_params"], strategy="hybrid_vndx",
            restrictions=listed,
            strategy_options={"max_fevals": replay.budget}, simulation_mode=True, cache=str(path), verbose=False,
        )  # fmt: skip
    for result in results:
        replay.measure(tuple(int(result[n]) for n in names))


def nevergrad(replay: Replay) -> None:
    """nevergrad's NGOpt over ordered and unordered choices."""
    import nevergrad as ng

    table, source, stalled, worst = replay.table, random.Random(replay.seed), 0, 0.0
    kinds = {
        n: (ng.p.TransitionChoice if ordered(v) else ng.p.Choice)(list(range(len(v)))) for n, v in table.knobs.items()
    }
    space = ng.p.Dict(**kinds)
    space.random_state.seed(replay.seed)
    optimizer = ng.optimizers.NGOpt(space, budget=replay.budget)
    while True:
        point = optimizer.ask()
        codes: Codes = tuple(int(point.value[n]) for n in table.knobs)
        stalled = stalled + 1 if codes in replay.heard or codes not in table.blocks else 0
        if stalled >= STALL:
            codes = replay.unseen(source)
            point = space.spawn_child(new_value=dict(zip(table.knobs, codes, strict=True)))
        heard = replay.measure(codes)
        worst = min(worst, heard) if isinstance(heard, float) else worst
        optimizer.tell(point, -heard if isinstance(heard, float) else -worst + PENALTY)


SEARCHERS: dict[str, Callable[[Replay], None]] = {
    "autotune": ours,
    "no-recipes": sampler_alone,
    "random": uniform,
    "optuna-tpe": tpe,
    "optuna-gp": gp,
    "kernel_tuner": kernel_tuner,
    "nevergrad": nevergrad,
}
EXTRA = ("kernel_tuner", "nevergrad")


def missing() -> list[str]:
    """The searchers of the `bench` extra that are not installed."""
    return [name for name in EXTRA if importlib.util.find_spec(name) is None]


def play(name: str, replay: Replay) -> list[float]:
    """Run one searcher to the end of its budget and return the curve. Raises KeyError for an unknown name."""
    with contextlib.suppress(Spent), _silent():
        SEARCHERS[name](replay)
    if not replay.curve:
        raise RuntimeError(f"{name} measured nothing on {replay.table.name}")
    return replay.curve + [replay.curve[-1]] * (min(replay.budget, len(replay.table.blocks)) - len(replay.curve))


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
