"""The shape of a `glm5_next` text decoder, read from config.json and checked. Knows nothing of weights."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

KINDS = {"linear_attention": "kda", "indexed_attention": "dsa", "full_attention": "dsa"}


class CheckpointError(ValueError):
    """A model folder that cannot be loaded; the message names the file, the key or tensor, and what to do."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes in the words of the Hugging Face config. ``layers`` are ``kda`` or ``dsa``, ``mlps`` dense or sparse."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    v_head_dim: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    routed_scaling_factor: float
    swiglu_limit: float
    index_topk: int
    index_head_dim: int
    index_n_heads: int
    index_kpool: int
    linear_head_dim: int
    linear_num_heads: int
    linear_conv_kernel_dim: int
    linear_lower_bound: float
    hc_mult: int
    hc_eps: float
    hc_sinkhorn_iters: int
    rms_norm_eps: float
    layers: tuple[str, ...]
    mlps: tuple[str, ...]
    eos: tuple[int, ...]


DEFAULTS: Mapping[str, Any] = {"n_shared_experts": 1, "hc_mult": 4, "hc_eps": 1e-6, "hc_sinkhorn_iters": 20}


def read_config(folder: Path) -> ModelConfig:
    """Read ``folder/config.json``. Raises CheckpointError."""
    file = folder / "config.json"
    try:
        whole = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}; give --model a checkpoint folder") from None
    except ValueError as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from None
    text = whole.get("text_config", whole) if isinstance(whole, dict) else None
    if not isinstance(text, dict):
        raise CheckpointError(f"{file}: the whole and its text_config must be JSON objects")
    kind = str(text.get("model_type", whole.get("model_type", "")))
    if kind not in ("glm5_next_text", "glm5_next"):
        raise CheckpointError(f"{file}: model_type is {kind!r}; the native engine runs glm5_next only")
    return _checked(file, text, whole)


def _checked(file: Path, text: Mapping[str, Any], whole: Mapping[str, Any]) -> ModelConfig:
    linear = _kind(file, "linear_attn_config", text.get("linear_attn_config") or {}, dict)
    renamed = {
        "linear_head_dim": linear.get("head_dim"),
        "linear_num_heads": linear.get("num_heads"),
        "linear_conv_kernel_dim": linear.get("short_conv_kernel_size"),
        "linear_lower_bound": linear.get("gate_lower_bound"),
    }
    values: dict[str, Any] = {}
    for field in fields(ModelConfig):
        if field.name in ("layers", "mlps", "eos"):
            continue
        value = text.get(field.name)
        if value is None:
            value = renamed.get(field.name)
        if value is None:
            value = DEFAULTS.get(field.name)
        if value is None:
            trap = " (libraries take 16 without it, the released model uses 4)" if field.name == "index_kpool" else ""
            raise CheckpointError(f"{file}: key {field.name} is missing{trap}")
        values[field.name] = _number(file, field.name, value, field.type == "int")
    count = values["num_hidden_layers"]
    usual = ["indexed_attention" if i % 4 == 3 else "linear_attention" for i in range(count)]
    layers = _kind(file, "layer_types", text.get("layer_types") or usual, list)
    dense = _kind(file, "first_k_dense_replace", text.get("first_k_dense_replace", 3), int)
    by_depth = ["dense" if i < dense else "sparse" for i in range(count)]
    mlps = _kind(file, "mlp_layer_types", text.get("mlp_layer_types") or by_depth, list)
    unknown = [k for k in layers if k not in [*KINDS]] + [k for k in mlps if k not in ["dense", "sparse"]]
    if len(layers) != count or len(mlps) != count or unknown:
        raise CheckpointError(f"{file}: layer_types and mlp_layer_types must name {count} layers of known kinds")
    _refuse(file, text, values)
    eos = text.get("eos_token_id", whole.get("eos_token_id"))
    several = eos if isinstance(eos, list) else [] if eos is None else [eos]
    ends = tuple(_kind(file, "eos_token_id", end, int) for end in several)
    return ModelConfig(**values, layers=tuple(KINDS[k] for k in layers), mlps=tuple(mlps), eos=ends)


def _kind(file: Path, name: str, value: Any, kind: type) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise CheckpointError(f"{file}: {name} must be of type {kind.__name__}, not {value!r}")
    return value


def _number(file: Path, name: str, value: Any, whole: bool) -> int | float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or (whole and value != int(value)):
        raise CheckpointError(f"{file}: {name} must be a number, not {value!r}")
    if name == "linear_lower_bound":
        if not -5.0 <= value < 0:
            raise CheckpointError(f"{file}: linear_lower_bound {value} is outside [-5, 0), which fp32 decay needs")
    elif not 0 < value <= 2**31:
        raise CheckpointError(f"{file}: {name} = {value} is not a possible size")
    return int(value) if whole else float(value)


def _refuse(file: Path, text: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Variants of the architecture that this engine does not compute must never be run as if it did."""
    wrong = [
        (text.get("qk_rope_head_dim", 0) != 0, "qk_rope_head_dim must be 0 (the released model has no rotary part)"),
        (text.get("n_group", 1) != 1, "n_group must be 1"),
        (text.get("attention_bias", False), "attention_bias must be false"),
        ("shared" in (text.get("indexer_types") or ()), "indexer_types must all be full"),
        (not text.get("index_kpool_always_select_tail", True), "index_kpool_always_select_tail must be true"),
        (not text.get("norm_topk_prob", True), "norm_topk_prob must be true"),
        (values["index_topk"] % values["index_kpool"] != 0, "index_topk must be a multiple of index_kpool"),
        (values["num_experts_per_tok"] > values["n_routed_experts"], "more experts a token than there are"),
    ]
    for bad, sentence in wrong:
        if bad:
            raise CheckpointError(f"{file}: {sentence}")
