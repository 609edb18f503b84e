"""The end of a search for people: standings on stdout, the verdict, its SLOs and what to know about it on stderr."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from autotune.cli import output

if TYPE_CHECKING:
    from autotune.decision import Result
    from autotune.setting import Setting
    from tuning_db import Trial

BESIDE = ("kl_mean", "perplexity_ratio", "weight_bytes")
"""Metrics shown with every standing, beside the objective's own."""


def differing(config: Mapping[str, Any], default: Mapping[str, Any]) -> str:
    """What a configuration changes, for people: ``bits_experts=4 graphs=compiled``, or ``default``."""
    changed = [f"{name}={value}" for name, value in config.items() if default.get(name) != value]
    return " ".join(changed) or "default"


def report(result: Result, setting: Setting, form: str) -> None:
    """Print a decision: one row a finalist and the default's, best first; then the sentences."""
    names = tuple(dict.fromkeys((*setting.objective.metrics, *BESIDE)))
    rows = [_row(result, s.config_key, str(s.verdict), names) for s in result.winner.standings]
    for row, standing in zip(rows, result.winner.standings, strict=True):
        ratio = standing.ratio
        row |= {"ratio": ratio.mean, "low": ratio.low, "high": ratio.high, "blocks": ratio.n}
    base = [t for t in result.trials if t.config_key == result.default.key]
    rows.append(_row(result, result.default.key, "default", names))
    rows[-1] |= {"ratio": 1.0, "low": 1.0, "high": 1.0, "blocks": len(base)}
    slos = ["slo"] if any(result.findings.values()) else []
    output.emit(rows, ["verdict", *slos, "ratio", "low", "high", "blocks", *names, "config"], form, "standings")
    first = result.winner.standings[0]
    ratio = first.ratio
    interval = f"95 % interval {ratio.low:.3f} to {ratio.high:.3f}, {ratio.n} blocks, tie band {result.band:.1%}"
    metric = setting.objective.metric
    output.note(f"verdict: {first.verdict}, {metric} ×{ratio.mean:.3f} of the default ({interval})")
    for finding in result.findings.get(result.config.key, ()):
        output.note(f"slo: {finding.sentence()}")
    default_kept = all(finding.violation == 0 for finding in result.findings.get(result.default.key, ()))
    if result.config == result.default:
        output.note("the default stays: nothing proved better.")
    elif not default_kept:
        output.note("the default does not meet the SLO, so the best that does is taken whatever its verdict.")


def _row(result: Result, key: str, verdict: str, names: tuple[str, ...]) -> dict[str, Any]:
    from autotune.slo import summary

    mine = [t for t in result.trials if t.config_key == key]
    findings = result.findings.get(key, ())
    row: dict[str, Any] = {"verdict": verdict}
    if findings:
        row["slo"] = summary(findings)
        row["slos"] = [
            {"slo": f.slo.text, "state": str(f.state), "value": f.value, "requests": f.count, "over": f.over,
             "needed": f.needed}
            for f in findings
        ]  # fmt: skip
    return {**row, **_means(mine, names), "config": differing(mine[0].config, result.default)}


def _means(trials: list[Trial], names: tuple[str, ...]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in names:
        values = [t.metrics[name] for t in trials if name in t.metrics]
        if values:
            found[name] = sum(values) / len(values)
    return found
