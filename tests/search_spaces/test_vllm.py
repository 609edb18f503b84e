"""vLLM's space: one backend on compute capability 8.x, every constraint with its sentence, defaults that can run."""

from __future__ import annotations

import pytest

from search_spaces import SpaceError, load
from search_spaces.vllm import CHECKPOINTS, WIDTHS, settled

FACTS = {
    "devices": 8, "compute_capability": "8.0", "link": "NVLink", "cuda": True, "layers": 45, "experts": 288,
    "mtp_layers": 1, "sizes": {"attention heads": 64, "inner columns of an expert": 2048}, "longest": 4000,
}  # fmt: skip


class Memory:
    """A forecast that says what it is told to."""

    def __init__(self, tokens: float = 1e6) -> None:
        self._tokens = tokens

    def tokens(self, config):
        return self._tokens

    def overflows(self, config):
        return self._tokens < config["max_model_len"]


def broken(values, facts=FACTS):
    """Names of the broken rules of a configuration that is otherwise in order on eight devices."""
    space = load("vllm").narrow(facts)
    config = space.complete({"checkpoint": "w4-g128", "tp": 8, **values})
    return {rule.name.split(" ")[0] for rule in space.rules if rule.broken(config, facts)}


def test_the_groups_of_knobs():
    space = load("vllm")
    assert {k.group for k in space.knobs} == {
        "attention", "bits", "layout", "graphs", "cache", "scheduler", "speculation"
    }  # fmt: skip
    assert all(knob.flag and knob.sentence for knob in space.knobs)


def test_on_8_x_one_backend_is_left_and_each_removal_says_why():
    space = load("vllm").narrow(FACTS)
    assert space.knob("attention_backend").domain.values == ("TRITON_MLA_SPARSE",)
    gone = [r.reason for r in space.removals if r.knob == "attention_backend"]
    assert gone == ["it needs compute capability 9.0 (Hopper), and here it is 8.0"] * 3
    assert space.knob("kv_cache_dtype").domain.values == ("bfloat16",)
    assert any("reads a bfloat16 cache alone" in r.reason for r in space.removals)


def test_on_hopper_three_are_left_without_stages():
    space = load("vllm").narrow({**FACTS, "compute_capability": "9.0"})
    assert space.knob("attention_backend").domain.size == 3 and space.knob("kv_cache_dtype").domain.size == 2
    assert space.knob("pp").domain.values == (1,)
    assert any("hyper-connection" in r.reason for r in space.removals if r.knob == "pp")


def test_without_a_gpu_no_backend_is_left_and_the_reason_is_said_once():
    with pytest.raises(SpaceError, match="needs an NVIDIA GPU") as error:
        load("vllm").narrow({**FACTS, "compute_capability": None})
    assert str(error.value).count("NVIDIA") == 1


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        ({"tp": 4}, "C1"),
        ({"tp": 2, "dp": 4, "ep": False}, "C4"),
        ({"max_num_seqs": 64, "max_capture_size": 32}, "C8"),
        ({"max_num_seqs": 16, "max_capture_size": 32, "spec_method": "mtp", "spec_k": 3}, "C8"),
        ({"block_size": 2048, "spec_method": "mtp", "spec_k": 3}, "C9"),
        ({"spec_method": "mtp", "spec_k": 3, "spec_by_batch": True}, "C14"),
        ({"checkpoint": "w3-g128"}, "C6"),
        ({"checkpoint": "bf16"}, "C6"),
        ({"checkpoint": "fp8", "moe_backend": "triton"}, "C6"),
        ({"checkpoint": "w4-g32-a8", "spec_method": "mtp"}, "draft"),
        ({"tp": 2, "pp": 4, "dcp": 4}, "context"),
    ],
)
def test_a_broken_constraint(values, rule):
    assert rule in broken(values)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"tp": 4, "pp": 2},
        {"tp": 4, "dp": 2, "ep": True},
        {"max_num_seqs": 64, "max_capture_size": 32, "cudagraph_mode": "PIECEWISE"},
        {"spec_method": "mtp", "spec_k": 3, "spec_by_batch": True, "cudagraph_mode": "PIECEWISE"},
        {"checkpoint": "w3-g128", "moe_backend": "humming"},
        {"checkpoint": "bf16", "moe_backend": "triton"},
    ],
)
def test_what_may_run(values):
    assert not broken(values)


def test_experts_are_split_in_whole_groups():
    facts = {**FACTS, "sizes": {"attention heads": 64, "inner columns of an expert": 1408}}
    assert "C3" in broken({}, facts) and "C3" not in broken({"ep": True}, facts)
    assert "C4" in broken({"ep": True}, {**FACTS, "experts": 100})


def test_memory_and_pool():
    assert "C7" in broken({}, {**FACTS, "memory": Memory(1e4)})
    assert "C10" in broken({}, {**FACTS, "memory": Memory(5e6)})
    assert not broken({"kv_cap": 4_194_304}, {**FACTS, "memory": Memory(5e6)})
    assert not broken({}, {**FACTS, "memory": Memory(5e6), "wide_offsets": True})
    assert not broken({}, {**FACTS, "memory": Memory(1e6)})


def test_custom_all_reduce_needs_links():
    space = load("vllm").narrow({**FACTS, "link": "PCIe"})
    assert space.knob("allreduce").domain.values == ("nccl",)
    assert load("vllm").narrow({**FACTS, "link": "PCIe", "devices": 2}).knob("allreduce").domain.size == 2


def test_defaults_settle_on_what_can_run():
    space = settled(load("vllm").narrow({**FACTS, "memory": Memory(), "unfit": {"bf16": "too large"}}))
    default = space.default()
    assert not space.broken(default)
    assert (default["tp"], default["checkpoint"]) == (8, "w8-g128")
    assert any(r.value == "bf16" and r.reason == "too large" for r in space.removals)
    with pytest.raises(SpaceError, match=r"no configuration is possible here: .*KV cache"):
        settled(load("vllm").narrow({**FACTS, "memory": Memory(10)}))


def test_every_checkpoint_has_a_kernel():
    for checkpoint in CHECKPOINTS.values():
        assert any(checkpoint.experts in widths for widths in WIDTHS.values())
