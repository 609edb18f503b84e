"""What a device holds beside weights, cache and graphs: learned from measured trials, assumed where there are none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from autotune.catalogue import GIB

LEAST = 3
"""Measured trials below which nothing is learned."""
RIDGE = 1e-3
"""Pull of every slope towards 0, as a share of its feature's variance: a feature that barely varied teaches little."""
TOKEN_BYTES = 0.36e9 / 1000
"""Activations of one more token a step (vLLM with GLM-5.3-Flash on 64 GB of sm80: 0.36 GB a thousand)."""
USUAL_TOKENS = 2048
LARGE, SMALL = 6.0 * GIB, 3.5 * GIB
"""Observed on 80 GB with 8 sequences and graphs: 2.7 to 13 GiB. On 40 GB nobody has published a figure."""


@dataclass(frozen=True, slots=True)
class Overhead:
    """``base`` bytes a device and ``slopes`` bytes a unit of each feature beyond its ``usual`` value.

    ``spread``: the most that a measured trial lay above the fit; ``trials``: how many were learned from, 0 for an
    assumption.
    """

    base: float = 0.0
    slopes: Mapping[str, float] = field(default_factory=dict)
    usual: Mapping[str, float] = field(default_factory=dict)
    spread: float = 0.0
    trials: int = 0

    def bytes(self, features: Mapping[str, float]) -> float:
        """Expected bytes, never below 0."""
        moved = sum(slope * (features.get(name, 0.0) - self.usual[name]) for name, slope in self.slopes.items())
        return max(self.base + moved, 0.0)


def assumed(memory_bytes: int, graphs: float = 0.0) -> Overhead:
    """Before anything was measured on a GPU: 6 GiB of 80 GB cards, 3.5 GiB of those under 60 GiB.

    ``graphs`` are the bytes of captured graphs that these figures already contain.
    """
    whole = LARGE if memory_bytes >= 60 * GIB else SMALL
    return Overhead(whole - graphs, {"tokens": TOKEN_BYTES}, {"tokens": USUAL_TOKENS})


def learned(seen: Sequence[tuple[Mapping[str, float], float]], prior: Overhead) -> Overhead:
    """Least squares of measured minus predicted bytes over the features, slopes pulled towards 0.

    ``seen``: (features, residual bytes) of each measured trial of one engine build. Below `LEAST` trials ``prior``.
    """
    if len(seen) < LEAST:
        return prior
    residuals = np.array([residual for _, residual in seen])
    names = [n for n in sorted(seen[0][0]) if len({features.get(n, 0.0) for features, _ in seen}) > 1]
    names = names[: max(len(seen) // LEAST - 1, 0)]
    table = np.array([[features.get(n, 0.0) for n in names] for features, _ in seen]).reshape(len(seen), len(names))
    middle = table.mean(0)
    moved = table - middle
    pull = np.diag(RIDGE * len(seen) * moved.var(0)) if names else np.zeros((0, 0))
    slopes = np.linalg.solve(moved.T @ moved + pull, moved.T @ (residuals - residuals.mean())) if names else np.zeros(0)
    fit = residuals.mean() + moved @ slopes
    return Overhead(
        base=float(residuals.mean()),
        slopes={n: float(v) for n, v in zip(names, slopes, strict=True)},
        usual={n: float(v) for n, v in zip(names, middle, strict=True)},
        spread=float(max((residuals - fit).max(), 0.0)),
        trials=len(seen),
    )
