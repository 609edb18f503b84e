"""Builds an export from the stored rows of one confirmation. Decides nothing: the winner is given."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from autotune import __version__
from autotune.exporters.base import Evidence, Export, ExportError
from autotune.stats import Winner
from tuning_db import Scenario, Trial


def gather(winner: Winner, default_key: str, trials: Sequence[Trial], scenario: Scenario, folder: Path) -> Export:
    """The export of ``winner``, decided from ``trials``: the good confirming runs of one round of ``scenario``.

    ``folder`` is where the model lies now. Raises ExportError when the winner's runs did not all run the same thing.
    """
    mine = _runs(trials, winner.config_key)
    base = _runs(trials, default_key)
    evidence = Evidence(
        verdict=str(winner.verdict),
        metric=str(scenario.objective["metric"]),
        better=str(scenario.objective["better"]),
        ratio=winner.ratio,
        metrics=_means(mine),
        default_metrics=_means(base),
        blocks=len({trial.block for trial in mine}),
        trials=tuple(trial.id for trial in mine),
        round=str(mine[0].provenance.get("round", "")),
        measured_at=datetime.fromtimestamp(max(t.ended_at for t in trials), UTC).isoformat(timespec="seconds"),
    )
    return Export(
        engine=scenario.engine,
        engine_build=dict(scenario.engine_build),
        model=dict(scenario.model),
        folder=str(folder),
        hardware={
            "key": scenario.hardware.key,
            "label": scenario.hardware.label,
            "kind": scenario.hardware.kind,
            "facts": dict(scenario.hardware.facts),
        },
        workload=dict(scenario.workload),
        objective=dict(scenario.objective),
        config=dict(mine[0].config),
        effective=_effective(mine),
        evidence=evidence,
        autotune=__version__,
    )


def _runs(trials: Sequence[Trial], config_key: str) -> list[Trial]:
    found = [trial for trial in trials if trial.config_key == config_key]
    if not found:
        raise ExportError(f"no confirming run of {config_key} is stored; run the same `autotune search` again")
    return found


def _means(trials: Sequence[Trial]) -> dict[str, float]:
    """Means of the metrics that every run has: one that some runs lack would average other conditions."""
    names = set.intersection(*(set(trial.metrics) for trial in trials))
    return {name: sum(trial.metrics[name] for trial in trials) / len(trials) for name in sorted(names)}


def _effective(trials: Sequence[Trial]) -> dict[str, Any]:
    first = trials[0]
    for other in trials[1:]:
        if plain(other.effective) != plain(first.effective):
            raise ExportError(
                f"runs {first.id} and {other.id} of the same configuration ran different things, so none can be "
                f"vouched for; compare `autotune show {first.id}` with `autotune show {other.id}`, then search again"
            )
    return dict(first.effective)


def plain(value: Any) -> Any:
    """``value`` as JSON gives it back, so that a list equals the tuple it was written from."""
    return json.loads(json.dumps(value, sort_keys=True))
