"""What each dimension does by itself: changed alone from the default, and taken back alone from the winner.

The two can differ, and that difference is why dimensions are searched together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autotune import stats
from autotune.decision import round_name
from autotune.objective import Objective
from autotune.outcome import Status
from autotune.tune import Tuner
from search_spaces import Config, Space
from tuning_db import Trial

STAGE = "effects"


@dataclass(frozen=True, slots=True)
class Change:
    """One configuration to compare with ``base``: ``what`` differs, in ``dimension``."""

    dimension: str
    what: str
    base: Config
    config: Config


@dataclass(frozen=True, slots=True)
class Effect:
    """A change's measured effect: speed as a ratio to its base (above 1 is better), quality as mean KL in nats.

    ``ratio`` is None where one of the two did not run; ``status`` says how the change ended.
    """

    change: Change
    ratio: stats.Interval | None
    kl: float | None
    status: str


def by_dimension(space: Space, default: Config, winner: Config) -> list[Change]:
    """For each dimension in which the winner differs: its values alone on the default, and the winner without them."""
    changes = []
    for group in dict.fromkeys(knob.group for knob in space.free()):
        names = [knob.name for knob in space.free() if knob.group == group]
        theirs = {name: winner[name] for name in names if name in winner}
        ours = {name: default[name] for name in names if name in default}
        differing = " ".join(f"{n}={v}" for n, v in theirs.items() if default.get(n) != v)
        if differing:
            changes.append(Change(group, differing, default, space.complete({**default, **theirs})))
            kept = {name: value for name, value in winner.items() if name not in names}
            changes.append(Change(group, differing, winner, space.complete({**kept, **ours})))
    return [change for change in changes if not space.broken(change.config)]


def by_value(space: Space, base: Config) -> list[Change]:
    """Every other value of every active knob, one at a time."""
    changes = []
    for knob in space.free():
        for value in knob.domain.values if knob.name in base else ():
            config = space.complete({**base, knob.name: value})
            if value != base[knob.name] and not space.broken(config):
                changes.append(Change(knob.group, f"{knob.name}={value}", base, config))
    return changes


def measure(tuner: Tuner, changes: Sequence[Change], blocks: int) -> Iterator[Trial]:
    """Measure all changes and their bases in interleaved blocks; resumes like a confirmation."""
    return tuner.interleave(STAGE, _contenders(changes), blocks)


def table(changes: Sequence[Change], rows: Sequence[Trial], objective: Objective) -> list[Effect]:
    """The effects from stored rows alone."""
    name = round_name(_contenders(changes))
    mine = [row for row in rows if row.provenance.get("round") == name]
    values: dict[str, dict[int, float]] = {}
    for trial in mine:
        raw = objective.raw(trial.metrics)
        if raw is not None and trial.status in (Status.OK, Status.QUALITY):
            values.setdefault(trial.config_key, {})[trial.block] = raw
    effects = []
    for change in changes:
        ended = [row for row in mine if row.config_key == change.config.key]
        kl = next((row.metrics["kl_mean"] for row in ended if "kl_mean" in row.metrics), None)
        ratio = stats.ratio(values.get(change.config.key, {}), values.get(change.base.key, {}), objective.higher)
        effects.append(Effect(change, ratio, kl, ended[-1].status if ended else "-"))
    return effects


def _contenders(changes: Sequence[Change]) -> list[Config]:
    return list(dict.fromkeys(config for change in changes for config in (change.base, change.config)))
