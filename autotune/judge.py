"""How a stored trial stands: its goodness under the objective and its SLOs, from its metrics and stored requests."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.metrics import Timeline
from autotune.objective import Objective
from autotune.outcome import Status
from autotune.slo import Finding, Run, Slo, judge
from tuning_db import Sample, Store, Trial

BOUND = "goodness_bound"
"""Counter of a pruned trial: the best goodness that it could still have reached."""


class Judge:
    """Judges trials of one store; requests are read once a trial, and only where an SLO asks for them."""

    def __init__(self, objective: Objective, slos: Sequence[Slo], store: Store) -> None:
        self.objective, self.slos = objective, tuple(slos)
        self._store = store
        self._kept: dict[str, tuple[Finding, ...]] = {}

    def findings(self, trials: Sequence[Trial]) -> tuple[Finding, ...]:
        """Every SLO on ``trials`` of one configuration, taken together."""
        runs = [Run(t.metrics, self.timelines(t) if self._needs_requests() else ()) for t in trials]
        return tuple(judge(slo, runs) for slo in self.slos)

    def violation(self, trial: Trial) -> float:
        """0 when the trial breaks no SLO, else how far it is past the one it breaks most."""
        if not self.slos:
            return 0.0
        if trial.id not in self._kept:
            self._kept[trial.id] = self.findings([trial])
        return max(finding.violation for finding in self._kept[trial.id])

    def goodness(self, trial: Trial) -> float | None:
        """What the sampler learns: the objective's goodness, of a pruned trial its bound; None for a failure."""
        if trial.status == Status.PRUNED:
            return float(trial.counters[BOUND]) if BOUND in trial.counters else None
        if trial.status not in (Status.OK, Status.QUALITY):
            return None
        return self.objective.goodness(trial.metrics)

    def feasible(self, trial: Trial) -> float | None:
        """Goodness of a trial that could be deployed: it ended well and breaks no SLO; else None."""
        if trial.status != Status.OK or self.violation(trial) > 0:
            return None
        return self.objective.goodness(trial.metrics)

    def timelines(self, trial: Trial) -> tuple[Timeline, ...]:
        """The stored requests of a trial."""
        return tuple(_timeline(sample) for sample in self._store.samples(trial.id))

    def _needs_requests(self) -> bool:
        return any(slo.percentile for slo in self.slos)


def _timeline(sample: Sample) -> Timeline:
    return Timeline(
        int(sample.facts.get("conversation", sample.index)), int(sample.facts.get("turn", 0)), sample.prompt_tokens,
        sample.output_tokens, sample.sent, tuple(sample.token_times), sample.error,
    )  # fmt: skip


def samples(trial_id: str, timelines: Sequence[Timeline]) -> list[Sample]:
    """What is stored of a run's requests."""
    return [
        Sample(
            trial_id=trial_id,
            index=index,
            facts={"conversation": t.conversation, "turn": t.turn},
            sent=t.sent,
            token_times=t.token_times,
            prompt_tokens=t.prompt_tokens,
            output_tokens=t.output_tokens,
            error=t.error,
        )
        for index, t in enumerate(timelines)
    ]
