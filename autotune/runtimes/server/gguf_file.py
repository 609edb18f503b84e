"""Writes a `glm5_next` checkpoint as a GGUF file of architecture ``glm5-next``, each weight in the type asked for.

Names and keys are those that llama.cpp b11549 reads; the types of a written file are read back by `types`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from autotune.runtimes.native.config import ModelConfig, read_config
from autotune.runtimes.native.weights import Checkpoint

ARCHITECTURE = "glm5-next"
TYPES = ("f32", "f16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
"""Types that `gguf` itself can write; K-quants need rows of whole 256 values and are written by llama.cpp alone."""
GROUPS = {
    "lm_head": r"output\.weight",
    "embedding": r"token_embd\.weight",
    "experts": r"blk\.\d+\.ffn_\w+_exps\.weight",
    "shared": r"blk\.\d+\.ffn_\w+_shexp\.weight",
    "dense": r"blk\.\d+\.ffn_(gate|up|down)\.weight",
    "attention": r"blk\.\d+\.attn_(q|k|v|output|q_a|q_b|kv_a_mqa|k_b|v_b)\.weight",
}
"""Tensors that may be narrow, by group. Vectors, routers, gates, indexers and hyper-connections stay in fp32."""
Array = NDArray[np.float32]
Pick = Callable[[int, str], str]
"""The type of a weight by its layer (-1: of the whole model) and group."""
Read = Callable[..., Array]


def write(folder: Path, file: Path, pick: Pick) -> None:
    """Write the checkpoint in ``folder`` to ``file``. Raises CheckpointError, or ValueError for a type unknown here."""
    config, checkpoint = read_config(folder), Checkpoint(folder)
    writer = gguf.GGUFWriter(file, ARCHITECTURE)
    for name, value in _facts(config).items():
        add = getattr(writer, f"add_{_kind(value)}")
        add(f"{ARCHITECTURE}.{name}", value)
    _vocabulary(writer, folder, config)
    writer.add_name(folder.name)
    for name, tensor in _tensors(config, checkpoint):
        layer, group = place(name)
        kind = gguf.GGMLQuantizationType[(pick(layer, group) if group else "f32").upper()]
        data = gguf.quants.quantize(np.ascontiguousarray(tensor), kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    partial = file.with_suffix(".partial")
    writer.write_header_to_file(partial)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.replace(file)


def place(name: str) -> tuple[int, str]:
    """The layer (-1: of the whole model) and the group of a tensor; no group for what is never narrow."""
    group = next((group for group, pattern in GROUPS.items() if re.fullmatch(pattern, name)), "")
    return (int(name.split(".")[1]) if name.startswith("blk.") else -1), group


def types(file: Path) -> dict[str, str]:
    """{tensor: its type} of a GGUF file."""
    return {tensor.name: tensor.tensor_type.name.lower() for tensor in gguf.GGUFReader(file).tensors}


def _kind(value: Any) -> str:
    return {bool: "bool", int: "uint32", float: "float32", list: "array"}[type(value)]


def _facts(c: ModelConfig) -> dict[str, Any]:
    layers = c.num_hidden_layers
    return {
        "block_count": layers,
        "context_length": 1 << 20,
        "vocab_size": c.vocab_size,
        "embedding_length": c.hidden_size,
        "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_attention_heads,
        "attention.head_count_kv": [int(kind == "dsa") for kind in c.layers],
        "attention.layer_norm_rms_epsilon": c.rms_norm_eps,
        "attention.layer_norm_epsilon": 1e-6,
        "attention.q_lora_rank": c.q_lora_rank,
        "attention.kv_lora_rank": c.kv_lora_rank,
        "attention.key_length": c.kv_lora_rank,  # what is cached: the latent
        "attention.value_length": c.kv_lora_rank,
        "attention.key_length_mla": c.qk_nope_head_dim,
        "attention.value_length_mla": c.v_head_dim,
        "attention.indexer.head_count": c.index_n_heads,
        "attention.indexer.key_length": c.index_head_dim,
        "attention.indexer.top_k": c.index_topk,
        "attention.indexer.kpool": c.index_kpool,
        "attention.indexer.kpool_select_tail": True,
        "attention.indexer.types": [True] * layers,
        "rope.dimension_count": 0,
        "ssm.conv_kernel": c.linear_conv_kernel_dim,
        "kda.head_dim": c.linear_head_dim,
        "kda.gate_lower_bound": c.linear_lower_bound,
        "hyper_connection.count": c.hc_mult,
        "hyper_connection.sinkhorn_iterations": c.hc_sinkhorn_iters,
        "hyper_connection.epsilon": c.hc_eps,
        "leading_dense_block_count": sum(kind == "dense" for kind in c.mlps),
        "expert_count": c.n_routed_experts,
        "expert_used_count": c.num_experts_per_tok,
        "expert_group_count": 1,
        "expert_group_used_count": 1,
        "expert_gating_func": 2,  # sigmoid
        "expert_feed_forward_length": c.moe_intermediate_size,
        "expert_shared_count": c.n_shared_experts,
        "expert_weights_scale": c.routed_scaling_factor,
        "expert_weights_norm": True,
        "swiglu_clamp_exp": [c.swiglu_limit] * layers,
        "swiglu_clamp_shexp": [c.swiglu_limit] * layers,
    }


def _vocabulary(writer: gguf.GGUFWriter, folder: Path, config: ModelConfig) -> None:
    """The tokens as a byte-level BPE without the merges: prompts are sent as ids, and only answers become text."""
    table = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    words = {number: word for word, number in table["model"]["vocab"].items()}
    special = {token["id"]: token["content"] for token in table["added_tokens"]}
    normal, control, unused = (int(gguf.TokenType[name]) for name in ("NORMAL", "CONTROL", "UNUSED"))
    known = {number: (word, normal) for number, word in words.items()}
    known |= {number: (word, control) for number, word in special.items()}
    tokens = [known.get(number, (f"<|unused{number}|>", unused)) for number in range(config.vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([word for word, _ in tokens])
    writer.add_token_types([kind for _, kind in tokens])
    writer.add_token_merges(["a b"])  # an empty list cannot be written; this one joins nothing that is a token
    writer.add_eos_token_id(config.eos[0])
    writer.add_add_bos_token(False)


def _tensors(c: ModelConfig, checkpoint: Checkpoint) -> Iterator[tuple[str, Array]]:
    """Every tensor under llama.cpp's name, in fp32."""

    def read(name: str, *shape: int) -> Array:
        found: Array = checkpoint.tensor(name, shape).numpy()
        return found

    yield "output.weight", read("lm_head.weight", c.vocab_size, c.hidden_size)
    yield "token_embd.weight", read("embed_tokens.weight", c.vocab_size, c.hidden_size)
    yield "output_norm.weight", read("norm.weight", c.hidden_size)
    for layer, (attention, mlp) in enumerate(zip(c.layers, c.mlps, strict=True)):

        def of(name: str, *shape: int, prefix: str = f"layers.{layer}.") -> Array:
            return read(prefix + name, *shape)

        streams = c.hc_mult * (2 + c.hc_mult)
        parts = {
            "attn_norm.weight": of("input_layernorm.weight", c.hidden_size),
            "ffn_norm.weight": of("post_attention_layernorm.weight", c.hidden_size),
        }
        for half in ("attn", "ffn"):
            parts[f"hc_{half}_base.weight"] = of(f"hc_{half}_base", streams)
            parts[f"hc_{half}_scale.weight"] = of(f"hc_{half}_scale", 3)
            parts[f"hc_{half}_fn.weight"] = of(f"hc_{half}_fn", streams, c.hc_mult * c.hidden_size)
        parts |= _kda(c, of) if attention == "kda" else _dsa(c, of)
        parts |= _gated(of, "mlp.", "", c.hidden_size, c.intermediate_size) if mlp == "dense" else _sparse(c, of)
        for name, tensor in parts.items():
            yield f"blk.{layer}.{name}", tensor


def _kda(c: ModelConfig, of: Read) -> dict[str, Array]:
    heads, head, hidden = c.linear_num_heads, c.linear_head_dim, c.hidden_size
    width = heads * head
    found = {
        f"{name}.weight": of(f"self_attn.{theirs}.weight", rows, columns)
        for name, theirs, rows, columns in (
            ("attn_q", "q_proj", width, hidden), ("attn_k", "k_proj", width, hidden),
            ("attn_v", "v_proj", width, hidden), ("attn_output", "o_proj", hidden, width),
            ("ssm_beta", "b_proj", heads, hidden), ("ssm_f_a", "f_a_proj", head, hidden),
            ("ssm_g_a", "g_a_proj", head, hidden), ("ssm_f_b", "f_b_proj", width, head),
            ("ssm_g_b", "g_b_proj", width, head),
        )
    }  # fmt: skip
    for name in "qkv":
        convolution = of(f"self_attn.{name}_conv1d.weight", width, 1, c.linear_conv_kernel_dim)
        found[f"ssm_conv1d_{name}.weight"] = convolution[None]
    found["ssm_norm.weight"] = of("self_attn.o_norm.weight", head)
    found["ssm_dt.bias"] = of("self_attn.dt_bias", width)
    found["ssm_a"] = -np.exp(of("self_attn.A_log", heads))
    return found


def _dsa(c: ModelConfig, of: Read) -> dict[str, Array]:
    heads, nope, hidden = c.num_attention_heads, c.qk_nope_head_dim, c.hidden_size
    size, n = c.index_head_dim, c.index_n_heads
    found = {
        name: of(f"self_attn.{theirs}", *shape)
        for name, theirs, shape in (
            ("attn_q_a.weight", "q_a_proj.weight", (c.q_lora_rank, hidden)),
            ("attn_q_b.weight", "q_b_proj.weight", (heads * nope, c.q_lora_rank)),
            ("attn_kv_a_mqa.weight", "kv_a_proj_with_mqa.weight", (c.kv_lora_rank, hidden)),
            ("attn_output.weight", "o_proj.weight", (hidden, heads * c.v_head_dim)),
            ("attn_kv_a_norm.weight", "kv_a_layernorm.weight", (c.kv_lora_rank,)),
            ("attn_q_a_norm.weight", "q_a_layernorm.weight", (c.q_lora_rank,)),
            ("indexer_compressor_ape.weight", "indexer.index_kpool_compress_ape", (c.index_kpool, size)),
            ("indexer_compressor_gate.weight", "indexer.index_kpool_compress_gate", (size, hidden)),
            ("indexer.k_norm.weight", "indexer.k_norm.weight", (size,)),
            ("indexer.k_norm.bias", "indexer.k_norm.bias", (size,)),
            ("indexer.proj.weight", "indexer.weights_proj.weight", (n, hidden)),
            ("indexer.attn_k.weight", "indexer.wk.weight", (size, hidden)),
            ("indexer.attn_q_b.weight", "indexer.wq_b.weight", (n * size, c.q_lora_rank)),
        )
    }
    both = of("self_attn.kv_b_proj.weight", heads * (nope + c.v_head_dim), c.kv_lora_rank)
    both = both.reshape(heads, nope + c.v_head_dim, c.kv_lora_rank)
    found["attn_k_b.weight"] = both[:, :nope].transpose(0, 2, 1)
    found["attn_v_b.weight"] = both[:, nope:]
    return found


def _sparse(c: ModelConfig, of: Read) -> dict[str, Array]:
    inner, hidden = c.moe_intermediate_size, c.hidden_size

    def experts(name: str, *shape: int) -> Array:
        return np.stack([of(name.replace("*", str(e)), *shape) for e in range(c.n_routed_experts)])

    return {
        **_gated(experts, "mlp.experts.*.", "_exps", hidden, inner),
        **_gated(of, "mlp.shared_experts.", "_shexp", hidden, inner * c.n_shared_experts),
        "ffn_gate_inp.weight": of("mlp.gate.weight", c.n_routed_experts, hidden),
        "exp_probs_b.bias": of("mlp.gate.e_score_correction_bias", c.n_routed_experts),
    }


def _gated(of: Read, prefix: str, suffix: str, hidden: int, inner: int) -> dict[str, Array]:
    shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    return {f"ffn_{part}{suffix}.weight": of(f"{prefix}{part}_proj.weight", *s) for part, s in shapes.items()}
