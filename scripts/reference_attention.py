"""The two attentions of the reference network: Kimi delta attention and pooled sparse attention with its indexer.

Knows one layer's attention and how the indexer learns; knows nothing of streams, experts or training.
"""

from __future__ import annotations

import math

import reference_fused as fused
import torch
import torch.nn.functional as F
from reference_fused import CHUNK
from reference_shape import Norm, Shape, linear, product
from torch import Tensor, nn


class ForgetGate(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.linear_num_heads * shape.linear_head_dim
        self.f_a_proj = linear(shape.hidden_size, shape.linear_head_dim)
        self.f_b_proj = linear(shape.linear_head_dim, width)
        # the inverse sigmoid of decays between 1/1000 and 1/3 of the bound: memories of a byte up to a paragraph
        rate = torch.empty(width).uniform_(math.log(1e-3), math.log(0.3)).exp()
        self.dt_bias = nn.Parameter(torch.log(rate / (1 - rate)))
        self.A_log = nn.Parameter(torch.zeros(shape.linear_num_heads))
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        """Log decay per channel, [T, heads, head size], between the lower bound and 0."""
        raw = product(product(x, self.f_a_proj.weight), self.f_b_proj.weight).float() + self.dt_bias
        raw = raw.view(-1, self.shape.linear_num_heads, self.shape.linear_head_dim)
        return self.shape.linear_lower_bound * torch.sigmoid(self.A_log.exp()[:, None] * raw)


def delta_rule(qkv: Tensor, decay: Tensor, beta: Tensor, size: int) -> Tensor:
    """Kimi delta attention over chunks of 16: one triangular solve a chunk, then a scan over chunk states.

    ``qkv`` [N, S, 3 d] after convolution and SiLU, ``decay`` [N, S, d] logarithms, ``beta`` [N, S]; returns [N, S, d].
    """
    n, length, _ = decay.shape
    chunks = length // CHUNK
    # flat in sequences and chunks: the compiled piece then has one shape for every sequence length
    parts = fused.prepare_chunks(
        qkv.reshape(-1, CHUNK, 3 * size), decay.reshape(-1, CHUNK, size), beta.reshape(-1, CHUNK), size
    )
    q_up, kb_up, k_down, v, q_whole, kb_whole, k_rest = (part.view(n, chunks, CHUNK, size) for part in parts)
    mixing = (kb_up @ k_down.mT).tril(-1)
    inside = (q_up @ k_down.mT).tril()
    solved = torch.linalg.solve_triangular(mixing, torch.cat([v, kb_whole], -1), upper=False, unitriangular=True)
    fresh, stale = solved.split(size, -1)
    end = torch.exp(decay.reshape(n, chunks, CHUNK, -1).sum(-2))[..., None]
    state = torch.zeros(n, size, size)
    outputs = []
    for fresh_i, stale_i, q_i, k_i, inside_i, end_i in zip(
        *(x.unbind(1) for x in (fresh, stale, q_whole, k_rest, inside, end)), strict=True
    ):
        new = torch.baddbmm(fresh_i, stale_i, state, alpha=-1)
        outputs.append(torch.baddbmm(torch.bmm(inside_i, new), q_i, state))
        state = torch.baddbmm(state * end_i, k_i.mT, new)
    return torch.stack(outputs, 1).view(n, length, size)


class LinearAttention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        hidden, size = shape.hidden_size, shape.linear_head_dim
        width = shape.linear_num_heads * size
        self.q_proj, self.k_proj, self.v_proj = (linear(hidden, width) for _ in range(3))
        self.conv1d = nn.Conv1d(3 * width, 3 * width, shape.linear_conv_kernel_dim, groups=3 * width, bias=False)
        self.forget_gate = ForgetGate(shape)
        self.b_proj = linear(hidden, shape.linear_num_heads)
        self.g_a_proj, self.g_b_proj = linear(hidden, size), linear(size, width)
        self.o_norm = Norm(size, shape.rms_norm_eps)
        self.o_proj = linear(width, hidden)

    def forward(self, x: Tensor, batch: int) -> Tensor:
        heads, size = self.shape.linear_num_heads, self.shape.linear_head_dim
        length = x.shape[0] // batch
        weight = torch.cat([self.q_proj.weight, self.k_proj.weight, self.v_proj.weight])
        mixed = fused.convolve_taps(product(x, weight).view(batch, length, -1), self.conv1d.weight[:, 0])
        # [batch, length, 3, heads, size] -> [batch * heads, length, 3 * size]
        qkv = mixed.view(batch, length, 3, heads, size).permute(0, 3, 1, 2, 4).reshape(batch * heads, length, 3 * size)
        decay = self.forget_gate(x).view(batch, length, heads, size).transpose(1, 2).reshape(-1, length, size)
        beta = torch.sigmoid(product(x, self.b_proj.weight).float())
        beta = beta.view(batch, length, heads).transpose(1, 2).reshape(-1, length)
        out = delta_rule(qkv, decay, beta, size).view(batch, heads, length, size).transpose(1, 2)
        gate = product(product(x, self.g_a_proj.weight), self.g_b_proj.weight)
        normed = fused.norm_and_gate(out.reshape(-1, size), gate.view(-1, size), self.o_norm.weight)
        return product(normed.view(-1, heads * size), self.o_proj.weight)


class Indexer(nn.Module):
    """Scores pools of four keys for each query (DeepSeek sparse attention with pooled keys)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        size = shape.index_head_dim
        self.wq_b = linear(shape.q_lora_rank, shape.index_n_heads * size)
        self.wk = linear(shape.hidden_size, size)
        self.k_norm = nn.LayerNorm(size, eps=1e-6)
        self.weights_proj = linear(shape.hidden_size, shape.index_n_heads)
        self.index_kpool_compress_ape = nn.Parameter(torch.zeros(shape.index_kpool, size))
        self.index_kpool_compress_gate = nn.Parameter(
            torch.randn(size, shape.hidden_size) * 0.6 / shape.hidden_size**0.5
        )

    def forward(self, x: Tensor, query: Tensor, batch: int) -> Tensor:
        """Scores [batch, length, pools]; a pool is visible once its last key is."""
        shape, length = self.shape, x.shape[0] // batch
        q = product(query, self.wq_b.weight).float().view(batch, length * shape.index_n_heads, -1)
        k = self.k_norm(product(x, self.wk.weight).float())
        logits = product(x, self.index_kpool_compress_gate).float()
        pooled = (batch, length // shape.index_kpool, shape.index_kpool, -1)
        share = (logits.view(pooled) + self.index_kpool_compress_ape).softmax(2)
        keys = (share * k.view(pooled)).sum(2)
        scores = F.relu(q @ keys.mT * shape.index_head_dim**-0.5).view(batch, length, shape.index_n_heads, -1)
        weights = product(x, self.weights_proj.weight).float().view(batch, length, 1, -1) * shape.index_n_heads**-0.5
        return (weights @ scores)[:, :, 0]


class SparseAttention(nn.Module):
    """Multi-head latent attention without positions, over the pools that the indexer selects."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        hidden, heads = shape.hidden_size, shape.num_attention_heads
        self.q_a_proj = linear(hidden, shape.q_lora_rank)
        self.q_a_layernorm = Norm(shape.q_lora_rank, shape.rms_norm_eps)
        self.q_b_proj = linear(shape.q_lora_rank, heads * shape.qk_nope_head_dim)
        self.kv_a_proj_with_mqa = linear(hidden, shape.kv_lora_rank)
        self.kv_a_layernorm = Norm(shape.kv_lora_rank, shape.rms_norm_eps)
        self.kv_b_proj = linear(shape.kv_lora_rank, heads * (shape.qk_nope_head_dim + shape.v_head_dim))
        self.o_proj = linear(heads * shape.v_head_dim, hidden)
        self.indexer = Indexer(shape)

    def forward(self, x: Tensor, batch: int, sparse: bool) -> tuple[Tensor, Tensor]:
        """Output [T, D] and the indexer's loss; ``sparse`` restricts each query to the pools that the indexer picks."""
        shape, length, heads = self.shape, x.shape[0] // batch, self.shape.num_attention_heads
        query = self.q_a_layernorm(product(x, self.q_a_proj.weight))
        latent = self.kv_a_layernorm(product(x, self.kv_a_proj_with_mqa.weight))
        q = product(query, self.q_b_proj.weight).view(batch, length, heads, -1).transpose(1, 2)
        kv = product(latent, self.kv_b_proj.weight).view(batch, length, heads, -1).transpose(1, 2)
        k, v = kv.split([shape.qk_nope_head_dim, shape.v_head_dim], -1)
        scores = (q @ k.mT).float() * shape.qk_nope_head_dim**-0.5
        index = self.indexer(x.detach(), query.detach(), batch)
        position = torch.arange(length)
        pool_end = torch.arange(length // shape.index_kpool) * shape.index_kpool + shape.index_kpool - 1
        visible = pool_end <= position[:, None]  # [length, pools]
        index = index.masked_fill(~visible, -1e30)
        allowed = position <= position[:, None]
        if sparse:
            chosen = torch.zeros_like(index, dtype=torch.bool)
            chosen.scatter_(-1, index.topk(min(shape.index_topk // shape.index_kpool, index.shape[-1])).indices, True)
            tail = position[None] >= (position[:, None] + 1) // shape.index_kpool * shape.index_kpool
            allowed = allowed & (chosen.repeat_interleave(shape.index_kpool, -1) | tail)[:, None]
        weights = scores.masked_fill(~allowed, -1e30).softmax(-1)
        out = (weights.to(v.dtype) @ v).transpose(1, 2).reshape(-1, heads * shape.v_head_dim)
        loss = distillation(index, weights.detach(), visible, shape.index_kpool)
        return product(out, self.o_proj.weight), loss


def distillation(index: Tensor, weights: Tensor, visible: Tensor, pool: int) -> Tensor:
    """Cross entropy of the indexer's distribution over visible pools against where attention looks (DeepSeek-V3.2)."""
    target = weights.mean(1).unflatten(-1, (-1, pool)).sum(-1) * visible
    seen = visible.any(-1)
    target = target[:, seen] / (target[:, seen].sum(-1, keepdim=True) + 1e-9)
    return -(target * index[:, seen].log_softmax(-1).clamp(min=-50)).sum(-1).mean()
