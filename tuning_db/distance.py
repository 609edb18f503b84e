"""How far one measured scenario is from another: every differing fact by name, each with a distance. Knows no database.

The distances order answers; they are judgement, not measurement: a driver 1, another version of the engine 3, a factor
of two in a size of the workload 4, another workload, model or kind of machine 20 and more.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuning_db.records import Facts, Hardware

TIERS = ("exact", "near", "stale", "far")
"""Best first: the same in all that was measured; the same software on a machine or workload that differs a little;
older software; a newer software, another machine, model or workload."""

VERSIONS = ("hardware.driver", "hardware.cuda", "hardware.kernel", "engine.")
"""Beginnings of the facts that say which software ran."""

FAR = 20.0
"""The distance of one fact from which on a match is far."""

WEIGHTS: Mapping[str, float] = {
    "hardware.kind": 100.0,
    "hardware.product": 30.0,
    "hardware.compute_capability": 30.0,
    "hardware.cpu_model": 20.0,
    "hardware.count": 20.0,
    "hardware.cores": 20.0,
    "hardware.memory_bytes": 10.0,
    "hardware.mig_profile": 8.0,
    "hardware.driver": 1.0,
    "hardware.cuda": 1.0,
    "hardware.kernel": 1.0,
    "hardware.": 4.0,
    "engine.": 3.0,
    "model.": 30.0,
    "workload.name": 20.0,
    "workload.kind": 20.0,
    "workload.": 4.0,
    "objective.": 0.0,
}
"""By whole name, or by part for the rest. A number counts its weight by factor of two, and a quarter at least."""

ABSENT = "(absent)"


@dataclass(frozen=True, slots=True)
class Difference:
    """One fact in which a stored scenario is not what was asked for; ``change`` of a version is older or newer."""

    field: str
    want: Any
    have: Any
    distance: float = 0.0
    change: str = ""

    def sentence(self) -> str:
        """Such as ``hardware.driver 570 here, 560 there (older)``."""
        return f"{self.field} {_shown(self.want)} here, {_shown(self.have)} there" + (
            f" ({self.change})" if self.change else ""
        )


def differences(part: str, want: Facts, have: Facts) -> tuple[Difference, ...]:
    """Every fact of a part (``hardware``, ``engine`` …) that is not the same, by name."""
    found = []
    for name in sorted(want.keys() | have.keys()):
        ours, theirs = want.get(name, ABSENT), have.get(name, ABSENT)
        if ours != theirs or type(ours) is not type(theirs):
            field = f"{part}.{name}"
            change = _change(ours, theirs) if field.startswith(VERSIONS) else ""
            found.append(Difference(field, ours, theirs, _distance(part, field, ours, theirs), change))
    return tuple(found)


def machine(hardware: Hardware) -> dict[str, Any]:
    """The facts of a machine as they are compared: an unknown one equals none of another host's."""
    return {"kind": hardware.kind, **hardware.known()}


@dataclass(frozen=True, slots=True)
class Gap:
    """The differences of one or more parts in short: their distance, and whether they make a match stale or far."""

    distance: float
    stale: bool
    far: bool


def gap(differs: Sequence[Difference]) -> Gap | None:
    """The short form; None when nothing that was measured differs."""
    real = [difference for difference in differs if not difference.field.startswith("objective.")]
    if not real:
        return None
    return Gap(
        total(real),
        any(d.field.startswith(VERSIONS) for d in real),
        any(d.distance >= FAR or d.change == "newer" for d in real),
    )


def rank(gaps: Iterable[Gap | None], loosely_same: bool) -> tuple[int, float]:
    """(the place in TIERS, the distance) of a match; ``loosely_same``: both machines have one loose key."""
    distance, stale, far, some = 0.0, False, not loosely_same, False
    for found in gaps:
        if found is not None:
            distance, stale, far, some = distance + found.distance, stale or found.stale, far or found.far, True
    return (0 if not some else 3 if far else 2 if stale else 1), distance


def tier(differs: Sequence[Difference], loosely_same: bool) -> str:
    """The tier of a match."""
    return TIERS[rank([gap(differs)], loosely_same)[0]]


def total(differs: Iterable[Difference]) -> float:
    """The distance of a match."""
    return math.fsum(difference.distance for difference in differs)


def _distance(part: str, field: str, want: Any, have: Any) -> float:
    weight = WEIGHTS.get(field, WEIGHTS[f"{part}."])
    numbers = [v for v in (want, have) if isinstance(v, (int, float)) and not isinstance(v, bool) and v > 0]
    if len(numbers) == 2 and not field.startswith(VERSIONS):
        return weight * max(abs(math.log2(numbers[0] / numbers[1])), 0.25)
    return weight


def _change(want: Any, have: Any) -> str:
    """How the stored version stands to the wanted one; empty where their order cannot be told."""
    ours, theirs = _release(want), _release(have)
    if ours is None or theirs is None or ours == theirs:
        return ""
    return "older" if theirs < ours else "newer"


def _release(version: Any) -> tuple[int, ...] | None:
    """The numbers a version begins with, without trailing zeros; None for a digest or anything else."""
    match = re.match(r"v?(\d+(?:\.\d+)*)(?![0-9A-Za-z])", version) if isinstance(version, str) else None
    if match is None:
        return None
    numbers = [int(part) for part in match[1].split(".")]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def _shown(value: Any) -> str:
    return "unknown" if isinstance(value, dict) and value.keys() == {"unknown_on"} else str(value)
