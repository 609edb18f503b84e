"""Every group of every layer has the width that its knob or the explicit vector gives it, and no other has."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.runtimes.native.engine import Engine
from autotune.runtimes.native.inspect import weight_bytes
from autotune.setting import reference_model
from search_spaces import SpaceError, bits, load

SPACE = load("native").narrow({"cores": 2, "layers": 4, "experts": 8, "mlps": ("dense", "sparse", "sparse", "sparse")})
GROUPS = (*bits.LAYER_GROUPS, *bits.MODEL_GROUPS)
KINDS = SPACE.facts["mlps"]


def engine(**knobs: Any) -> Engine:
    return Engine(reference_model(), SPACE.complete({"kv_tokens": 1024, "compute": "bf16", **knobs}))


@pytest.fixture(scope="module")
def full() -> dict[str, int]:
    """Bytes of each group at 16 bits."""
    return weight_bytes(engine().decoder)


@pytest.mark.parametrize(("width", "size"), [(8, 64), (4, 32), (4, 64), (4, 128)])
@pytest.mark.parametrize("group", GROUPS)
def test_a_group_has_its_width_in_every_layer_and_its_bytes(
    group: str, width: int, size: int, full: dict[str, int]
) -> None:
    running = engine(**{f"bits_{group}": width, **({"bits_group_size": size} if width == 4 else {})})
    stored, held = running.effective()["bits_stored"], weight_bytes(running.decoder)
    wanted = bits.vector({}, KINDS) | {key: width for key in stored if key.split(".")[-1] == group}
    assert stored == wanted
    # Scales: one of 2 to 4 bytes for each row of at least 128 weights, or two of 2 bytes for each 4-bit group; rows may
    # be padded to a block of the packing, which is most for the 288 rows of lm_head.
    overhead = 4 / 128 + (4 / size if width == 4 else 0)
    assert width / 16 < held[group] / full[group] <= (width / 16 + overhead / 2) * (320 / 288)
    assert {k: v for k, v in held.items() if k != group} == {k: v for k, v in full.items() if k != group}
    assert running.counters()["weight_bytes"] == sum(held.values())


def test_the_explicit_vector_outranks_groups_and_protection() -> None:
    running = engine(bits_experts=4, bits_protect_last=1, bits_vector="3.experts=4,0.attention=8,lm_head=8,2.shared=16")
    stored = running.effective()["bits_stored"]
    assert stored == bits.vector({}, KINDS) | {
        "1.experts": 4, "2.experts": 4, "3.experts": 4, "0.attention": 8, "lm_head": 8,
    }  # fmt: skip
    assert all(running.effective()[name] == value for name, value in running.knobs.items())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("3.experts=5", "is not <layer>"), ("experts=4", "is not <layer>"), ("3.router=4", "is not <layer>"),
        ("3.experts=4,", "is not <layer>"), ("3.experts=4,3.experts=8", "twice"), ("9.experts=4", "of this model are"),
        ("0.experts=4", "of this model are"),
    ],
)  # fmt: skip
def test_a_vector_that_does_not_fit_is_refused_with_the_reason(text: str, words: str) -> None:
    with pytest.raises(SpaceError, match=words):
        SPACE.complete({"bits_vector": text})
    with pytest.raises(SpaceError, match=words):
        SPACE.limit({"bits_vector": ["", text]}, "the plan")
    with pytest.raises(SpaceError, match=words):
        Engine(reference_model(), {**SPACE.default(), "bits_vector": text})


def test_a_plan_lists_the_vectors_to_search_and_nothing_else_is_tried() -> None:
    assert "bits_vector" not in {knob.name for knob in SPACE.free()}
    rungs = ("", "3.experts=4", "2.experts=4,3.experts=4")
    space = SPACE.limit({"bits_vector": rungs}, "the plan")
    assert space.knob("bits_vector").domain.values == rungs
    assert space.complete({"bits_vector": rungs[2]})["bits_group_size"] == 64  # a 4-bit weight has groups
    with pytest.raises(SpaceError, match="takes"):
        space.complete({"bits_vector": "1.experts=4"})
