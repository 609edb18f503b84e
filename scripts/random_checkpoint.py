"""Writes a `glm5_next` text checkpoint of any size with random weights, for studies of speed.

Its answers mean nothing; never publish its quality. `python scripts/random_checkpoint.py FOLDER --hidden 2048`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HEAD, KERNEL, STREAMS, KPOOL, INDEX = 128, 4, 4, 4, 64


def text_config(hidden: int, layers: int, experts: int, top: int) -> dict[str, Any]:
    """The sizes in the real model's proportions: 3 KDA layers, then a sparse-attention one; one dense layer first."""
    return {
        "model_type": "glm5_next_text",
        "vocab_size": 512,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "moe_intermediate_size": hidden // 2,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // HEAD,
        "num_key_value_heads": hidden // HEAD,
        "q_lora_rank": 3 * hidden // 8,
        "kv_lora_rank": hidden // 8,
        "qk_nope_head_dim": HEAD,
        "qk_rope_head_dim": 0,
        "v_head_dim": HEAD,
        "n_routed_experts": experts,
        "num_experts_per_tok": top,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "swiglu_limit": 10.0,
        "index_topk": 512,
        "index_kpool": KPOOL,
        "index_head_dim": INDEX,
        "index_n_heads": 8,
        "linear_head_dim": HEAD,
        "linear_num_heads": hidden // HEAD,
        "linear_conv_kernel_dim": KERNEL,
        "linear_lower_bound": -5.0,
        "hc_mult": STREAMS,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "rms_norm_eps": 1e-5,
        "first_k_dense_replace": 1,
        "layer_types": ["indexed_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)],
        "mlp_layer_types": ["dense" if i < 1 else "sparse" for i in range(layers)],
        "eos_token_id": 0,
    }


def shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of the decoder by name."""
    hidden = c["hidden_size"]
    found: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (c["vocab_size"], hidden), "norm.weight": (hidden,)}
    for i, (kind, mlp) in enumerate(zip(c["layer_types"], c["mlp_layer_types"], strict=True)):
        layer = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
        total = (2 + STREAMS) * STREAMS
        for part in ("attn", "ffn"):
            layer |= {f"hc_{part}_fn": (total, STREAMS * hidden), f"hc_{part}_base": (total,), f"hc_{part}_scale": (3,)}
        attention = linear_attention(c) if kind == "linear_attention" else sparse_attention(c)
        layer |= {f"self_attn.{name}": shape for name, shape in attention.items()}
        layer |= swiglu("mlp.", hidden, c["intermediate_size"]) if mlp == "dense" else mixture(c)
        found |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    return {f"model.language_model.{name}": shape for name, shape in found.items()} | {
        "lm_head.weight": (c["vocab_size"], hidden)
    }


def linear_attention(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads = c["hidden_size"], c["linear_num_heads"]
    inner = heads * HEAD
    found: dict[str, tuple[int, ...]] = {f"{part}_proj.weight": (inner, hidden) for part in "qkv"}
    found |= {f"{part}_conv1d.weight": (inner, 1, KERNEL) for part in "qkv"}
    found |= {f"{part}_a_proj.weight": (HEAD, hidden) for part in "fg"}
    found |= {f"{part}_b_proj.weight": (inner, HEAD) for part in "fg"}
    return found | {
        "b_proj.weight": (heads, hidden), "dt_bias": (inner,), "A_log": (heads,),
        "o_norm.weight": (HEAD,), "o_proj.weight": (hidden, inner),
    }  # fmt: skip


def sparse_attention(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads, q, kv = c["hidden_size"], c["num_attention_heads"], c["q_lora_rank"], c["kv_lora_rank"]
    return {
        "q_a_proj.weight": (q, hidden), "q_a_layernorm.weight": (q,), "q_b_proj.weight": (heads * HEAD, q),
        "kv_a_proj_with_mqa.weight": (kv, hidden), "kv_a_layernorm.weight": (kv,),
        "kv_b_proj.weight": (2 * heads * HEAD, kv), "o_proj.weight": (hidden, heads * HEAD),
        "indexer.wq_b.weight": (c["index_n_heads"] * INDEX, q), "indexer.wk.weight": (INDEX, hidden),
        "indexer.k_norm.weight": (INDEX,), "indexer.k_norm.bias": (INDEX,),
        "indexer.weights_proj.weight": (c["index_n_heads"], hidden),
        "indexer.index_kpool_compress_ape": (KPOOL, INDEX), "indexer.index_kpool_compress_gate": (INDEX, hidden),
    }  # fmt: skip


def swiglu(prefix: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}gate_proj.weight": (inner, hidden),
        f"{prefix}up_proj.weight": (inner, hidden),
        f"{prefix}down_proj.weight": (hidden, inner),
    }


def mixture(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, count = c["hidden_size"], c["moe_intermediate_size"], c["n_routed_experts"]
    found: dict[str, tuple[int, ...]] = {
        "mlp.gate.weight": (count, hidden),
        "mlp.gate.e_score_correction_bias": (count,),
    }
    for expert in range(count):
        found |= swiglu(f"mlp.experts.{expert}.", hidden, inner)
    return found | swiglu("mlp.shared_experts.", hidden, inner)


def filled(name: str, shape: tuple[int, ...]) -> Tensor:
    """Values that keep activations of order one."""
    if "norm.weight" in name:
        return torch.ones(shape)
    if len(shape) == 1 or "hc_" in name:
        return torch.randn(shape) * 0.02
    return torch.randn(shape) * shape[-1] ** -0.5


def write(folder: Path, hidden: int, layers: int = 4, experts: int = 8, top: int = 2, seed: int = 0) -> None:
    """Write config.json and model.safetensors (bf16; hyper-connections fp32) into ``folder``."""
    torch.manual_seed(seed)
    config = text_config(hidden, layers, experts, top)
    folder.mkdir(parents=True, exist_ok=True)
    document = {"architectures": ["Glm5NextForConditionalGeneration"], "model_type": "glm5_next", "text_config": config}
    (folder / "config.json").write_text(json.dumps(document, indent=2))
    wide = ("hc_", "conv1d", "A_log", "dt_bias", "mlp.gate.")
    tensors = {
        name: filled(name, shape).to(torch.float32 if any(part in name for part in wide) else torch.bfloat16)
        for name, shape in shapes(config).items()
    }
    save_file(tensors, str(folder / "model.safetensors"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=8)
    options = parser.parse_args()
    write(options.folder, options.hidden, options.layers, options.experts)
