"""The decision of a confirmation, from its stored rows alone: what to deploy, with which evidence. Measures nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autotune import stats
from autotune.judge import Judge
from autotune.objective import Objective
from autotune.outcome import Status
from autotune.slo import Finding, Slo, parse
from search_spaces import Config
from tuning_db import Scenario, Store, Trial


class TuneError(Exception):
    """A study that cannot go on. ``code`` is the command's exit code: 1 the machine's fault, 3 nothing to answer,
    124 the time was spent before a first result."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Result:
    """The decision with the rows behind it. ``config`` is what to deploy; ``findings`` are each configuration's SLOs,
    judged over all its confirming runs; ``band`` is the tie band."""

    winner: stats.Winner
    config: Config
    default: Config
    round: str
    trials: tuple[Trial, ...]
    findings: Mapping[str, tuple[Finding, ...]] = field(default_factory=dict)
    band: float = stats.BAND


def needs_default(trials: Sequence[Trial], default: Config) -> None:
    """Raise TuneError when the default was measured and failed: nothing could be compared with it."""
    failed = next((t for t in trials if t.config_key == default.key and t.status != Status.OK), None)
    if failed is not None:
        raise TuneError(
            f"the default configuration failed ({failed.status}): {failed.reason}\n"
            "Nothing can be compared with it. Try another --model or --workload, or a plan with [knobs].", 3
        )  # fmt: skip


def round_name(contenders: Sequence[Config]) -> str:
    """Names one confirmation by who takes part, so that a resumed one goes on and a changed one starts afresh."""
    text = "\n".join(sorted(config.key for config in contenders))
    return "r1:" + hashlib.sha256(text.encode()).hexdigest()[:12]


def decide_rows(
    rows: Sequence[Trial], default: Config, name: str, objective: Objective, judge: Judge | None = None
) -> Result:
    """The decision of round ``name`` from stored rows alone; with ``judge``, under its SLOs."""
    used = tuple(t for t in rows if t.provenance.get("round") == name and t.status == Status.OK)
    blocks: dict[str, dict[int, float]] = {}
    configs: dict[str, Mapping[str, Any]] = {}
    for trial in used:
        value = objective.raw(trial.metrics)
        if value is not None:
            blocks.setdefault(trial.config_key, {})[trial.block] = value
            configs[trial.config_key] = trial.config
    findings = {
        key: judge.findings([trial for trial in used if trial.config_key == key]) if judge is not None else ()
        for key in configs
    }
    barred = {key for key, found in findings.items() if any(finding.violation > 0 for finding in found)}
    band = max((float(t.provenance.get("band", stats.BAND)) for t in used), default=stats.BAND)
    winner = stats.decide(blocks, default.key, objective.higher, band, barred)
    if winner is None and barred == set(blocks) != set():
        worst = next(f for found in findings.values() for f in found if f.violation > 0)
        raise TuneError(f"no configuration met the SLO in its confirming runs ({worst.sentence()}); loosen --slo", 3)
    if winner is None:
        raise TuneError("the confirming runs of the default or of every finalist failed; `autotune query` shows why", 3)
    return Result(winner, Config(configs[winner.config_key]), default, name, used, findings, band)


def decided(
    trials: Sequence[Trial], scenario: Scenario, store: Store | None = None, slos: Sequence[Slo] = ()
) -> Iterator[Result]:
    """The decisions of all rounds among confirming trials that have the two paired blocks an interval needs.

    With ``store`` each under ``slos``, or else those that its search was given, judged on the stored requests.
    """
    objective = Objective(str(scenario.objective["metric"]))
    counted = [trial for trial in trials if trial.counted]
    for name in dict.fromkeys(trial.provenance.get("round") for trial in counted):
        round_ = [trial for trial in counted if trial.provenance.get("round") == name]
        default = next((t for t in round_ if t.config_key == t.provenance.get("default")), None)
        if default is None or not isinstance(name, str):
            continue
        wanted = slos or tuple(parse(text) for text in round_[-1].provenance.get("slos", ()))
        judge = Judge(objective, wanted, store) if store is not None else None
        try:
            result = decide_rows(round_, Config(default.config), name, objective, judge)
        except TuneError:
            continue
        if result.winner.ratio.n > 1:
            yield result
