"""Names of a `glm5_next` checkpoint's tensors, and how one layer is put together from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autotune.runtimes.native import sharded
from autotune.runtimes.native.attention import Indexer, LatentAttention
from autotune.runtimes.native.config import ModelConfig
from autotune.runtimes.native.layout import Place, Share, stage_layers
from autotune.runtimes.native.model import Decoder, Layer, LinearAttention, Recipe, Widths
from autotune.runtimes.native.moe import MLP, Grouped, MoE
from autotune.runtimes.native.quant.linear import Embedding, Linear
from autotune.runtimes.native.weights import Checkpoint

if TYPE_CHECKING:
    from autotune.runtimes.native.collectives import Mesh


class Reader:
    """The tensors of one layer, or this rank's part of them. Shapes are those of the whole."""

    def __init__(self, checkpoint: Checkpoint, index: int, mesh: Mesh | None) -> None:
        self.checkpoint, self.prefix, self.mesh = checkpoint, f"layers.{index}.", mesh
        self.place = mesh.place if mesh is not None else Place()

    def __call__(self, name: str, *shape: int, share: Share | None = None) -> Tensor:
        rows = share.of(shape[0]) if share is not None and share.count > 1 else None
        return self.checkpoint.tensor(self.prefix + name, shape, rows)

    def stack(
        self, names: tuple[str, ...], rows: tuple[int, ...], columns: int, shares: tuple[Share | None, ...]
    ) -> Tensor:
        """Weights that read the same input, one above the other."""
        parts = zip(names, rows, shares, strict=True)
        return torch.cat([self(f"{name}.weight", size, columns, share=share) for name, size, share in parts])

    def back(self, widths: Widths, key: str, name: str, shape: tuple[int, int], share: Share) -> Linear:
        """A weight that reads what a split one made: split by its inputs, and stored as the whole would be."""
        columns = share.of(shape[1]) if share.count > 1 else None
        return widths.linear(key, self(name, *shape), name, columns)

    def summed(self, part: Linear) -> Linear:
        """``part`` of a weight split by its inputs, with the sum over ranks that it needs."""
        return part if self.mesh is None or self.place.layout.tp == 1 else sharded.Summed(part, self.mesh)


def build_decoder(
    config: ModelConfig, checkpoint: Checkpoint, widths: Widths, recipe: Recipe, mesh: Mesh | None = None
) -> Decoder:
    """The decoder, or with a ``mesh`` this rank's part of it, without its pools."""
    place = mesh.place if mesh is not None else Place()
    wide = 2 if widths.compute == "bf16" else 4
    embed = build_embedding(config, checkpoint, widths, mesh)
    indices = stage_layers(config, widths.bits, widths.group, wide, place)
    layers = [build_layer(config, Reader(checkpoint, i, mesh), widths, i, recipe) for i in indices]
    norm = checkpoint.tensor("norm.weight", (config.hidden_size,))
    head = build_head(config, checkpoint, widths, mesh)
    local, read = place.local(config), recipe.kernels["hyper"]
    if mesh is None or place.layout.pp == 1:
        return Decoder(local, embed, layers, norm, head, read)
    return sharded.StagedDecoder(local, embed, layers, norm, head, read).join(mesh, indices.start)


def build_embedding(config: ModelConfig, checkpoint: Checkpoint, widths: Widths, mesh: Mesh | None) -> Any:
    """The token vectors; nothing on a later pipeline stage."""
    place = mesh.place if mesh is not None else Place()
    if not place.first:
        return None
    rows = place.share.of(config.vocab_size)
    table = checkpoint.tensor("embed_tokens.weight", (config.vocab_size, config.hidden_size), rows)
    made = Embedding(table, widths.bits["embedding"], widths.compute, widths.embed_on_host)
    return made if mesh is None or place.layout.tp == 1 else sharded.SplitEmbedding(made, rows.start, mesh)


def build_head(config: ModelConfig, checkpoint: Checkpoint, widths: Widths, mesh: Mesh | None) -> Any:
    """The output projection; nothing on an earlier pipeline stage."""
    place = mesh.place if mesh is not None else Place()
    if not place.last:
        return None
    rows = place.share.of(config.vocab_size)
    weight = checkpoint.tensor("lm_head.weight", (config.vocab_size, config.hidden_size), rows)
    made = widths.linear("lm_head", weight)
    return made if mesh is None or place.layout.tp == 1 else sharded.Gathered(made, mesh)


def build_layer(config: ModelConfig, read: Reader, widths: Widths, index: int, recipe: Recipe) -> Layer:
    """Layer ``index`` with its weights stored at ``widths``."""
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
    inner, mine, kernel = heads * size, read.place.share, config.linear_conv_kernel_dim
    at = "self_attn."
    qkv = read.stack((f"{at}q_proj", f"{at}k_proj", f"{at}v_proj"), (inner,) * 3, hidden, (mine,) * 3)
    gates = read.stack(
        (f"{at}f_a_proj", f"{at}g_a_proj", f"{at}b_proj"), (size, size, heads), hidden, (None, None, mine)
    )
    taps = torch.cat([read(f"{at}{part}_conv1d.weight", inner, 1, kernel, share=mine) for part in "qkv"])
    parts = {
        "qkv": widths.linear(f"{index}.attention", qkv, "qkv"),
        "gates": widths.wide(gates),
        "f_b": widths.wide(read(f"{at}f_b_proj.weight", inner, size, share=mine)),
        "g_b": widths.wide(read(f"{at}g_b_proj.weight", inner, size, share=mine)),
        "o": read.summed(read.back(widths, f"{index}.attention", f"{at}o_proj.weight", (hidden, inner), mine)),
    }
    small = {
        "dt_bias": read(f"{at}dt_bias", inner, share=mine),
        "rate": read(f"{at}A_log", heads, share=mine).exp()[:, None],
        "taps": taps[:, 0].t().contiguous(),
        "o_norm": read(f"{at}o_norm.weight", size),
    }
    return LinearAttention(read.place.local(config), parts, small, recipe)


def _latent_attention(config: ModelConfig, read: Reader, widths: Widths, index: int, recipe: Recipe) -> LatentAttention:
    hidden, heads, rank = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    at, key = "self_attn.", f"{index}.attention"
    front = read.stack((f"{at}q_a_proj", f"{at}kv_a_proj_with_mqa"), (config.q_lora_rank, rank), hidden, (None, None))
    wide, mine = config.qk_nope_head_dim + config.v_head_dim, read.place.share
    queries = read(f"{at}q_b_proj.weight", heads * config.qk_nope_head_dim, config.q_lora_rank, share=mine)
    parts: dict[str, Linear] = {
        "a": widths.linear(key, front, "a"),
        "q_b": widths.linear(key, queries, "q_b"),
        # Never packed: the absorbed form needs it dense, and the form must not change what the model answers.
        "kv_b": widths.wide(read(f"{at}kv_b_proj.weight", heads * wide, rank, share=mine)),
        "o": read.summed(read.back(widths, key, f"{at}o_proj.weight", (hidden, heads * config.v_head_dim), mine)),
    }
    norms = (
        read(f"{at}q_a_layernorm.weight", config.q_lora_rank),
        read(f"{at}kv_a_layernorm.weight", rank),
    )
    local = read.place.local(config)
    attention = LatentAttention(local, parts, norms, recipe.form, recipe.splits, recipe.kernels)
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


def _swiglu(read: Reader, widths: Widths, at: tuple[str, str], sizes: tuple[int, int, float], share: Share) -> MLP:
    """``at``: the widths' key and the tensors' prefix; ``sizes``: hidden, inner, clamp."""
    (key, name), (hidden, inner, limit) = at, sizes
    gate_up = read.stack((f"{name}gate_proj", f"{name}up_proj"), (inner, inner), hidden, (share, share))
    down = read.back(widths, key, f"{name}down_proj.weight", (hidden, inner), share)
    return MLP(widths.linear(key, gate_up, f"{name}gate_up"), down, limit)


def _dense(config: ModelConfig, read: Reader, widths: Widths, index: int) -> MLP:
    sizes = (config.hidden_size, config.intermediate_size, config.swiglu_limit)
    mlp = _swiglu(read, widths, (f"{index}.dense", "mlp."), sizes, read.place.share)
    mlp.down = read.summed(mlp.down)
    return mlp


def _moe(config: ModelConfig, read: Reader, widths: Widths, index: int) -> MoE:
    inner, count, place = config.moe_intermediate_size, config.n_routed_experts, read.place
    sizes = (config.hidden_size, inner, config.swiglu_limit)
    mine = range(count)[place.experts.of(count)]
    experts = [
        _swiglu(read, widths, (f"{index}.experts", f"mlp.experts.{expert}."), sizes, place.inside_experts)
        for expert in mine
    ]
    sizes = (config.hidden_size, inner * config.n_shared_experts, config.swiglu_limit)
    shared = _swiglu(read, widths, (f"{index}.shared", "mlp.shared_experts."), sizes, place.share)
    made = MoE(
        read("mlp.gate.weight", count, config.hidden_size),
        read("mlp.gate.e_score_correction_bias", count),
        Grouped.where_possible(experts) if widths.triton else experts,
        shared,
        config.num_experts_per_tok,
        config.routed_scaling_factor,
    )
    return made if read.mesh is None or place.layout.tp == 1 else sharded.SummedMoE.of(made, read.mesh, mine.start)


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
