"""A few knobs give every layer and group its width."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from search_spaces import bits

KINDS = ("dense", "sparse", "sparse", "sparse")
width = st.sampled_from(bits.WIDTHS)


def test_default_is_full_width_everywhere() -> None:
    widths = bits.vector({}, KINDS)
    assert set(widths.values()) == {16}
    assert set(widths) == {
        "0.attention", "0.dense", "embedding", "lm_head",
        *(f"{i}.{g}" for i in (1, 2, 3) for g in ("attention", "experts", "shared")),
    }  # fmt: skip


def test_protected_ends_are_one_step_wider() -> None:
    widths = bits.vector(
        {"bits_attention": 4, "bits_experts": 8, "bits_protect_first": 1, "bits_protect_last": 1}, KINDS
    )
    assert [widths[f"{i}.attention"] for i in range(4)] == [8, 4, 4, 8]
    assert [widths[f"{i}.experts"] for i in (1, 2, 3)] == [8, 8, 16]


@given(st.dictionaries(st.sampled_from([f"bits_{g}" for g in (*bits.LAYER_GROUPS, *bits.MODEL_GROUPS)]), width),
       st.lists(st.sampled_from(["dense", "sparse"]), min_size=1, max_size=50),
       st.integers(0, 2), st.integers(0, 2))  # fmt: skip
def test_protection_never_narrows(config: dict[str, int], kinds: list[str], first: int, last: int) -> None:
    plain = bits.vector(config, kinds)
    protected = bits.vector({**config, "bits_protect_first": first, "bits_protect_last": last}, kinds)
    assert plain.keys() == protected.keys()
    assert all(protected[name] >= plain[name] for name in plain)
    assert set(protected.values()) <= set(bits.WIDTHS)
