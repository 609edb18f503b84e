"""The forecast of the native engine beside what the engine itself counts, at several widths, types and layouts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.catalogue import GIB, Machine
from autotune.memory.forecast import forecast
from autotune.model import described
from autotune.runtimes.native.engine import Engine
from autotune.setting import reference_model
from search_spaces import load

SPACE = load("native").narrow({"layers": 4, "mlps": ("dense", "sparse", "sparse", "sparse"), "devices": 8, "cores": 8})
SMALL = {"kv_tokens": 1024, "max_seqs": 2, "token_budget": 64}
CASES = [
    {},
    {"compute": "bf16", "kv_dtype": "int8", "state_dtype": "bf16"},
    {"bits_experts": 4, "bits_attention": 8, "bits_lm_head": 8, "bits_embedding": 4, "bits_shared": 4},
    {"bits_dense": 4, "bits_group_size": 32, "bits_protect_last": 1, "bits_experts": 8, "kv_dtype": "fp32"},
    {"bits_experts": 4, "bits_long": 8},
]


@pytest.fixture(scope="module")
def model():
    return described(reference_model())


def machine(gib: float, cores: int = 8) -> Machine:
    return Machine("test", cores, int(gib * GIB), shared=True)


@pytest.mark.parametrize("values", CASES, ids=str)
def test_bytes_are_those_that_the_engine_counts(model, values):
    config = SPACE.complete({**SMALL, **values})
    counters = Engine(reference_model(), config).counters()
    said = forecast("native", model, machine(16)).said(config, counters)
    assert said["predicted"]["weight_bytes"] == pytest.approx(said["measured"]["weight_bytes"], rel=0.01)
    assert said["predicted"]["cache_bytes"] == pytest.approx(said["measured"]["cache_bytes"], rel=0.01)
    assert said["measured"]["peak_bytes"] > said["predicted"]["peak_bytes"]


def test_ranks_split_what_splits_and_copy_the_rest(model):
    here = forecast("native", model, machine(16))
    one, two, copies = (here.demand(SPACE.complete({**SMALL, **v})) for v in ({}, {"tp": 2}, {"dp": 2}))
    assert one.weights / 2 < two.weights < one.weights
    assert two.stages[0].kv == one.stages[0].kv and two.stages[0].state == one.stages[0].state / 2
    assert copies.total() == pytest.approx(2 * one.total())


def test_kept_states_count_up_to_their_limit(model):
    here = forecast("native", model, machine(16))
    plain, reuse = (
        here.demand(SPACE.complete({**SMALL, **v})) for v in ({}, {"prefix_reuse": True, "state_cache_mib": 16})
    )
    assert plain.total() < reuse.total() <= plain.total() + (16 << 20)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_the_quick_bound_never_hides_an_overflow(data):
    model = described(reference_model())
    config = SPACE.complete({k.name: data.draw(st.sampled_from(k.domain.values)) for k in SPACE.free()})
    try:
        need = forecast("native", model, machine(1)).demand(config).total()
    except NotImplementedError:
        return
    just_too_small = forecast("native", model, Machine("test", 8, int(need * 0.999), shared=True))
    enough = forecast("native", model, Machine("test", 8, int(need * 1.001) + 1, shared=True))
    assert just_too_small.overflows(config) and not enough.overflows(config)
