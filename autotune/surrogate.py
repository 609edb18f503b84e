"""A Gaussian process over coded configurations, and how much each is expected to improve on the best.

Knows points as rows of value indices and knobs as tables of distances between their values; nothing of spaces.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Codes = NDArray[np.intp]

SAMPLES = 4
"""Hyper-parameter samples that a prediction averages over: one best guess from 30 points would be too sure of it."""
REACH = 4.0
"""Prior sum of all relevances: two points that differ in every knob have a correlation of about exp(-4)."""
NOISE = math.log(0.02)
"""Prior logarithm of the noise variance, as a share of the signal's."""
BOUND = 8.0


class Surrogate:
    """Correlation exp(-Σ relevance × distance) over every table of every knob, a product of Laplace kernels.

    A knob has one or more distance tables (values × values, in [0, 1]); how much each counts is learned, so that the
    data say whether a knob is ordered or not, or matters at all. Relevances are sampled by Metropolis steps from their
    posterior, with the signal's scale integrated out under an inverse-gamma prior (2 pseudo-observations).
    """

    def __init__(self, tables: Sequence[Sequence[Array]], seed: int) -> None:
        self._starts = np.cumsum([0, *(len(own[0]) for own in tables)])
        self._places, self._owners, self._distances = _entries(tables, self._starts)
        self._random = np.random.default_rng(seed)
        size = sum(map(len, tables))
        self._prior = np.append(np.full(size, math.log(REACH / max(size, 1))), NOISE)
        self._samples = self._prior + self._random.standard_normal((SAMPLES, size + 1))
        self._step = np.full(SAMPLES, 0.4)
        self._points: Array = np.zeros((0, self._starts[-1]))
        self._target: Array = np.zeros(0)
        self._failed: NDArray[np.bool_] = np.zeros(0, bool)

    def fit(self, points: Codes, values: Array, failed: NDArray[np.bool_], steps: int) -> None:
        """Learn ``values`` (n,) at ``points`` (n, knobs); ``failed`` (n,) marks those that are no answer at all.

        ``steps`` Metropolis steps are made from where the last call ended. Raises ValueError below two points.
        """
        if len(points) < 2:
            raise ValueError(f"a surrogate needs at least two points, not {len(points)}")
        self._points, self._failed = self._marked(points), failed
        self._target = (values - values.mean()) / (values.std() + 1e-9)
        for number, sample in enumerate(self._samples):
            current = self._energy(sample)
            for _ in range(steps):
                moved = self._random.random(len(sample)) < 0.4
                proposal = sample + self._step[number] * moved * self._random.standard_normal(len(sample))
                if np.abs(proposal).max() > BOUND:
                    continue
                energy = self._energy(proposal)
                accepted = math.log(self._random.random() + 1e-300) < current - energy
                self._step[number] = np.clip(self._step[number] * (1.15 if accepted else 0.95), 0.05, 1.5)
                if accepted:
                    sample[:], current = proposal, energy

    def improvement(self, points: Codes) -> Array:
        """Expected improvement (m,) of ``points`` on the best value learned, in its standard deviations.

        The predictive distribution is taken as logistic: E max(x - b, 0) = s ln(1 + exp((μ - b)/s)), whose tails are
        heavier than a normal's. It is multiplied by the share of similar points that did not fail.
        """
        best, total = self._target.max(), np.zeros(len(points))
        for mean, deviation, similar in self._predictions(self._marked(points)):
            scale = deviation * (math.sqrt(3) / math.pi)
            gain = scale * np.logaddexp(0.0, (mean - best) / scale)
            total += gain * (1 - similar[self._failed].sum(0) / (similar.sum(0) + 0.5))
        return total / SAMPLES

    def _predictions(self, points: Array) -> Iterator[tuple[Array, Array, Array]]:
        """Mean (m,), standard deviation (m,) and correlation with the learned points (n, m), by sample."""
        n = len(self._points)
        for sample in self._samples:
            matrix = self._correlation(sample, self._points)
            matrix.flat[:: n + 1] += _noise(sample)
            inverse = np.linalg.inv(matrix)
            cross = self._correlation(sample, points)
            weights = inverse @ self._target
            variance = (self._target @ weights + 2) / (n + 2)
            left = np.maximum(1 - np.einsum("ij,ij->j", cross, inverse @ cross), 1e-9)
            yield weights @ cross, np.sqrt(variance * left), cross

    def _energy(self, sample: Array) -> float:
        """Minus the logarithm of the posterior density, up to a constant."""
        n = len(self._target)
        matrix = self._correlation(sample, self._points)
        matrix.flat[:: n + 1] += _noise(sample)
        lower = np.linalg.cholesky(matrix)
        whitened = np.linalg.solve(lower, self._target)
        fit = 0.5 * (n + 2) * math.log((whitened @ whitened + 2) / (n + 2)) + np.log(np.diag(lower)).sum()
        return float(fit + 0.5 * ((sample - self._prior) ** 2).sum())

    def _correlation(self, sample: Array, points: Array) -> Array:
        """(n, m) between the learned points and marked ``points``."""
        width = self._starts[-1]
        weights = np.exp(sample[:-1])[self._owners] * self._distances
        weighted = np.bincount(self._places, weights, width * width).reshape(width, width)
        correlation: Array = np.exp(-(self._points @ weighted) @ points.T)
        return correlation

    def _marked(self, points: Codes) -> Array:
        """Each row with a 1 at each of its values, one column a value: sums of distances become matrix products."""
        marks = np.zeros((len(points), self._starts[-1]))
        np.put_along_axis(marks, points + self._starts[:-1], 1.0, axis=1)
        return marks


def _noise(sample: Array) -> float:
    return math.exp(sample[-1]) + 1e-6


def _entries(
    tables: Sequence[Sequence[Array]], starts: NDArray[np.intp]
) -> tuple[NDArray[np.intp], NDArray[np.intp], Array]:
    """Each distance with its place in one (values × values) matrix, flattened, and the number of its table.

    A knob's tables lie on its own block of the diagonal, and all else there is 0.
    """
    places, owners, distances = [], [], []
    number = 0
    for start, own in zip(starts, tables, strict=False):
        for table in own:
            rows, columns = np.nonzero(table)
            places.append((rows + start) * starts[-1] + columns + start)
            owners.append(np.full(len(rows), number))
            distances.append(table[rows, columns])
            number += 1
    return np.concatenate(places), np.concatenate(owners), np.concatenate(distances)
