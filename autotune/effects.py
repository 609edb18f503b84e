"""What each knob does by itself: every value changed alone around the default and the winner, in interleaved blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autotune import stats
from autotune.objective import Objective
from autotune.outcome import Status
from autotune.tune import Tuner, round_name
from search_spaces import Config, Space, Value
from tuning_db import Trial

STAGE = "effects"


@dataclass(frozen=True, slots=True)
class Effect:
    """One knob value against the base's own: speed as a ratio (above 1 is better), quality as mean KL in nats.

    ``ratio`` is None where the value did not run; ``status`` says how it ended. ``kl`` is the value's own KL.
    """

    base: str
    group: str
    knob: str
    was: Value
    value: Value
    ratio: stats.Interval | None
    verdict: str
    kl: float | None
    status: str


def variants(space: Space, base: Config) -> list[tuple[str, Value, Config]]:
    """Every configuration that differs from ``base`` in one active knob and breaks no rule."""
    found = []
    for knob in space.free():
        for value in knob.domain.values if knob.name in base else ():
            if value != base[knob.name]:
                config = space.complete({**base, knob.name: value})
                if not space.broken(config):
                    found.append((knob.name, value, config))
    return found


def measure(tuner: Tuner, bases: Sequence[Config], blocks: int) -> Iterator[Trial]:
    """Measure all variants of each base; resumes like a confirmation."""
    for base in bases:
        yield from tuner.interleave(STAGE, _contenders(tuner.space, base), blocks)


def table(space: Space, bases: Mapping[str, Config], rows: Sequence[Trial], objective: Objective) -> list[Effect]:
    """The effects from stored rows alone."""
    effects = []
    for label, base in bases.items():
        name = round_name(_contenders(space, base))
        mine = [t for t in rows if t.provenance.get("round") == name]
        values: dict[str, dict[int, float]] = {}
        for trial in mine:
            raw = objective.raw(trial.metrics)
            if raw is not None and trial.status in (Status.OK, Status.QUALITY):
                values.setdefault(trial.config_key, {})[trial.block] = raw
        for knob, value, config in variants(space, base):
            ratio = stats.ratio(values.get(config.key, {}), values.get(base.key, {}), objective.higher)
            ended = [t for t in mine if t.config_key == config.key]
            effects.append(
                Effect(
                    label, space.knob(knob).group, knob, base[knob], value, ratio,
                    str(stats.verdict(ratio)) if ratio else "-",
                    next((t.metrics["kl_mean"] for t in ended if "kl_mean" in t.metrics), None),
                    ended[-1].status if ended else "-",
                )
            )  # fmt: skip
    return effects


def _contenders(space: Space, base: Config) -> list[Config]:
    return [base, *(config for _, _, config in variants(space, base))]
