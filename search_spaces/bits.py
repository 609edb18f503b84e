"""Per-layer bit widths: the weight groups of a `glm5_next` decoder, and how few knobs give each of them a width.

Knows nothing of how a width is stored or multiplied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from search_spaces.domain import Value

WIDTHS = (4, 8, 16)
LAYER_GROUPS = ("attention", "dense", "experts", "shared")
MODEL_GROUPS = ("embedding", "lm_head")


def layer_groups(kind: str) -> tuple[str, ...]:
    """The quantizable groups of one layer; ``kind`` is its feed-forward type, ``dense`` or ``sparse``."""
    return ("attention", "dense") if kind == "dense" else ("attention", "experts", "shared")


def vector(config: Mapping[str, Value], mlp_kinds: Sequence[str]) -> dict[str, int]:
    """Expand the ``bits_*`` knobs to ``{"<layer>.<group>": width, "embedding": width, "lm_head": width}``.

    ``bits_<group>`` is the width of a group; the first ``bits_protect_first`` and last ``bits_protect_last``
    layers get one step more (4 → 8 → 16), because whole-model KL is often most sensitive there (though not
    always: it is measured, not assumed). Router, indexer, norms, convolutions and hyper-connections are never in it.
    """
    first = int(config.get("bits_protect_first", 0))
    last = int(config.get("bits_protect_last", 0))
    count = len(mlp_kinds)
    widths: dict[str, int] = {}
    for layer, kind in enumerate(mlp_kinds):
        protected = layer < first or layer >= count - last
        for group in layer_groups(kind):
            width = int(config.get(f"bits_{group}", 16))
            widths[f"{layer}.{group}"] = wider(width) if protected else width
    for group in MODEL_GROUPS:
        widths[group] = int(config.get(f"bits_{group}", 16))
    return widths


def wider(width: int) -> int:
    """The next width up, 16 at most."""
    return next((w for w in WIDTHS if w > width), WIDTHS[-1])
