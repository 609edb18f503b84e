"""Whether a configuration still answers like the full-width model: KL and perplexity on held-out tokens, and a gate.

Results are cached by everything that may change an answer, so a study pays once for each bit vector.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from autotune.outcome import EngineError, Status
from autotune.runtimes.base import Endpoint, Score
from search_spaces import Config, Space

TOP = 512
"""Likeliest tokens kept a position; the whole distribution for vocabularies up to this size."""


class Cache(Protocol):
    """Where references and results are kept (the tuning database, in practice)."""

    def get(self, key: str) -> tuple[Mapping[str, Any], bytes] | None: ...

    def put(self, key: str, kind: str, facts: Mapping[str, Any], blob: bytes) -> None: ...


@dataclass(frozen=True, slots=True)
class Gate:
    """The limits a configuration must keep: mean KL in nats a token, and perplexity relative to the reference."""

    kl: float = 0.02
    perplexity: float = 1.01

    def violation(self, metrics: Mapping[str, float]) -> float:
        """Above 0 when outside the gate: the larger relative excess. Missing or non-finite figures are outside."""
        kl, ratio = metrics.get("kl_mean"), metrics.get("perplexity_ratio")
        if kl is None or ratio is None or not np.isfinite([kl, ratio]).all():
            return 1.0
        return max(kl / self.kl - 1, (ratio - 1) / max(self.perplexity - 1, 1e-9) - 1)

    def sentence(self, metrics: Mapping[str, float]) -> str:
        """Why a configuration is outside the gate."""
        return (
            f"KL {metrics.get('kl_mean', float('nan')):.4f} (limit {self.kl:g}), perplexity "
            f"×{metrics.get('perplexity_ratio', float('nan')):.4f} (limit ×{self.perplexity:g})"
        )


def kl_divergence(reference: Score, trial: Score) -> NDArray[np.float64]:
    """KL(reference ‖ trial) in nats at each of the [T-1] positions.

    Exact when both hold the whole vocabulary; else over the tokens that both name plus one bin for the rest, which
    never exceeds the exact value (data-processing inequality).
    """
    left, right = np.argsort(reference.ids, axis=1), np.argsort(trial.ids, axis=1)
    ids, others = (np.take_along_axis(s.ids, o, 1) for s, o in ((reference, left), (trial, right)))
    ps, qs = (np.take_along_axis(s.top, o, 1).astype(np.float64) for s, o in ((reference, left), (trial, right)))
    if ids.shape == others.shape and (ids == others).all():
        return _binned(ps, qs)
    pairs = (np.intersect1d(a, b, return_indices=True)[1:] for a, b in zip(ids, others, strict=True))
    rows = [_binned(p[None, i], q[None, j]) for p, q, (i, j) in zip(ps, qs, pairs, strict=True)]
    return np.concatenate(rows)


def _binned(p: NDArray[np.float64], q: NDArray[np.float64]) -> NDArray[np.float64]:
    """KL of log-probabilities [N, k] of the same tokens, with one bin for the tokens left out."""
    rest_p, rest_q = 1 - np.exp(p).sum(1), 1 - np.exp(q).sum(1)
    tail = np.where(rest_p > 1e-6, rest_p * np.log(np.maximum(rest_p, 1e-12) / np.maximum(rest_q, 1e-12)), 0.0)
    found: NDArray[np.float64] = np.maximum((np.exp(p) * (p - q)).sum(1) + tail, 0.0)
    return found


class Quality:
    """Scores configurations against the reference of the same engine, model and text.

    ``identity`` holds what, besides the configuration, decides an answer: engine build, model, held-out text.
    ``reference()`` launches the reference configuration and scores it; it runs at most once.
    """

    def __init__(
        self,
        space: Space,
        sequences: Sequence[Sequence[int]],
        cache: Cache,
        identity: Mapping[str, Any],
        score_reference: Callable[[Config], list[Score]],
    ) -> None:
        self._space, self._sequences, self._cache = space, sequences, cache
        self._identity = {**identity, "sequences": [list(s) for s in sequences], "top": TOP}
        self._score_reference = score_reference
        self._reference: list[Score] | None = None

    def cached(self, config: Config) -> dict[str, float] | None:
        """The figures of an earlier configuration with the same answers, if any."""
        hit = self._cache.get(self._key("quality", self._space.quality_part(config)))
        return {name: float(value) for name, value in hit[0].items()} if hit else None

    def check(self, endpoint: Endpoint, config: Config) -> dict[str, float]:
        """kl_mean (nats), perplexity and perplexity_ratio of a running configuration. EngineError(QUALITY) on NaN."""
        found = self.cached(config)
        if found is not None:
            return found
        reference = self.reference()
        scores = endpoint.score(self._sequences, TOP)
        for score in scores:
            if not np.isfinite(score.logprobs).all():
                raise EngineError(Status.QUALITY, "quality", "the model's log-probabilities are not finite")
        kl = np.concatenate([kl_divergence(r, t) for r, t in zip(reference, scores, strict=True)])
        base, now = _perplexity(reference), _perplexity(scores)
        found = {"kl_mean": float(kl.mean()), "perplexity": now, "perplexity_ratio": now / base}
        self._cache.put(self._key("quality", self._space.quality_part(config)), "quality", found, b"")
        return found

    def reference(self) -> list[Score]:
        """The reference's scores, from the cache or by launching it once."""
        if self._reference is None:
            config = self._space.complete(self._space.reference_part())
            key = self._key("reference", self._space.quality_part(config))
            hit = self._cache.get(key)
            if hit is None:
                scores = self._score_reference(config)
                self._cache.put(key, "reference", {"perplexity": _perplexity(scores)}, _pack(scores))
                self._reference = scores
            else:
                self._reference = _unpack(hit[1])
        return self._reference

    def _key(self, kind: str, part: Mapping[str, Any]) -> str:
        text = json.dumps([kind, self._identity, part], sort_keys=True, separators=(",", ":"))
        return "q1:" + hashlib.sha256(text.encode()).hexdigest()[:32]


def _perplexity(scores: Sequence[Score]) -> float:
    return float(np.exp(-np.concatenate([s.logprobs for s in scores]).astype(np.float64).mean()))


def _pack(scores: Sequence[Score]) -> bytes:
    buffer = io.BytesIO()
    arrays = {f"{name}{i}": getattr(s, name) for i, s in enumerate(scores) for name in ("logprobs", "ids", "top")}
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def _unpack(blob: bytes) -> list[Score]:
    with np.load(io.BytesIO(blob), allow_pickle=False) as file:
        return [Score(file[f"logprobs{i}"], file[f"ids{i}"], file[f"top{i}"]) for i in range(len(file.files) // 3)]
