"""Which weights a `glm5_next` model has, layer by layer, and how ranks share them. Knows no bit width and no engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autotune.model import Model

WHOLE, RANKS, EXPERTS = "whole", "ranks", "experts"
"""On every rank of a stage; split over its tensor ranks; split over the ranks that share the routed experts."""
NEVER = ""
"""The group of weights that no bit vector names: they keep the 16-bit type, or fp32."""


@dataclass(frozen=True, slots=True)
class Part:
    """``weights`` numbers in rows of ``inputs``, of ``group`` in the bit vector. ``fp32`` ones must not be cast."""

    group: str
    weights: int
    inputs: int
    split: str = RANKS
    fp32: bool = False


@dataclass(frozen=True, slots=True)
class Anatomy:
    """``layers`` [L] of parts, and what stands before the first (``front``) and behind the last one (``back``).

    The draft layers of multi-token prediction and the image tower are kept apart, since an engine may leave them out.
    """

    layers: tuple[tuple[Part, ...], ...]
    front: tuple[Part, ...]
    back: tuple[Part, ...]
    draft: tuple[Part, ...]
    vision: tuple[Part, ...]


def anatomy(model: Model) -> Anatomy:
    """The parts of ``model``, after the module shapes of `transformers` 5.24 `models/glm5_next`; norms are left out."""
    s = model.shapes
    layers = tuple(
        (*(_kda(s) if attention == "kda" else _dsa(s)), *_feed_forward(s, mlp), *_streams(s))
        for attention, mlp in zip(model.attention_kinds, model.mlp_kinds, strict=True)
    )
    hidden, vocabulary = s["hidden_size"], s["vocab_size"] * s["hidden_size"]
    join = Part(NEVER, 2 * hidden * hidden, 2 * hidden, WHOLE)
    draft = (join, *_dsa(s), *_feed_forward(s, "sparse")) * s["mtp_layers"]
    head = () if model.parameters["lm_head"] == 0 else (Part("lm_head", vocabulary, hidden),)
    vision = (Part(NEVER, s["vision_parameters"], hidden),) if s["vision_parameters"] else ()
    return Anatomy(layers, (Part("embedding", vocabulary, hidden),), head, draft, vision)


def _kda(s: Mapping[str, int]) -> tuple[Part, ...]:
    hidden, head = s["hidden_size"], s["linear_head_dim"]
    width = s["linear_num_heads"] * head
    return (
        Part("attention", 3 * hidden * width, hidden),
        Part("attention", hidden * width, width),
        Part(NEVER, 2 * hidden * head, hidden, WHOLE),
        Part(NEVER, hidden * s["linear_num_heads"], hidden),
        Part(NEVER, 2 * head * width + 3 * width * s["linear_conv_kernel_dim"], head),
    )


def _dsa(s: Mapping[str, int]) -> tuple[Part, ...]:
    hidden, heads, rank, query = s["hidden_size"], s["num_attention_heads"], s["kv_lora_rank"], s["q_lora_rank"]
    keys, values, index = s["qk_nope_head_dim"], s["v_head_dim"], s["index_head_dim"]
    indexer = query * s["index_n_heads"] * index + hidden * (2 * index + s["index_n_heads"])
    return (
        Part("attention", hidden * (query + rank), hidden, WHOLE),
        Part("attention", query * heads * keys, query),
        Part("attention", heads * values * hidden, heads * values),
        Part(NEVER, rank * heads * (keys + values), rank),
        Part(NEVER, indexer, hidden, WHOLE),
    )


def _feed_forward(s: Mapping[str, int], kind: str) -> tuple[Part, ...]:
    hidden, inner = s["hidden_size"], s["moe_intermediate_size"]
    if kind == "dense":
        size = hidden * s["intermediate_size"]
        return Part("dense", 2 * size, hidden), Part("dense", size, s["intermediate_size"])
    routed, shared = s["n_routed_experts"] * hidden * inner, s["n_shared_experts"] * hidden * inner
    return (
        Part("experts", 2 * routed, hidden, EXPERTS),
        Part("experts", routed, inner, EXPERTS),
        Part("shared", 2 * shared, hidden),
        Part("shared", shared, inner * max(s["n_shared_experts"], 1)),
        Part(NEVER, s["n_routed_experts"] * hidden, hidden, WHOLE, fp32=True),
    )


def _streams(s: Mapping[str, int]) -> tuple[Part, ...]:
    """The two hyper-connections of a layer."""
    count = s["hc_mult"]
    wide = count * s["hidden_size"]
    return (Part(NEVER, 2 * (count + 2) * count * wide, wide, WHOLE, fp32=True),)
