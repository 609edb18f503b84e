"""Sparse latent attention without positions, in three forms that agree: expanded, absorbed, and gathered (sparse)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from autotune.runtimes.native.cache import LatentPool
from autotune.runtimes.native.config import ModelConfig
from autotune.runtimes.native.hyper import rms
from autotune.runtimes.native.quant.linear import Linear

ROWS = 64
"""Queries whose gathered latents are held at once in the sparse form."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where Q query tokens and what they may see lie in the pools.

    ``new`` [Q] are the queries' own slots, ``positions`` [Q]; ``past`` are the slots of all tokens in order: [L] for
    one sequence (prefill), [Q, L] for a decode step of Q sequences, padded with any valid slot.
    """

    new: Tensor
    positions: Tensor
    past: Tensor

    @property
    def length(self) -> int:
        return self.past.shape[-1]


@dataclass(frozen=True, slots=True)
class Indexer:
    """Picks, for each query, the pools of ``kpool`` tokens worth attending to; scores in fp32, weights never packed."""

    query: Linear
    keys: Linear  # key, gate and head-weight projections, one product
    norm: tuple[Tensor, Tensor]
    ape: Tensor
    heads: int
    size: int
    top: int
    kpool: int

    def raw(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What each token leaves in the pool, [T, 2·size] (normed key, gate logits); its head weights [T, heads]."""
        keys, gates, weights = torch.split(self.keys(x), [self.size, self.size, self.heads], -1)
        keys = F.layer_norm(keys, (self.size,), *self.norm, eps=1e-6)
        return torch.cat([keys, gates], -1), weights * self.heads**-0.5

    def pool(self, raw: Tensor) -> Tensor:
        """[P, kpool, 2·size] → [P, size]: a learned weighted mean over the tokens of each complete pool."""
        keys, gates = torch.split(raw.float(), self.size, -1)
        pooled: Tensor = ((gates + self.ape).softmax(1) * keys).sum(1)
        return pooled

    def select(self, compressed: Tensor, weights: Tensor, keys: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The best pools of each query: indices [Q, k] and which of them are real.

        ``keys`` [P, size] or [Q, P, size]. A pool is visible once its last token is. Ties go to the earlier pool
        (stable sort), so that the choice does not depend on what else is in the batch.
        """
        queries = self.query(compressed).view(len(compressed), self.heads, self.size)
        scores = F.relu(queries @ keys.float().mT * self.size**-0.5)
        scores = (weights[:, None] @ scores)[:, 0]
        ends = torch.arange(keys.shape[-2]) * self.kpool + self.kpool - 1
        scores = scores.masked_fill(ends > positions[:, None], -torch.inf)
        best, order = scores.sort(dim=-1, descending=True, stable=True)
        count = min(self.top // self.kpool, scores.shape[-1])
        return order[:, :count], best[:, :count] > -torch.inf


class LatentAttention:
    """One layer. ``form`` is expanded, absorbed or sparse. Keys and values are re-made from the cached latent."""

    def __init__(self, config: ModelConfig, parts: dict[str, Linear], norms: tuple[Tensor, Tensor], form: str) -> None:
        self.config, self.parts, self.norms, self.form = config, parts, norms, form
        self.indexer: Indexer | None = None
        self.pool: LatentPool | None = None
        heads = config.num_attention_heads
        self.scale = config.qk_nope_head_dim**-0.5
        self.expand = parts["kv_b"]
        if form != "expanded":
            weight = self.expand.dense().view(heads, -1, config.kv_lora_rank)
            self.up = weight[:, : config.qk_nope_head_dim].contiguous()  # [H, dn, R]
            self.down = weight[:, config.qk_nope_head_dim :].mT.contiguous()  # [H, R, dv]

    def __call__(self, x: Tensor, at: Places) -> Tensor:
        """``x`` [Q, D] → [Q, D], writing the queries' latents first."""
        assert self.indexer is not None and self.pool is not None
        config = self.config
        front, latent = torch.split(self.parts["a"](x), [config.q_lora_rank, config.kv_lora_rank], -1)
        compressed = rms(front, config.rms_norm_eps) * self.norms[0]
        latent = rms(latent, config.rms_norm_eps) * self.norms[1]
        raw, weights = self.indexer.raw(x)
        self.pool.write(at.new, latent, raw)
        self._complete_pools(at)
        query = self.parts["q_b"](compressed).view(len(x), config.num_attention_heads, -1)
        chosen = self._choose(compressed, weights, at)
        if self.form == "sparse" and chosen is not None:
            out = self._gathered(query, at, *chosen)
        else:
            out = self._masked(query, at, self._mask(at, chosen))
        return self.parts["o"](out.reshape(len(x), -1))

    def _complete_pools(self, at: Places) -> None:
        """Pool the index keys of every group of kpool tokens whose last token was just written.

        A decode step pools each row's group at every token, complete or not: nothing then depends on the positions,
        and nobody sees the group before its last token, with which it is pooled again.
        """
        assert self.indexer is not None and self.pool is not None
        kpool = self.indexer.kpool
        if at.past.dim() == 1:
            ends = at.positions[at.positions % kpool == kpool - 1]
            slots = at.past[ends[:, None] + torch.arange(1 - kpool, 1)]
        else:  # a group never crosses a block's border, so its slots lie side by side
            slots = at.new[:, None] // kpool * kpool + torch.arange(kpool)
        if len(slots):
            pooled = self.indexer.pool(self.pool.raw[slots])
            self.pool.pooled[slots[:, 0] // kpool] = pooled.to(self.pool.pooled.dtype)

    def _choose(self, compressed: Tensor, weights: Tensor, at: Places) -> tuple[Tensor, Tensor] | None:
        """The selected pools, or None while the whole context fits the selection."""
        assert self.indexer is not None and self.pool is not None
        kpool, pools = self.indexer.kpool, at.length // self.indexer.kpool
        if pools <= self.indexer.top // kpool:
            return None
        keys = self.pool.pooled[at.past[..., : pools * kpool : kpool] // kpool]
        return self.indexer.select(compressed, weights, keys, at.positions)

    def _mask(self, at: Places, chosen: tuple[Tensor, Tensor] | None) -> Tensor:
        """[Q, L]: True where a query may look."""
        tokens = torch.arange(at.length)
        causal = tokens <= at.positions[:, None]
        if chosen is None:
            return causal
        assert self.indexer is not None
        kpool, (indices, real) = self.indexer.kpool, chosen
        picked = torch.zeros(len(indices), at.length // kpool, dtype=torch.bool).scatter_(1, indices, real)
        picked = F.pad(picked.repeat_interleave(kpool, 1), (0, at.length % kpool))
        tail = tokens >= (at.positions[:, None] + 1) // kpool * kpool
        return causal & (picked | tail)

    def _masked(self, query: Tensor, at: Places, mask: Tensor) -> Tensor:
        assert self.pool is not None
        latent = self.pool.read(at.past)  # [L, R] or [Q, L, R]
        if self.form == "expanded":
            return self._expanded(query, latent, mask)
        query = torch.bmm(query.transpose(0, 1), self.up).transpose(0, 1)  # [Q, H, R]
        if latent.dim() == 2:
            scores = torch.matmul(query.transpose(0, 1), latent.mT) * self.scale  # [H, Q, L]
            weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
            return torch.bmm(weights @ latent, self.down).transpose(0, 1)
        scores = (query @ latent.mT) * self.scale  # [Q, H, L]
        weights = scores.masked_fill(~mask[:, None], -torch.inf).softmax(-1)
        return torch.bmm((weights @ latent).transpose(0, 1), self.down).transpose(0, 1)

    def _expanded(self, query: Tensor, latent: Tensor, mask: Tensor) -> Tensor:
        config, heads = self.config, self.config.num_attention_heads
        wide = self.expand(latent.flatten(0, -2)).view(*latent.shape[:-1], heads, -1)
        keys, values = torch.split(wide, [config.qk_nope_head_dim, config.v_head_dim], -1)
        if latent.dim() == 2:
            q, k, v = (t.transpose(0, 1) for t in (query, keys, values))
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale).transpose(0, 1)
        q, k, v = query[:, :, None], keys.transpose(1, 2), values.transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None], scale=self.scale)[:, :, 0]

    def _gathered(self, query: Tensor, at: Places, indices: Tensor, real: Tensor) -> Tensor:
        """Absorbed attention over only the selected tokens and the unfinished last pool."""
        assert self.indexer is not None and self.pool is not None
        kpool = self.indexer.kpool
        tokens = (indices[..., None] * kpool + torch.arange(kpool)).flatten(1)
        tail = (at.positions[:, None] + 1) // kpool * kpool + torch.arange(kpool - 1)
        tokens = torch.cat([tokens, tail], 1)
        seen = torch.cat([real.repeat_interleave(kpool, 1), tail <= at.positions[:, None]], 1)
        tokens = tokens.clamp(max=at.length - 1)
        slots = at.past[tokens] if at.past.dim() == 1 else at.past.gather(1, tokens)
        query = torch.bmm(query.transpose(0, 1), self.up).transpose(0, 1)
        out = []
        for part in range(0, len(query), ROWS):
            rows = slice(part, part + ROWS)
            latent = self.pool.read(slots[rows])
            scores = (query[rows] @ latent.mT) * self.scale
            out.append(scores.masked_fill(~seen[rows, None], -torch.inf).softmax(-1) @ latent)
        return torch.bmm(torch.cat(out).transpose(0, 1), self.down).transpose(0, 1)
