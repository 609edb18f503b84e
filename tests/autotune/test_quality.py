"""KL against direct computation, the gate, and the cache that pays once for each set of answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.outcome import EngineError, Status
from autotune.quality import Gate, Quality, kl_divergence
from autotune.runtimes.base import Score
from search_spaces import Choice, Config, Knob, Space


def score(logits: np.ndarray, keep: int) -> Score:  # type: ignore[type-arg]
    """A Score of [T, V] logits whose actual next token is always 0."""
    logs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    ids = np.argsort(-logs, axis=1)[:, :keep]
    return Score(logs[:, 0].astype("f4"), ids.astype("i4"), np.take_along_axis(logs, ids, 1).astype("f4"))


def exact(p: np.ndarray, q: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
    p, q = (x - np.log(np.exp(x).sum(1, keepdims=True)) for x in (p, q))
    return (np.exp(p) * (p - q)).sum(1)  # type: ignore[no-any-return]


@given(st.integers(0, 1000), st.integers(2, 30))
def test_kl_is_exact_with_the_whole_vocabulary_and_a_lower_bound_without(seed: int, keep: int) -> None:
    source = np.random.default_rng(seed)
    p, q = source.normal(0, 2, (5, 30)), source.normal(0, 2, (5, 30))
    whole = kl_divergence(score(p, 30), score(q, 30))
    assert whole == pytest.approx(exact(p, q), abs=1e-4)
    part = kl_divergence(score(p, keep), score(q, keep))
    assert (part <= whole + 1e-4).all()
    assert (part >= 0).all()


@pytest.mark.parametrize(
    ("metrics", "inside"),
    [
        ({"kl_mean": 0.019, "perplexity_ratio": 1.009}, True),
        ({"kl_mean": 0.021, "perplexity_ratio": 1.0}, False),
        ({"kl_mean": 0.001, "perplexity_ratio": 1.02}, False),
        ({"kl_mean": 0.0, "perplexity_ratio": 0.99}, True),
        ({"kl_mean": float("nan"), "perplexity_ratio": 1.0}, False),
        ({"perplexity_ratio": 1.0}, False),
        ({}, False),
    ],
)
def test_gate(metrics: Mapping[str, float], inside: bool) -> None:
    assert (Gate().violation(metrics) <= 0) is inside


class Memory(dict[str, tuple[Mapping[str, Any], bytes]]):
    def put(self, key: str, kind: str, facts: Mapping[str, Any], blob: bytes) -> None:
        self[key] = (dict(facts), blob)


class Scorer:
    """An endpoint that only scores, with a fixed error on its logits."""

    def __init__(self, error: float) -> None:
        self.error, self.calls = error, 0

    def score(self, sequences: Sequence[Sequence[int]], top: int) -> list[Score]:
        self.calls += 1
        base = np.tile(np.linspace(0, 1, 8), (len(sequences[0]) - 1, 1))
        base[:, 0] += self.error
        return [score(base, min(top, 8)) for _ in sequences]


SPACE = Space(
    "toy",
    (
        Knob("bits", "bits", Choice((4, 8, 16), ordered=True), 8, ".", quality=True),
        Knob("seqs", "scheduler", Choice((1, 2)), 1, "."),
    ),
    reference={"bits": 16},
)
SEQUENCES = [[1, 2, 3, 4], [4, 3, 2, 1]]


def quality(cache: Memory, launched: list[Config], identity: str = "build 1") -> Quality:
    def launch(config: Config) -> list[Score]:
        launched.append(config)
        return Scorer(0.0).score(SEQUENCES, 512)

    return Quality(SPACE, SEQUENCES, cache, {"build": identity}, launch)


def test_one_reference_launch_and_one_scoring_for_each_set_of_answers() -> None:
    cache, launched = Memory(), []
    judge, endpoint = quality(cache, launched), Scorer(0.5)
    first = judge.check(endpoint, SPACE.complete({"bits": 4}))  # type: ignore[arg-type]
    again = judge.check(endpoint, SPACE.complete({"bits": 4, "seqs": 2}))  # type: ignore[arg-type]
    assert first == again and endpoint.calls == 1
    assert [c["bits"] for c in launched] == [16]
    assert first["kl_mean"] > 0.001
    later = quality(cache, launched).check(endpoint, SPACE.complete({"bits": 4}))  # type: ignore[arg-type]
    assert later == first and len(launched) == 1


def test_another_engine_build_shares_no_result() -> None:
    cache, launched = Memory(), []
    quality(cache, launched).check(Scorer(0.5), SPACE.default())  # type: ignore[arg-type]
    other = Scorer(0.0)
    assert quality(cache, launched, "build 2").check(other, SPACE.default())["kl_mean"] == pytest.approx(0, abs=1e-6)  # type: ignore[arg-type]
    assert len(launched) == 2 and other.calls == 1


def test_answers_that_are_not_numbers_are_a_quality_failure() -> None:
    with pytest.raises(EngineError) as caught:
        quality(Memory(), []).check(Scorer(float("nan")), SPACE.default())  # type: ignore[arg-type]
    assert caught.value.status is Status.QUALITY
