"""What each engine stores of a model under one configuration: the native engine, and vLLM's sm80 forks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from autotune.catalogue import GIB
from autotune.memory.parts import NEVER, Anatomy, Part, anatomy
from autotune.memory.ranks import Demand, Ranks, Slab, stages
from autotune.model import Model
from search_spaces import Value, bits
from search_spaces.vllm import CHECKPOINTS, Checkpoint

LANES = 16
KV_BYTES = {"fp32": 4, "bf16": 2, "int8": 1}
FP8_SCALE = 4 / 128**2
GRAPH_BASE, GRAPH_EACH = 1.84 * GIB, 0.0315 * GIB
"""vLLM on 8 A800 with GLM-5.3-Flash: 2.71 GiB of graphs with 32 sequences of 6 tokens, 3.46 GiB with 256, whose
default lists hold 27 and 51 sizes."""
Config = Mapping[str, Value]


def native(model: Model, config: Config) -> Demand:
    """Of our own engine: packed weights with their scales, pools in the types of the knobs, one slot to spare."""
    tp, dp = int(config["tp"]), int(config["dp"])
    ranks = Ranks(tp, int(config["pp"]), dp, tp)
    wide = 2.0 if config["compute"] == "bf16" else 4.0
    group = int(config.get("bits_group_size", 64))

    def stored(widths: Mapping[str, int]) -> Any:
        def each(part: Part, where: str) -> float:
            key = part.group if part.group in bits.MODEL_GROUPS else f"{where}.{part.group}"
            return _native_bytes(part, 16 if part.group == NEVER else widths[key], wide, group)

        return each

    s, size = model.shapes, int(config["block_size"])
    slots, tokens = int(config["max_seqs"]) + 1, (int(config["kv_tokens"]) // size + 1) * size
    kv, tail = _native_kv(s, str(config["kv_dtype"]))
    state = _state(s, KV_BYTES[str(config["state_dtype"])], s["linear_conv_kernel_dim"] - 1, 4) / tp
    each = kv + slots * tail / tokens  # the unfinished group of every slot, spread over the pool's tokens
    whole = anatomy(model)
    layers = _slabs(model, whole, each, state)
    front, back = [Slab("", whole.front)], [Slab("", whole.back)]
    widths = bits.vector(config, model.mlp_kinds)
    found = stages(front, layers, back, ranks, stored(widths))
    kept = other = 0.0
    if config.get("bits_long"):
        second = {k: max(v, int(config["bits_long"])) for k, v in widths.items()}
        changed = {k: v for k, v in second.items() if v != widths[k] and k not in bits.MODEL_GROUPS[:1]}
        other = _second(whole, changed, wide, group)
    if config["prefix_reuse"]:
        blocks = int(config["kv_tokens"]) // size
        most = blocks * state * model.attention_kinds.count("kda") * tp
        kept = min(float(int(config.get("state_cache_mib", 1024)) << 20), most) / ranks.count * dp
    features = {"tokens": float(config["token_budget"]), "seqs": float(config["max_seqs"])}
    return Demand(ranks, found, slots, tokens, kept=kept, second=other, features=features)


def _native_bytes(part: Part, width: int, wide: float, group: int) -> float:
    """Bytes a weight as `runtimes/native/quant` stores it; shapes that a packing does not take stay wider."""
    if part.fp32:
        return 4.0
    row = 4 / part.inputs  # one fp32 scale an output
    if part.group == "embedding":
        return wide if width == 16 else width / 8 + row
    if width == 4 and part.inputs % group == 0:
        return 0.5 + 4 / group
    return 1 + row if width <= 8 and part.inputs % LANES == 0 else wide


def _native_kv(s: Mapping[str, int], dtype: str) -> tuple[float, float]:
    """Bytes a token of one latent layer, and those of a slot's unfinished group of index keys, which is fp32."""
    size, scale = KV_BYTES[dtype], 2 if dtype == "int8" else 0
    kv = s["kv_lora_rank"] * size + scale + (s["index_head_dim"] * size + scale) / s["index_kpool"]
    return kv, s["index_kpool"] * 2 * s["index_head_dim"] * 4.0


def _second(whole: Anatomy, widths: Mapping[str, int], wide: float, group: int) -> float:
    """Bytes of a second copy of the weights in ``widths``; it lives on one rank."""
    total = 0.0
    for index, layer in enumerate(whole.layers):
        for part in layer:
            width = widths.get(f"{index}.{part.group}")
            total += part.weights * _native_bytes(part, width, wide, group) if width else 0.0
    width = widths.get("lm_head")
    return total + sum(p.weights * _native_bytes(p, width, wide, group) for p in whole.back if width)


def _state(s: Mapping[str, int], size: int, columns: int, conv_size: int) -> float:
    """Bytes of one state of one linear-attention layer: the recurrent matrices and ``columns`` of its convolution."""
    width = s["linear_num_heads"] * s["linear_head_dim"]
    return float(width * s["linear_head_dim"] * size + 3 * width * columns * conv_size)


def _slabs(model: Model, whole: Anatomy, kv: float, state: float) -> list[Slab]:
    kinds = zip(whole.layers, model.attention_kinds, strict=True)
    return [
        Slab(str(index), parts, kv=kv if kind == "dsa" else 0.0, state=state if kind == "kda" else 0.0)
        for index, (parts, kind) in enumerate(kinds)
    ]


def vllm(model: Model, config: Config) -> Demand:
    """Of vLLM's sm80 forks: a prepared checkpoint's widths, bf16 latents with 8-bit index keys, states by draft length.

    Routed experts are split over the tensor ranks of all replicas together, whether by columns or (EP) whole.
    """
    checkpoint = CHECKPOINTS[str(config["checkpoint"])]
    tp, pp, dp = (int(config[name]) for name in ("tp", "pp", "dp"))
    ranks = Ranks(tp, pp, dp, tp * dp, int(config.get("dcp", 1)), int(config.get("pp_last_fewer", 0)))
    s, whole = model.shapes, anatomy(model)
    draft = int(config.get("spec_k", 0)) if config["spec_method"] != "none" else 0
    kv = s["kv_lora_rank"] * 2 + (s["index_head_dim"] + 4) / s["index_kpool"]
    # The convolution keeps a column more for each drafted token; a state too, and with prefix caching one again.
    size = 2 if config.get("ssm_dtype") == "bfloat16" else 4
    state = _state(s, size, s["linear_conv_kernel_dim"] - 1 + draft, 2) / tp
    copies = draft + (2 if config["prefix_caching"] else 1)
    layers = _slabs(model, whole, kv, state * copies)
    front = [Slab("", whole.front)]
    if checkpoint.vision and config.get("mm_mode") != "text-only":
        front.append(Slab("", whole.vision))
    back = [Slab("", whole.back)]
    if checkpoint.mtp:
        back.append(Slab("draft", whole.draft, kv=kv * s["mtp_layers"]))
    found = stages(front, layers, back, ranks, lambda part, where: _vllm_bytes(checkpoint, part, where))
    sequences = math.ceil(int(config["max_num_seqs"]) / dp)
    features = {"tokens": float(config["max_num_batched_tokens"]), "seqs": float(sequences)}
    return Demand(ranks, found, sequences, None, graphs=graph_bytes(config), features=features)


def _vllm_bytes(checkpoint: Checkpoint, part: Part, where: str) -> float:
    if part.fp32:
        return 4.0
    name = "mtp" if where == "draft" and part.group == "experts" else part.group
    width = checkpoint.widths.get(name, 16.0)
    if width == 16:
        return 2.0
    return width / 8 + (FP8_SCALE if checkpoint.group == 0 else 2 / checkpoint.group)


def graph_bytes(config: Config) -> float:
    """Memory of captured CUDA graphs by how many batch sizes are captured."""
    if config["cudagraph_mode"] == "NONE":
        return 0.0
    return GRAPH_BASE + GRAPH_EACH * len(capture_sizes(int(config["max_capture_size"])))


def capture_sizes(most: int) -> list[int]:
    """vLLM's list: 1, 2, 4, then steps of 8 below 256 and of 16 from there, up to ``most``."""
    return [n for n in (1, 2, 4, *range(8, 256, 8), *range(256, most + 1, 16)) if n <= most]
