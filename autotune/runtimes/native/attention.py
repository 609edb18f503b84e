"""Sparse latent attention without positions, in three forms that agree: expanded, absorbed, and gathered (sparse)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autotune.runtimes.native.cache import LatentPool
from autotune.runtimes.native.config import ModelConfig
from autotune.runtimes.native.hyper import rms
from autotune.runtimes.native.kernels.latents import Latents, Scope
from autotune.runtimes.native.quant.linear import Linear


@dataclass(frozen=True, slots=True)
class Places:
    """Where Q query tokens and what they may see lie in the pools, for G sequences: one in prefill, Q in a decode step.

    ``new`` [Q] are the queries' own slots, ``positions`` [Q]; ``table`` [G, B] the blocks of ``size`` tokens, and
    ``past`` [G, L] the slots of all tokens in order, padded with any valid slot. ``states`` [G] are their state slots.
    """

    new: Tensor
    positions: Tensor
    table: Tensor
    size: int
    past: Tensor
    states: Tensor

    @property
    def length(self) -> int:
        return self.past.shape[1]

    @property
    def groups(self) -> int:
        return self.past.shape[0]


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
        """What each token gives to its group, [T, 2·size] (normed key, gate logits); its head weights [T, heads]."""
        keys, gates, weights = torch.split(self.keys(x), [self.size, self.size, self.heads], -1)
        keys = F.layer_norm(keys, (self.size,), *self.norm, eps=1e-6)
        return torch.cat([keys, gates], -1), weights * self.heads**-0.5

    def pool(self, raw: Tensor) -> Tensor:
        """[P, kpool, 2·size] → [P, size]: a learned weighted mean over the tokens of each complete pool."""
        keys, gates = torch.split(raw.float(), self.size, -1)
        pooled: Tensor = ((gates + self.ape).softmax(1) * keys).sum(1)
        return pooled


class LatentAttention:
    """One layer. ``form`` is expanded, absorbed or sparse. Keys and values are re-made from the cached latent.

    A decode step of the last two reads the context in ``splits`` parts. ``kernels`` are functions by op.
    """

    def __init__(
        self,
        config: ModelConfig,
        parts: dict[str, Linear],
        norms: tuple[Tensor, Tensor],
        form: str,
        splits: int,
        kernels: Mapping[str, Callable[..., Any]],
    ) -> None:
        self.config, self.parts, self.norms, self.form = config, parts, norms, form
        self.splits, self.kernels = splits, kernels
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
        self.pool.write(at.new, latent)
        self._pool_keys(raw, at)
        query = self.parts["q_b"](compressed).view(len(x), config.num_attention_heads, -1)
        scope = self._scope(compressed, weights, at)
        latents = Latents(self.pool.latent, self.pool.scale, at.table, at.size, at.past)
        out = (self._expanded if self.form == "expanded" else self._absorbed)(query, latents, scope)
        return self.parts["o"](out.reshape(len(x), -1))

    def _pool_keys(self, raw: Tensor, at: Places) -> None:
        """Pool the index keys of every group of kpool tokens that is complete; keep those of the unfinished ones.

        A decode step pools each row's group at every token, complete or not: nothing then depends on the positions,
        and nobody sees the group before its last token, with which it is pooled again.
        """
        assert self.indexer is not None and self.pool is not None
        kpool, tail = self.indexer.kpool, self.pool.tail
        if at.groups == len(raw):
            tail[at.states, at.positions % kpool] = raw
            self.pool.write_keys(at.new // kpool, self.indexer.pool(tail[at.states]))
            return
        begun = (at.length - len(raw)) % kpool
        raw = torch.cat([tail[at.states, :begun][0], raw])
        whole = len(raw) // kpool * kpool
        if whole:
            first = at.length - len(raw)
            groups = at.past[0, first : first + whole : kpool] // kpool
            self.pool.write_keys(groups, self.indexer.pool(raw[:whole].view(len(groups), kpool, -1)))
        tail[at.states, : len(raw) - whole] = raw[None, whole:]

    def _scope(self, compressed: Tensor, weights: Tensor, at: Places) -> Scope:
        """Causal while the whole context fits the selection, else the selected pools too."""
        assert self.indexer is not None and self.pool is not None
        kpool, pools = self.indexer.kpool, at.length // self.indexer.kpool
        positions = at.positions.view(at.groups, -1)
        if pools <= self.indexer.top // kpool:
            return Scope(positions, kpool)
        keys = self.pool.read_keys(at.past[:, : pools * kpool : kpool] // kpool)
        queries = self.indexer.query(compressed).view(len(compressed), self.indexer.heads, self.indexer.size)
        chosen, real = self.kernels["choose"](queries, weights, keys, at.positions, kpool, self.indexer.top // kpool)
        shape = (*positions.shape, -1)
        return Scope(positions, kpool, chosen.view(shape), real.view(shape))

    def _absorbed(self, query: Tensor, latents: Latents, scope: Scope) -> Tensor:
        """Over the latents themselves: W_uk goes to the query before, W_uv to the sum after."""
        query = torch.bmm(query.transpose(0, 1), self.up).transpose(0, 1)
        grouped = query.view(*scope.positions.shape, *query.shape[1:])
        gather = self.form == "sparse" and scope.pools is not None
        if self.splits > 1 and scope.positions.shape[1] == 1:
            out = self.kernels["split_kv"](grouped, latents, scope, self.scale, self.splits, gather)
        else:
            out = self.kernels["sparse" if gather else "absorbed"](grouped, latents, scope, self.scale)
        return torch.bmm(out.flatten(0, 1).transpose(0, 1), self.down).transpose(0, 1)

    def _expanded(self, query: Tensor, latents: Latents, scope: Scope) -> Tensor:
        config, heads = self.config, self.config.num_attention_heads
        wide = self.expand(latents.read(latents.slots).flatten(0, 1)).view(*latents.slots.shape, heads, -1)
        if wide.is_cuda and self.pool is not None and self.pool.latent.dtype is not torch.float32:
            wide = wide.bfloat16()  # no coarser than the cache that they come from, and what matrix units multiply
        keys, values = torch.split(wide, [config.qk_nope_head_dim, config.v_head_dim], -1)
        query = query.view(*scope.positions.shape, *query.shape[1:])
        out: Tensor = self.kernels["expanded"](query, keys, values, scope, self.scale)
        return out.flatten(0, 1)
