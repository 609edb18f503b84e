"""Learned infeasibility: what one failure excludes, and that it never excludes anything less demanding."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.catalogue import GIB, Machine
from autotune.infeasible import beside, demands, learned, region, regions, weight
from autotune.memory.forecast import forecast
from autotune.model import described
from autotune.sampler import Sampler
from autotune.setting import memory_facts, reference_model
from search_spaces import Config, load
from tuning_db import Trial

MODEL = described(reference_model())
MEMORY = forecast("native", MODEL, Machine("test", 8, 64 * GIB, shared=True))
SPACE = load("native").narrow(
    {"layers": 4, "mlps": MODEL.mlp_kinds, "devices": 8, "cuda": True, **memory_facts(MEMORY)}
)
WEIGH = weight(MEMORY)
CONFIGS = st.fixed_dictionaries({k.name: st.sampled_from(k.domain.values) for k in SPACE.free()}).map(SPACE.complete)


def failed(config: Config, status: str, reason: str, number: int = 1) -> Trial:
    return Trial(f"{number:020x}", "s1:x", "search", dict(config), config.key, status, reason)


def layout(config: Config) -> list:
    return [config[name] for name in ("tp", "pp", "dp", "ep")]


def possible(config: Config) -> bool:
    try:
        MEMORY.demand(config)
    except NotImplementedError:
        return False
    return True


@settings(deadline=None, max_examples=200)
@given(CONFIGS.filter(possible), CONFIGS.filter(possible), st.sampled_from(["load", "launch", "graphs", "measure"]))
def test_out_of_memory_excludes_only_what_is_at_least_as_demanding(config, other, phase):
    other = Config({**other, **{k: config[k] for k in ("tp", "pp", "dp", "ep", "attention", "graphs")}})
    found = region(failed(config, "oom", f"{phase}: no memory"), SPACE, WEIGH)
    assert found is not None and found.holds(config, WEIGH)
    if found.holds(other, WEIGH):
        mine, its = demands(config, WEIGH), demands(other, WEIGH)
        assert its["weights"] >= mine["weights"]
        assert phase == "load" or its["cache"] >= mine["cache"]
        assert phase in ("load", "launch") or its["rows"] >= mine["rows"]
        assert phase != "measure" or (its["tokens"] >= mine["tokens"] and its["seqs"] >= mine["seqs"])


@settings(deadline=None, max_examples=100)
@given(CONFIGS.filter(possible), CONFIGS.filter(possible), st.sampled_from(["load", "launch", "graphs", "measure"]))
def test_another_layout_is_never_excluded_for_memory(config, other, phase):
    found = region(failed(config, "oom", f"{phase}: no memory"), SPACE, WEIGH)
    assert found is not None
    assert layout(config) == layout(other) or not found.holds(other, WEIGH)


def test_out_of_memory_at_load_excludes_wider_weights_and_not_narrower():
    config = SPACE.complete({"bits_experts": 8})
    found = region(failed(config, "oom", "load: the kernel killed the engine"), SPACE, WEIGH)
    assert found is not None and "learned from trial 0000" in found.sentence and "at load" in found.sentence
    assert found.holds(SPACE.complete({"bits_experts": 16, "max_seqs": 1}), WEIGH)
    assert not found.holds(SPACE.complete({"bits_experts": 4}), WEIGH)
    assert not found.holds(SPACE.complete({"bits_experts": 16, "tp": 2}), WEIGH)


def test_out_of_memory_while_measuring_needs_the_same_kernels():
    config = SPACE.complete({"attention": "expanded", "token_budget": 512})
    found = region(failed(config, "oom", "measure: no memory"), SPACE, WEIGH)
    assert found is not None
    assert found.holds(SPACE.complete({"attention": "expanded", "token_budget": 1024}), WEIGH)
    assert not found.holds(SPACE.complete({"attention": "expanded", "token_budget": 256}), WEIGH)
    assert not found.holds(SPACE.complete({"attention": "absorbed", "token_budget": 1024}), WEIGH)


def test_a_graph_that_cannot_be_captured_excludes_larger_ones():
    config = SPACE.complete({"graphs": "cuda", "max_seqs": 8})
    found = region(failed(config, "crash", "graphs: operation not permitted when stream is capturing"), SPACE, WEIGH)
    assert found is not None and "8 rows" in found.sentence
    assert found.holds(SPACE.complete({"graphs": "cuda", "max_seqs": 16, "bits_experts": 4}), WEIGH)
    assert not found.holds(SPACE.complete({"graphs": "cuda", "max_seqs": 4}), WEIGH)
    assert not found.holds(SPACE.complete({"graphs": "compiled", "max_seqs": 8}), WEIGH)


def test_a_refused_value_is_excluded_with_its_reason():
    config = SPACE.complete({"attention": "sparse", "kv_splits": 2})
    found = region(failed(config, "unsupported", "launch: attention=sparse needs index_topk"), SPACE, WEIGH)
    assert found is not None and dict(found.equal) == {"attention": "sparse"}
    both = region(failed(config, "unsupported", "launch: kv_splits=2 with attention='sparse'"), SPACE, WEIGH)
    assert both is not None and dict(both.equal) == {"kv_splits": 2, "attention": "sparse"}
    assert both.holds(config, WEIGH) and not both.holds(SPACE.complete({"attention": "sparse"}), WEIGH)


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        ("unsupported", "launch: this build is odd"),
        ("unsupported", "launch: kv_splits=8 is too many"),
        ("unsupported", "quality: attention=absorbed cannot score"),
        ("crash", "measure: the engine died of signal 11"),
        ("timeout", "launch: the engine gave no answer in time"),
        ("quality", "kl 0.3 above 0.02"),
        ("busy", "launch: port taken"),
        ("ok", ""),
    ],
)
def test_other_endings_prove_nothing(status, reason):
    assert region(failed(SPACE.default(), status, reason), SPACE, WEIGH) is None


def test_a_region_inside_an_earlier_one_is_not_told_twice():
    wide, wider = SPACE.complete({"bits_experts": 8}), SPACE.default()
    rows = [failed(wide, "oom", "load: x", 1), failed(wider, "oom", "load: x", 2), failed(wider, "ok", "", 3)]
    assert len(regions(rows, SPACE, WEIGH)) == 1
    assert len(regions([rows[1], rows[0]], SPACE, WEIGH)) == 2


def test_the_sampler_asks_for_nothing_excluded_and_the_default_stays():
    small = SPACE.limit({k.name: (k.default,) for k in SPACE.free() if k.name not in ("bits_experts", "max_seqs")}, "x")
    trial = failed(small.complete({"bits_experts": 8, "max_seqs": 4}), "oom", "launch: no memory")
    taught = learned(small, [trial])
    assert [rule.sentence for rule in taught.rules[len(small.rules) :]] == [
        region(trial, small, WEIGH).sentence  # type: ignore[union-attr]
    ]
    sampler, seen = Sampler(taught, 20), []
    while (config := sampler.ask()) is not None:
        seen.append(config)
        sampler.tell(config, 1.0)
    asked = {(c["bits_experts"], c["max_seqs"]) for c in seen}
    assert (4, 16) in asked and (8, 2) in asked and (16, 8) in asked  # the last is the default
    assert not asked & {(8, 4), (8, 8), (8, 16), (16, 4), (16, 16)}


def test_prediction_and_measurement_stand_side_by_side():
    said = beside(SPACE, SPACE.default(), {"weight_bytes": 5.0, "peak_bytes": 7.0, "steps": 3.0})["memory"]
    assert set(said["predicted"]) == {"weight_bytes", "cache_bytes", "peak_bytes"}
    assert said["measured"] == {"weight_bytes": 5.0, "peak_bytes": 7.0}
    assert beside(replace(SPACE, facts={}), SPACE.default(), {}) == {}
