"""What one failed trial proves impossible: rules, each with its sentence, from stored trials alone.

Knows no engine; it compares configurations by their knobs and by forecast bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autotune.memory.forecast import Forecast
from autotune.outcome import Status
from search_spaces import Config, Facts, Rule, Space, Value
from search_spaces.domain import same
from tuning_db import Trial

Weigh = Callable[[Mapping[str, Value]], Mapping[str, float]]
"""Demands of a configuration: ``weights``, ``cache`` and ``graphs`` bytes of the fullest rank."""
BYTES = {
    "load": ("weights",),
    "profile": ("weights", "tokens"),
    "kv": ("weights", "cache"),
    "launch": ("weights", "cache"),
    "graphs": ("weights", "cache", "graphs", "rows"),
}
"""Demands that decide whether memory lasts through a phase. Later phases need all of DEMANDS."""
TAUGHT = 100
"""Latest measured trials from which overhead is learned; more would cost the study time and teach little."""
DEMANDS = ("weights", "cache", "graphs", "rows", "tokens", "seqs")
ROWS = ("max_capture_size", "max_seqs", "max_num_seqs")
TOKENS = ("token_budget", "max_num_batched_tokens")
SEQS = ("max_seqs", "max_num_seqs")
GRAPH_KNOBS = ("graphs", "cudagraph_mode")
NAMED = re.compile(r"\b([a-z][a-z0-9_]*)\s*=\s*('[^']*'|\"[^\"]*\"|[^\s,;:)'\"]+)")


@dataclass(frozen=True, slots=True)
class Region:
    """Configurations that share ``equal`` and whose every demand in ``least`` is at least that large."""

    sentence: str
    equal: Mapping[str, Value]
    least: Mapping[str, float]

    def holds(self, config: Mapping[str, Value], weigh: Weigh) -> bool:
        if any(name not in config or not same(config[name], value) for name, value in self.equal.items()):
            return False
        if not self.least:
            return True
        here = demands(config, weigh)
        return all(name in here and here[name] >= value for name, value in self.least.items())


def demands(config: Mapping[str, Value], weigh: Weigh) -> dict[str, float]:
    """What grows a configuration's need: forecast bytes, captured rows, tokens a step, sequences together."""
    found = dict(weigh(config))
    for name, knobs in (("rows", ROWS), ("tokens", TOKENS), ("seqs", SEQS)):
        knob = next((k for k in knobs if k in config), None)
        if knob is not None:
            found[name] = float(config[knob])
    return found


def region(trial: Trial, space: Space, weigh: Weigh) -> Region | None:
    """What ``trial`` proves infeasible, or None: most failures prove nothing beyond themselves."""
    phase, _, reason = trial.reason.partition(": ")
    first = reason.splitlines()[0] if reason else trial.reason
    if trial.status == Status.OOM:
        return _memory(trial, phase, space, weigh)
    if phase == "graphs" and trial.status in (Status.CRASH, Status.UNSUPPORTED):
        return _capture(trial, first, space, weigh)
    if trial.status == Status.UNSUPPORTED and phase in ("launch", "load"):
        return _refused(trial, first, space)
    return None


def _memory(trial: Trial, phase: str, space: Space, weigh: Weigh) -> Region | None:
    """Out of memory in a phase: everything at least as demanding there, on the same layout."""
    here = demands(trial.config, weigh)
    names = [name for name in BYTES.get(phase, DEMANDS) if name in here]
    if "weights" not in names:
        return None
    groups = ("layout",) if phase == "load" else ("layout", "attention", "graphs", "speculation")
    equal = _knobs(trial, space, groups)
    if phase not in ("load", "launch", "kv"):  # activations and kernels' workspace are of no forecast
        sizes = {*ROWS, *TOKENS, *SEQS}
        equal |= {name: value for name, value in trial.config.items() if name not in sizes}
    else:
        equal |= {name: trial.config[name] for name in ("gmu",) if name in trial.config}
    told = [f"{name} {here[name] / 2**30:.3g} GiB" if name in ("weights", "cache", "graphs") else
            f"{name} {here[name]:g}" for name in names]  # fmt: skip
    sentence = (
        f"learned from trial {trial.id}: out of memory at {phase}; excluded is all that needs at least as much on the "
        f"same layout ({', '.join(told)})"
    )
    return Region(sentence, equal, {name: here[name] for name in names})


def _capture(trial: Trial, reason: str, space: Space, weigh: Weigh) -> Region | None:
    """A graph that could not be captured: that kind of graph on the same layout and attention, from that size on."""
    kind = next((name for name in GRAPH_KNOBS if name in trial.config), None)
    rows = demands(trial.config, weigh).get("rows")
    if kind is None or rows is None:
        return None
    equal = {**_knobs(trial, space, ("layout", "attention", "speculation")), kind: trial.config[kind]}
    sentence = (
        f"learned from trial {trial.id}: {kind}={trial.config[kind]} could not be captured at {rows:g} rows "
        f"({reason}); excluded from that size on"
    )
    return Region(sentence, equal, {"rows": rows})


def _refused(trial: Trial, reason: str, space: Space) -> Region | None:
    """The engine refused values that it named: exactly these, together."""
    known = {knob.name for knob in space.knobs}
    equal = {}
    for name, text in NAMED.findall(reason):
        if name in known and name in trial.config and str(trial.config[name]) == text.strip("'\"."):
            equal[name] = trial.config[name]
    if not equal:
        return None
    named = ", ".join(f"{name}={value}" for name, value in equal.items())
    return Region(f"learned from trial {trial.id}: the engine refuses {named}: {reason}", equal, {})


def _knobs(trial: Trial, space: Space, groups: Sequence[str]) -> dict[str, Value]:
    return {k.name: trial.config[k.name] for k in space.knobs if k.group in groups and k.name in trial.config}


def regions(trials: Sequence[Trial], space: Space, weigh: Weigh) -> list[Region]:
    """What failed trials prove, oldest first, without those that an earlier one already covers."""
    found: list[Region] = []
    for trial in trials:
        if any(old.holds(trial.config, weigh) for old in found):
            continue
        new = region(trial, space, weigh)
        if new is not None:
            found.append(new)
    return found


def learned(space: Space, trials: Sequence[Trial]) -> Space:
    """``space`` with what its scenario's trials teach: overhead for its forecast, and a rule for each region.

    The default is never excluded: what it did is for the study to judge.
    """
    memory = space.facts.get("memory")
    facts: Facts = space.facts
    if isinstance(memory, Forecast):
        memory = memory.taught([(t.config, t.counters) for t in trials if t.status == Status.OK][-TAUGHT:])
        facts = {**space.facts, "memory": memory}
    weigh = weight(memory)
    default = space.default()
    rules = [
        Rule(f"learned {index}", found.sentence, _rule(found, weigh, default))
        for index, found in enumerate(regions(trials, space, weigh))
    ]
    return replace(space, rules=(*space.rules, *rules), facts=facts)


def _rule(region: Region, weigh: Weigh, default: Config) -> Callable[[Mapping[str, Value], Facts], bool]:
    return lambda config, facts: region.holds(config, weigh) and dict(config) != dict(default)


def weight(memory: Any) -> Weigh:
    """Demands by a forecast, none without one."""

    def weigh(config: Mapping[str, Value]) -> Mapping[str, float]:
        try:
            demand = memory.demand(config)
        except NotImplementedError:
            return {}
        return {"weights": demand.weights + demand.second + demand.kept, "cache": demand.cache, "graphs": demand.graphs}

    return weigh if isinstance(memory, Forecast) else lambda config: {}


def beside(space: Space, config: Config, counters: Mapping[str, Any]) -> dict[str, Any]:
    """``{"memory": predicted and measured bytes}`` of a trial, for its provenance; empty without a forecast."""
    memory = space.facts.get("memory")
    said = memory.said(config, counters) if isinstance(memory, Forecast) else {}
    return {"memory": said} if said else {}
