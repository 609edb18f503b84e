"""Per-layer bit widths: the weight groups of a `glm5_next` decoder, and how few knobs give each of them a width.

Knows nothing of how a width is stored or multiplied.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from search_spaces.domain import Value
from search_spaces.space import Facts, SpaceError

WIDTHS = (4, 8, 16)
LAYER_GROUPS = ("attention", "dense", "experts", "shared")
MODEL_GROUPS = ("embedding", "lm_head")
OVERRIDE = re.compile(r"(?:\d{1,4}\.(?:attention|dense|experts|shared)|embedding|lm_head)=(?:4|8|16)")


def layer_groups(kind: str) -> tuple[str, ...]:
    """The quantizable groups of one layer; ``kind`` is its feed-forward type, ``dense`` or ``sparse``."""
    return ("attention", "dense") if kind == "dense" else ("attention", "experts", "shared")


def vector(config: Mapping[str, Value], mlp_kinds: Sequence[str]) -> dict[str, int]:
    """Expand the ``bits_*`` knobs to ``{"<layer>.<group>": width, "embedding": width, "lm_head": width}``.

    ``bits_<group>`` is the width of a group; the first ``bits_protect_first`` and last ``bits_protect_last``
    layers get one step more (4 → 8 → 16), because whole-model KL is often most sensitive there (though not
    always: it is measured, not assumed). Router, indexer, norms, convolutions and hyper-connections are never in it.
    What ``bits_vector`` names has exactly the width that it says. Raises SpaceError for one that does not fit.
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
    named = overrides(str(config.get("bits_vector", "")))
    for name in named:
        if name not in widths:
            raise SpaceError(f"bits_vector names {name}; the groups of this model are {', '.join(widths)}")
    return widths | named


def overrides(text: str) -> dict[str, int]:
    """``"0.attention=8,3.experts=4,lm_head=8"`` as ``{"0.attention": 8, …}``. Raises SpaceError for any other text."""
    found: dict[str, int] = {}
    for part in text.split(",") if text else ():
        if not OVERRIDE.fullmatch(part):
            raise SpaceError(f"bits_vector: {part!r} is not <layer>.<group>=<width>, as in 0.attention=8,lm_head=4")
        name, _, width = part.partition("=")
        if name in found:
            raise SpaceError(f"bits_vector names {name} twice")
        found[name] = int(width)
    return found


def misfit(value: Value, facts: Facts) -> str:
    """Why the model of ``facts`` cannot take ``value`` as its bits_vector; "" when it can."""
    try:
        vector({"bits_vector": value}, facts["mlps"]) if "mlps" in facts else overrides(str(value))
    except SpaceError as error:
        return str(error)
    return ""


def used(config: Mapping[str, Value]) -> set[int]:
    """Every width that some weight may have under ``config``, in any model."""
    widths = {int(config.get(f"bits_{group}", 16)) for group in (*LAYER_GROUPS, *MODEL_GROUPS)}
    if config.get("bits_protect_first") or config.get("bits_protect_last"):
        widths |= {wider(int(config.get(f"bits_{group}", 16))) for group in LAYER_GROUPS}
    widths |= set(overrides(str(config.get("bits_vector", ""))).values())
    return widths | ({int(config["bits_long"])} if config.get("bits_long") else set())


def wider(width: int) -> int:
    """The next width up, 16 at most."""
    return next((w for w in WIDTHS if w > width), WIDTHS[-1])
