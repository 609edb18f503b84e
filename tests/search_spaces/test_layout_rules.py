"""Which layouts the native space offers for a model and a machine, each refusal with its sentence."""

from __future__ import annotations

from typing import Any

import pytest

from search_spaces import Space, load

SIZES = {"attention heads": 12, "linear attention heads": 16, "tokens of the vocabulary": 96}
INPUTS = {"attention": (64, 96), "dense": (96,), "experts": (64,), "shared": (64,)}
MODEL = {"layers": 4, "experts": 6, "sizes": SIZES, "inputs": INPUTS, "mlps": ("dense", "sparse", "sparse", "sparse")}


def space(**machine: Any) -> Space:
    return load("native").narrow({**MODEL, **machine})


@pytest.mark.parametrize(
    ("knob", "value", "words"),
    [
        ("tp", 8, "12 attention heads do not divide over 8 ranks"),
        ("pp", 8, "8 stages need a layer each; the model has 4"),
        ("ep", 4, "6 experts do not divide over 4 ranks"),
        ("dp", 8, ""),
    ],
)
def test_a_value_that_the_model_cannot_be_cut_into_is_removed_with_its_reason(
    knob: str, value: int, words: str
) -> None:
    reasons = {(r.knob, r.value): r.reason for r in space(devices=8, cores=8).removals}
    assert reasons.get((knob, value), "") == words


def test_no_more_ranks_than_devices() -> None:
    here = space(devices=2, cores=2)
    assert here.knob("tp").domain.values == here.knob("dp").domain.values == (1, 2)
    assert {r.reason for r in here.removals if r.knob == "pp"} == {
        "4 ranks need 4 devices (on CPU, cores); there are 2",
        "8 ranks need 8 devices (on CPU, cores); there are 2",
    }
    assert here.default()["tp"] == here.default()["pp"] == here.default()["dp"] == here.default()["ep"] == 1


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"tp": 2}, ""),
        ({"pp": 2, "dp": 2}, ""),
        ({"tp": 2, "ep": 2}, ""),
        ({"tp": 4, "pp": 2}, "must not outnumber the devices"),
        ({"tp": 2, "pp": 2, "threads": 2}, "threads of all ranks"),
        ({"threads": 4}, ""),
        ({"ep": 2}, "ep must divide tp"),
        ({"tp": 2, "bits_attention": 8}, ""),
        ({"tp": 4, "bits_attention": 8}, "whole groups"),  # 96 / 4 is no multiple of 16
        ({"tp": 2, "bits_attention": 4, "bits_group_size": 32}, "whole groups"),  # nor 96 / 2 of 32
        ({"tp": 2, "bits_experts": 4, "bits_group_size": 64}, "whole groups"),
        ({"tp": 2, "ep": 2, "bits_experts": 4, "bits_group_size": 64}, ""),  # whole experts are not split
        ({"tp": 2, "bits_dense": 4, "bits_group_size": 64}, ""),  # 96 are no whole groups anyway: stored at 8 bits
        ({"tp": 2, "bits_vector": "1.experts=4", "bits_group_size": 64}, "whole groups"),
        ({"tp": 2, "bits_experts": 8, "activations": "int8_tensor"}, "one scale a tensor"),
        ({"pp": 2, "bits_experts": 8, "activations": "int8_tensor"}, ""),
        ({"tp": 2, "bits_experts": 4, "bits_group_size": 32, "bits_long": 8}, ""),
    ],
)  # fmt: skip
def test_rules_between_layout_and_the_rest(knobs: dict[str, Any], words: str) -> None:
    here = space(devices=4, cores=4)
    broken = here.broken({**here.complete(knobs), **knobs})
    assert (words in "; ".join(broken)) if words else not broken
