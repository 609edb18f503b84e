"""What several ranks say of themselves, put together as if one engine had said it. Knows no process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

Found = list[list[Any]]
"""By replica and rank."""
EVERYWHERE = ("_bytes", "cpu_seconds")
"""Ends of the names of counts that every rank has its own of, and that add up."""
STORED = ("bits_stored", "bits_stored_long")
"""What each pipeline stage tells of its own layers."""
SLOWEST = ("_seconds", "_share", "_fraction", "_rate", "fragmentation")
"""Ends of names of which the largest of any rank is told."""


def counters(found: Found, _: Mapping[str, Any]) -> dict[str, float]:
    """Bytes and CPU seconds of all ranks together, times of the slowest, and everything else of each replica once.

    ``communication_share``: of the time in steps and scores, what the rank that waited most spent in exchanges.
    """
    ranks = list(chain.from_iterable(found))
    merged = {}
    for name in dict.fromkeys(chain.from_iterable(ranks)):
        values = [rank[name] for rank in ranks if name in rank]
        if name.endswith(EVERYWHERE):
            merged[name] = sum(values)
        elif name.endswith(SLOWEST):
            merged[name] = max(values)
        else:
            merged[name] = sum(replica[0].get(name, 0.0) for replica in found)
    exchanging = [rank for rank in ranks if rank.get("working_seconds") and "communication_seconds" in rank]
    if exchanging:
        merged["communication_share"] = max(r["communication_seconds"] / r["working_seconds"] for r in exchanging)
    return merged


def effective(found: Found, config: Mapping[str, Any]) -> dict[str, Any]:
    """What the first replica's ranks run: a knob that any of them did not obey shows that rank's value."""
    ranks = found[0]
    merged = dict(ranks[0])
    for rank in ranks[1:]:
        merged |= {name: value for name, value in rank.items() if name in config and value != config[name]}
    kernels = {name for rank in ranks for name in str(rank["kernels"]).split(",")}
    stages = dict(sorted(rank["stage"] for rank in ranks))
    del merged["stage"]
    return merged | {
        "kernels": ",".join(sorted(kernels)),
        **{name: dict(chain.from_iterable(r[name].items() for r in ranks)) for name in STORED if name in merged},
        "dp": len(found),
        "stages": list(stages.values()),
    }


def score(found: Found, _: Mapping[str, Any]) -> list[Any]:
    """Replica r scored every ``len(found)``-th sequence from the r-th on."""
    parts = [replica[0] for replica in found]
    total = sum(map(len, parts))
    return [parts[i % len(parts)][i // len(parts)] for i in range(total)]


MERGES: Mapping[str, Callable[[Found, Mapping[str, Any]], Any]] = {
    "counters": counters,
    "effective": effective,
    "score": score,
}


def merge(name: str, found: Found, config: Mapping[str, Any]) -> Any:
    """What the call ``name`` gives for all ranks; where nothing is to be put together, what the first one said."""
    return MERGES[name](found, config) if name in MERGES else found[0][0]
