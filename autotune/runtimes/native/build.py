"""Names of a `glm5_next` checkpoint's tensors, and how one layer is put together from them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autotune.runtimes.native.attention import Indexer, LatentAttention
from autotune.runtimes.native.config import ModelConfig
from autotune.runtimes.native.model import Decoder, Layer, LinearAttention, Recipe, Widths
from autotune.runtimes.native.moe import MLP, MoE
from autotune.runtimes.native.quant.linear import Embedding, Linear
from autotune.runtimes.native.weights import Checkpoint


class Reader:
    """The tensors of one layer."""

    def __init__(self, checkpoint: Checkpoint, index: int) -> None:
        self.checkpoint, self.prefix = checkpoint, f"layers.{index}."

    def __call__(self, name: str, *shape: int) -> Tensor:
        return self.checkpoint.tensor(self.prefix + name, shape)

    def stack(self, names: tuple[str, ...], rows: tuple[int, ...], columns: int) -> Tensor:
        """Weights that read the same input, one above the other."""
        return torch.cat([self(f"{name}.weight", size, columns) for name, size in zip(names, rows, strict=True)])


def build_decoder(config: ModelConfig, checkpoint: Checkpoint, widths: Widths, recipe: Recipe) -> Decoder:
    """The whole decoder, without its pools."""
    shape = (config.vocab_size, config.hidden_size)
    embed = Embedding(checkpoint.tensor("embed_tokens.weight", shape), widths.bits["embedding"], widths.compute)
    layers = [build_layer(config, checkpoint, widths, i, recipe) for i in range(config.num_hidden_layers)]
    norm = checkpoint.tensor("norm.weight", (config.hidden_size,))
    head = widths.linear("lm_head", checkpoint.tensor("lm_head.weight", shape))
    return Decoder(config, embed, layers, norm, head, recipe.kernels["hyper"])


def build_layer(config: ModelConfig, checkpoint: Checkpoint, widths: Widths, index: int, recipe: Recipe) -> Layer:
    """Layer ``index`` with its weights stored at ``widths``."""
    read = Reader(checkpoint, index)
    attention: LinearAttention | LatentAttention
    if config.layers[index] == "kda":
        attention = _linear_attention(config, read, widths, index, recipe)
    else:
        attention = _latent_attention(config, read, widths, index, recipe)
    mlp = _dense(config, read, widths, index) if config.mlps[index] == "dense" else _moe(config, read, widths, index)
    hc = [_hyper(config, read, "attn", "input_layernorm"), _hyper(config, read, "ffn", "post_attention_layernorm")]
    return Layer(attention, mlp, hc)


def _linear_attention(config: ModelConfig, read: Reader, widths: Widths, index: int, recipe: Recipe) -> LinearAttention:
    hidden, size, heads = config.hidden_size, config.linear_head_dim, config.linear_num_heads
    inner = heads * size
    at = "self_attn."
    qkv = read.stack((f"{at}q_proj", f"{at}k_proj", f"{at}v_proj"), (inner,) * 3, hidden)
    gates = read.stack((f"{at}f_a_proj", f"{at}g_a_proj", f"{at}b_proj"), (size, size, heads), hidden)
    kernel = config.linear_conv_kernel_dim
    taps = torch.cat([read(f"{at}{part}_conv1d.weight", inner, 1, kernel) for part in "qkv"])
    parts = {
        "qkv": widths.linear(f"{index}.attention", qkv),
        "gates": widths.wide(gates),
        "f_b": widths.wide(read(f"{at}f_b_proj.weight", inner, size)),
        "g_b": widths.wide(read(f"{at}g_b_proj.weight", inner, size)),
        "o": widths.linear(f"{index}.attention", read(f"{at}o_proj.weight", hidden, inner)),
    }
    small = {
        "dt_bias": read(f"{at}dt_bias", inner),
        "rate": read(f"{at}A_log", heads).exp()[:, None],
        "taps": taps[:, 0].t().contiguous(),
        "o_norm": read(f"{at}o_norm.weight", size),
    }
    return LinearAttention(config, parts, small, recipe)


def _latent_attention(config: ModelConfig, read: Reader, widths: Widths, index: int, recipe: Recipe) -> LatentAttention:
    hidden, heads, rank = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    at, key = "self_attn.", f"{index}.attention"
    front = read.stack((f"{at}q_a_proj", f"{at}kv_a_proj_with_mqa"), (config.q_lora_rank, rank), hidden)
    wide = config.qk_nope_head_dim + config.v_head_dim
    parts: dict[str, Linear] = {
        "a": widths.linear(key, front),
        "q_b": widths.linear(key, read(f"{at}q_b_proj.weight", heads * config.qk_nope_head_dim, config.q_lora_rank)),
        # Never packed: the absorbed form needs it dense, and the form must not change what the model answers.
        "kv_b": widths.wide(read(f"{at}kv_b_proj.weight", heads * wide, rank)),
        "o": widths.linear(key, read(f"{at}o_proj.weight", hidden, heads * config.v_head_dim)),
    }
    norms = (
        read(f"{at}q_a_layernorm.weight", config.q_lora_rank),
        read(f"{at}kv_a_layernorm.weight", rank),
    )
    attention = LatentAttention(config, parts, norms, recipe.form, recipe.splits, recipe.kernels)
    attention.indexer = _indexer(config, read, widths)
    return attention


def _indexer(config: ModelConfig, read: Reader, widths: Widths) -> Indexer:
    at, hidden, size, heads = "self_attn.indexer.", config.hidden_size, config.index_head_dim, config.index_n_heads
    keys = torch.cat(
        [
            read(f"{at}wk.weight", size, hidden),
            read(f"{at}index_kpool_compress_gate", size, hidden),
            read(f"{at}weights_proj.weight", heads, hidden),
        ]
    )
    return Indexer(
        query=widths.wide(read(f"{at}wq_b.weight", heads * size, config.q_lora_rank)),
        keys=widths.wide(keys),
        norm=(read(f"{at}k_norm.weight", size), read(f"{at}k_norm.bias", size)),
        ape=read(f"{at}index_kpool_compress_ape", config.index_kpool, size),
        heads=heads,
        size=size,
        top=config.index_topk,
        kpool=config.index_kpool,
    )


def _swiglu(config: ModelConfig, read: Reader, widths: Widths, key: str, name: str, inner: int) -> MLP:
    hidden = config.hidden_size
    gate_up = read.stack((f"{name}gate_proj", f"{name}up_proj"), (inner, inner), hidden)
    down = read(f"{name}down_proj.weight", hidden, inner)
    return MLP(widths.linear(key, gate_up), widths.linear(key, down), config.swiglu_limit)


def _dense(config: ModelConfig, read: Reader, widths: Widths, index: int) -> MLP:
    return _swiglu(config, read, widths, f"{index}.dense", "mlp.", config.intermediate_size)


def _moe(config: ModelConfig, read: Reader, widths: Widths, index: int) -> MoE:
    inner, count = config.moe_intermediate_size, config.n_routed_experts
    experts = [
        _swiglu(config, read, widths, f"{index}.experts", f"mlp.experts.{expert}.", inner) for expert in range(count)
    ]
    shared = _swiglu(config, read, widths, f"{index}.shared", "mlp.shared_experts.", inner * config.n_shared_experts)
    return MoE(
        read("mlp.gate.weight", count, config.hidden_size),
        read("mlp.gate.e_score_correction_bias", count),
        experts,
        shared,
        config.num_experts_per_tok,
        config.routed_scaling_factor,
    )


def _hyper(config: ModelConfig, read: Reader, kind: str, norm: str) -> tuple[Any, ...]:
    """The arguments of `kernels.hyper` after the streams; all fp32."""
    count = config.hc_mult
    total = (2 + count) * count
    parts = torch.tensor([count, count, count * count])
    return (
        read(f"hc_{kind}_fn", total, count * config.hidden_size),
        read(f"hc_{kind}_base", total),
        read(f"hc_{kind}_scale", 3).repeat_interleave(parts),
        read(f"{norm}.weight", config.hidden_size),
        (config.hc_sinkhorn_iters, config.hc_eps, config.rms_norm_eps),
    )
