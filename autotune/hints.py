"""First candidates of a study: presets, and winners stored for this or near hardware, each labelled with its source."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from autotune.objective import Objective
from search_spaces import Config, Space, SpaceError, Value
from search_spaces.presets import Preset
from tuning_db import Scenario, Store
from tuning_db.lookup import Match, matches

LIMIT = 5


@dataclass(frozen=True, slots=True)
class Candidate:
    """A configuration to try early, and ``why``: where it comes from."""

    config: Config
    why: str


def fitted(space: Space, values: Mapping[str, Any]) -> Config | None:
    """``values`` as far as this space offers them, defaults for the rest; None when that breaks a rule."""
    kept: dict[str, Value] = {}
    for name, value in values.items():
        try:
            space.check(name, value)
        except SpaceError:
            continue
        kept[name] = value
    config = space.complete(kept)
    return None if space.broken(config) else config


def stored(store: Store, scenario: Scenario, space: Space, objective: Objective, limit: int = LIMIT) -> list[Candidate]:
    """The best confirmed configuration of each other scenario of this engine and model, nearest scenario first."""
    found: list[Candidate] = []
    for match in matches(store, scenario):
        best = None if match.scenario.key == scenario.key else _best(match, objective)
        config = fitted(space, best) if best is not None else None
        if config is not None and config not in [c.config for c in found] and config != space.default():
            found.append(Candidate(config, _label(match)))
        if len(found) == limit:
            break
    return found


def _best(match: Match, objective: Objective) -> Mapping[str, Any] | None:
    """The configuration with the best mean over its confirming runs."""
    runs: dict[str, list[float]] = {}
    configs: dict[str, Mapping[str, Any]] = {}
    for trial in match.trials:
        good = objective.goodness(trial.metrics)
        if good is not None:
            runs.setdefault(trial.config_key, []).append(good)
            configs[trial.config_key] = trial.config
    most = max((len(values) for values in runs.values()), default=0)
    whole = {key: sum(values) / len(values) for key, values in runs.items() if len(values) == most}
    return configs[max(whole, key=lambda key: whole[key])] if whole else None


def _label(match: Match) -> str:
    names = ", ".join(difference.field for difference in match.differs[:3])
    more = f" and {len(match.differs) - 3} more" if len(match.differs) > 3 else ""
    return f"winner of a scenario that is {match.tier}: {names}{more} differ, on {match.scenario.hardware.label}"


def presets(space: Space, named: Iterable[Preset]) -> list[Candidate]:
    """Named starting points as candidates, each once, where this space can hold them and they are not its default."""
    found: dict[str, Candidate] = {}
    for preset in named:
        config = fitted(space, preset.values)
        if config is not None and config != space.default():
            found.setdefault(config.key, Candidate(config, f"preset {preset.name}"))
    return list(found.values())


def by_load(space: Space, candidates: Iterable[Candidate]) -> list[Candidate]:
    """In order, but those that share a load after one another: knobs that need a reload change as seldom as can be."""
    groups: dict[Config, list[Candidate]] = {}
    for candidate in candidates:
        loaded = Config(space.restart_part(candidate.config, "reload"))
        groups.setdefault(loaded, []).append(candidate)
    return [candidate for group in groups.values() for candidate in group]
