"""Why a search ended, in one sentence with an exit code, from its trials alone. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.judge import Judge
from autotune.outcome import Status
from search_spaces import Config, Space
from tuning_db import Trial

IDLE = 15
"""Evaluations without a gain of GAIN after which a search whose best has no untried neighbour is over."""
GAIN = 0.01


@dataclass(frozen=True, slots=True)
class Ending:
    """``kind``: budget, time, exhausted or idle; ``sentence`` is for the user."""

    kind: str
    sentence: str


def budget(count: int) -> Ending:
    return Ending("budget", f"the budget of {count} trials is spent.")


def time_spent(seconds: float, count: int) -> Ending:
    return Ending("time", f"the search's share of --time ({seconds:.0f} s) is spent after {count} trials.")


def exhausted(count: int) -> Ending:
    return Ending("exhausted", f"the whole space is measured after {count} trials.")


def idle(trials: Sequence[Trial], judge: Judge, space: Space) -> Ending | None:
    """The no-improvement rule: the last IDLE evaluations gained under 1 %, and the best has no untried neighbour."""
    if len(trials) <= IDLE:
        return None
    values = [judge.feasible(trial) for trial in trials]
    before = max((v for v in values[:-IDLE] if v is not None), default=None)
    best = max((v for v in values if v is not None), default=None)
    if before is None or best is None or best - before >= math.log1p(GAIN):
        return None
    leader = Config(trials[values.index(best)].config)
    known = {trial.config_key for trial in trials}
    if any(near.key not in known and not space.broken(near) for near in space.neighbours(leader)):
        return None
    return Ending("idle", f"the last {IDLE} trials gained less than 1 % and the best has no untried neighbour.")


def nothing_feasible(trials: Sequence[Trial], judge: Judge, space: Space) -> str:
    """Why there is nothing to confirm: what each trial fell to, and the SLO that came nearest to being met."""
    default = space.default().key
    others = [trial for trial in trials if trial.config_key != default]
    if not others:
        return "there is nothing to choose: every configuration but the default is excluded; loosen the plan's [knobs]"
    missed = [t for t in others if t.status == Status.OK and judge.violation(t) > 0]
    if missed:
        nearest = min(missed, key=judge.violation)
        worst = max(judge.findings([nearest]), key=lambda finding: finding.violation)
        value = "" if worst.value is None else f"; the nearest measured {worst.value:.4g}"
        return (
            f"no configuration met the SLO: {len(missed)} of {len(trials)} trials are past {worst.slo.text}{value}. "
            "Loosen --slo (no new run is needed), or raise --budget"
        )
    failed = Counter(t.status for t in others if t.status not in (Status.OK, Status.QUALITY, Status.PRUNED))
    if sum(failed.values()) == len(others):
        first = next(t for t in others if t.status in failed)
        kinds = ", ".join(f"{count} {status}" for status, count in failed.most_common())
        line = first.reason.splitlines()[0] if first.reason else first.status
        return f"no configuration other than the default ran ({kinds}); the first: {line}"
    return (
        "no configuration other than the default passed the quality gate; "
        "raise --budget, or loosen --max-kl / --max-perplexity"
    )
