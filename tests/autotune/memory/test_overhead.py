"""Overhead: assumed before, learned from measured trials, and what it learns is what was there."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.catalogue import GIB, Machine
from autotune.memory.forecast import forecast
from autotune.memory.overhead import LEAST, Overhead, assumed, learned
from autotune.model import described
from autotune.setting import reference_model
from search_spaces import load


def test_the_published_assumptions():
    assert assumed(int(79.15 * GIB)).bytes({"tokens": 2048}) == 6 * GIB
    assert assumed(int(39.39 * GIB)).bytes({"tokens": 2048}) == 3.5 * GIB
    more = assumed(int(79.15 * GIB)).bytes({"tokens": 3048})
    assert more - 6 * GIB == pytest.approx(0.36e9)


def test_too_few_trials_teach_nothing():
    prior = Overhead(base=5.0)
    assert learned([({"tokens": 1.0}, 9.0)] * (LEAST - 1), prior) is prior


@settings(deadline=None)
@given(st.floats(1e8, 1e10), st.floats(0, 1e6), st.lists(st.sampled_from([64, 256, 1024, 2048]), min_size=6))
def test_a_line_is_found_again(base, slope, tokens):
    seen = [({"tokens": float(t), "seqs": 8.0}, base + slope * t) for t in tokens]
    found = learned(seen, Overhead())
    assert found.trials == len(seen)
    for features, residual in seen:
        # a slope is pulled by a thousandth towards 0
        assert found.bytes(features) == pytest.approx(residual, abs=0.002 * slope * 2048 + 1)
    assert found.bytes({"tokens": 512.0, "seqs": 8.0}) >= 0


def test_measured_trials_teach_a_forecast():
    space, model = load("native"), described(reference_model())
    here = forecast("native", model, Machine("test", 2, 4 * GIB, shared=True))
    rows = []
    for budget in (64, 512, 2048, 64, 512, 2048):
        config = space.complete({"token_budget": budget})
        rows.append((config, {"peak_bytes": here.demand(config).total() + 300e6 + 50e3 * budget}))
    taught = here.taught(rows)
    config = space.complete({"token_budget": 1024})
    said = taught.said(config, {})["predicted"]["peak_bytes"]
    assert said == pytest.approx(here.demand(config).total() + 300e6 + 50e3 * 1024, rel=0.01)
    assert here.taught([(config, {})] * 9).overhead == here.overhead


def test_host_memory_teaches_nothing_about_a_gpu():
    space, model = load("native"), described(reference_model())
    here = forecast("native", model, Machine("test", 2, 40 * GIB, "8.0"))
    config = space.default()
    assert here.taught([(config, {"peak_bytes": 9e9})] * 9).overhead == here.overhead
    assert here.taught([(config, {"device_peak_bytes": 9e9})] * 9).overhead.trials == 9
