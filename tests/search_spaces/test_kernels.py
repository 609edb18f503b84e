"""Spaces of kernels: every rule refuses what it says, and defaults are the kernel's own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_spaces import Config, SpaceError
from search_spaces.kernels import SHARED_BYTES, kernel_space

FACTS = {"group": 64, "inputs": 4096, "rows": 64, "weight_bytes": 0.5, "least_k": 16}
TRITON = kernel_space("triton", FACTS, {"m": 64, "n": 64, "k": 64, "stages": 4})


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({"k": 32}, "group divides k"),
        ({"m": 128, "n": 128, "k": 256, "stages": 4, "warps": 8}, "shared memory"),
        ({"split": 64, "k": 256}, "tile of its own"),
        ({"m": 16, "n": 16, "warps": 16}, "at least one output"),
        ({"m": 128, "n": 256, "warps": 1}, "registers"),
        ({"m": 256, "n": 32}, "mostly zeros"),
    ],
)
def test_each_rule_says_why(choice: dict[str, int], words: str) -> None:
    assert TRITON.broken(TRITON.default()) == ()
    assert any(words in sentence for sentence in TRITON.broken(TRITON.complete(choice)))


@given(st.data())
def test_what_no_rule_refuses_fits_the_device(data: st.DataObject) -> None:
    config: Config = TRITON.complete({k.name: data.draw(st.sampled_from(k.domain.values)) for k in TRITON.free()})
    tiles = (int(config["m"]) * 4 + int(config["n"]) * 0.5) * int(config["k"]) * max(int(config["stages"]) - 1, 1)
    fits = tiles <= SHARED_BYTES and int(config["k"]) % 64 == 0
    if not TRITON.broken(config):
        assert fits
    elif not fits:
        assert TRITON.broken(config)


def test_a_larger_device_takes_more() -> None:
    wide = {"m": 64, "n": 256, "k": 256, "stages": 3, "warps": 8}
    larger = kernel_space("triton", {**FACTS, "shared_bytes": 227 << 10}, {})
    assert any("shared" in sentence for sentence in TRITON.broken(TRITON.complete(wide)))
    assert larger.broken(larger.complete(wide)) == ()


def test_integer_units_refuse_short_tiles_with_the_reason() -> None:
    space = kernel_space("triton", {**FACTS, "least_k": 32}, {})
    assert 16 not in space.knob("k").domain.values
    assert any("32 inputs" in removal.reason for removal in space.removals)


def test_the_default_is_the_kernels_own() -> None:
    assert kernel_space("cpu", {}, {"path": "dense"}).default() == Config({"path": "dense"})
    assert kernel_space("cpu", {}, {"path": "packed", "block": 2}).default()["block"] == 2
    with pytest.raises(SpaceError, match="block cannot be 3"):
        kernel_space("cpu", {}, {"block": 3})
    with pytest.raises(SpaceError, match="backends: cpu, triton"):
        kernel_space("metal", {}, {})


def test_what_the_machine_lacks_is_removed_with_its_reason() -> None:
    wide = kernel_space("cpu", {"compiled": False, "refused": {"path=packed": "stored as it is"}}, {"path": "dense"})
    assert wide.size() == 1
    assert {removal.reason for removal in wide.removals if removal.knob == "path"} == {"stored as it is"}
    torch_only = kernel_space("cpu", {"compiled": False}, {})
    assert [knob.name for knob in torch_only.free()] == ["path"]


@pytest.mark.parametrize("choice", [(16, 64, 128, 4, 49152), (128, 128, 64, 3, 81920), (64, 128, 128, 3, 98304)])
def test_shared_memory_is_what_compilations_for_sm80_asked_for(choice: tuple[int, ...]) -> None:
    """w8a16 with fp32 activations; the last number is what Triton 3.9 reported."""
    m, n, k, stages, asked = choice
    config = {"m": m, "n": n, "k": k, "stages": stages, "warps": 8}
    for limit, fits in ((asked, True), (asked - 1, False)):
        space = kernel_space("triton", {"weight_bytes": 1, "activation_bytes": 4, "shared_bytes": limit}, {})
        broken = space.broken(space.complete(config))
        assert any("shared" in sentence for sentence in broken) != fits
