"""The ladder end to end on an engine of formulas: rungs, their cache, the one knob that a search sees, and refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autotune import ladder
from autotune.plan import Plan, resolve
from autotune.runtimes.base import Score
from autotune.setting import prepare
from search_spaces.bits import overrides, vector

KINDS = ("dense", "sparse", "sparse", "sparse")
COST = {4: 1.0, 8: 0.01}


class Cache(dict[str, Any]):
    def get(self, key: str) -> Any:  # type: ignore[override]
        return dict.get(self, key)

    def put(self, key: str, kind: str, facts: Any, blob: bytes) -> None:
        self[key] = facts, blob


class Runtime:
    """Tells sensitivities; the real engine's capabilities decide the space."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.asked = inner, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def sensitivities(self, log: Path, group: int = 64) -> dict[str, dict[int, float]]:
        self.asked += 1
        groups = vector({}, KINDS)
        return {g: {w: c * (i + 1) * 1e-4 for w, c in COST.items()} for i, g in enumerate(groups)}


class Bench:
    """Scores whose KL from the reference is the sum of what the vector's groups cost."""

    def __init__(self) -> None:
        self.logs, self.scored = Path("logs"), 0

    def score(self, config: Any, texts: Any) -> list[Score]:
        self.scored += 1
        groups = list(vector({}, KINDS))
        kl = sum(COST[w] * (groups.index(g) + 1) * 1e-4 for g, w in overrides(config.get("bits_vector", "")).items())
        tilt = np.sqrt(2 * kl)  # of two tokens from even odds: KL ≈ tilt² / 2
        found = []
        for ids in texts:
            top = np.tile(np.float32([tilt, -tilt]) - np.log(2 * np.cosh(tilt)), (len(ids) - 1, 1))
            found.append(Score(top[:, 0], np.tile(np.int32([0, 1]), (len(top), 1)), top.astype(np.float32)))
        return found


@pytest.fixture(scope="module")
def setting():
    found = prepare(resolve({}, {}, None))
    return replace(found, runtime=Runtime(found.runtime))


@pytest.fixture(scope="module")
def built(setting):
    bench, cache, said = Bench(), Cache(), []
    return bench, cache, ladder.build(setting, bench, cache, said.append), said


def test_rungs_go_from_full_width_down_at_rising_cost(built) -> None:
    bench, _, rungs, said = built
    assert rungs[0].vector == "" and len(rungs) == ladder.RUNGS == len(said) + 1
    sizes, kls = [r.weight_bytes for r in rungs], [r.kl for r in rungs]
    assert sizes == sorted(sizes, reverse=True) and kls == sorted(kls) and len(set(kls)) == len(kls)
    assert set(overrides(rungs[-1].vector).values()) == {4} and len(overrides(rungs[-1].vector)) == len(
        vector({}, KINDS)
    )
    assert all(r.kl == pytest.approx(r.kl_predicted, rel=0.05, abs=1e-7) for r in rungs[1:])
    assert bench.scored <= 1 + ladder.RUNGS * ladder.MEASUREMENTS


def test_the_same_question_is_answered_from_the_cache(setting, built) -> None:
    bench, cache, rungs, _ = built
    asked, scored = setting.runtime.asked, bench.scored
    assert ladder.build(setting, bench, cache) == rungs
    assert (setting.runtime.asked, bench.scored) == (asked, scored) == (1, scored)


def test_a_search_sees_one_ordered_knob_and_configurations_say_their_widths(setting, built) -> None:
    rungs = built[2]
    space = ladder.narrowed(setting.space, rungs)
    free = {knob.name for knob in space.free()}
    assert "bits_vector" in free and not free & set(ladder.FIXED)
    knob = space.knob("bits_vector")
    assert knob.domain.ordered and knob.domain.values == tuple(r.vector for r in rungs)
    config = space.complete({"bits_vector": rungs[3].vector})
    assert vector(config, KINDS) == {**vector({}, KINDS), **overrides(rungs[3].vector)}
    assert space.default() == setting.space.default()
    assert setting.space.check("bits_vector", rungs[3].vector) is None  # without the ladder it is a configuration too


def test_first_candidates_lie_inside_the_gate(setting, built) -> None:
    rungs = built[2]
    space = ladder.narrowed(setting.space, rungs)
    limit = 4 * rungs[4].kl
    found = ladder.candidates(space, rungs, limit)
    measured = {r.vector: r.kl for r in rungs}
    assert found and all(measured[c.config["bits_vector"]] <= limit / 2 for c in found)
    assert all("MiB of weights" in c.why and not space.broken(c.config) for c in found)
    assert ladder.candidates(space, (), limit) == []


def test_why_there_is_no_ladder(setting) -> None:
    assert ladder.possible(setting) == ""
    assert "no sensitivities" in ladder.possible(replace(setting, runtime=object()))
    limited = replace(setting, plan=Plan(knobs={"bits_experts": (8,)}))
    assert "name bits_experts" in ladder.possible(limited)
