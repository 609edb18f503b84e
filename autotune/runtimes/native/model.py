"""The decoder: layers built from a checkpoint at given widths, run over one prefill segment or one decode step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from autotune.runtimes.native import hyper, kda
from autotune.runtimes.native.attention import LatentAttention, Places
from autotune.runtimes.native.cache import LatentPool, Snapshot, StatePool
from autotune.runtimes.native.config import ModelConfig
from autotune.runtimes.native.kernels.cpu.fused import Kda
from autotune.runtimes.native.moe import MLP, MoE
from autotune.runtimes.native.quant import cuda
from autotune.runtimes.native.quant.bias import compensated
from autotune.runtimes.native.quant.linear import Embedding, Linear, Wide, make_linear


@dataclass(frozen=True, slots=True)
class Widths:
    """How weights are stored: bits by ``<layer>.<group>``, and what the widths' definitions need."""

    bits: Mapping[str, int]
    group: int = 64
    activations: str = "weight_only"
    compute: str = "fp32"
    means: Mapping[str, Tensor] | None = None
    """Mean inputs [in] by ``<layer>.<group>.<name>`` for bias correction; None: no correction."""
    triton: bool = False
    """Triton kernels multiply packed weights, and all routed experts of a layer at once."""
    embed_on_host: bool = False

    def linear(self, key: str, weight: Tensor, name: str = "", columns: slice | None = None) -> Linear:
        """``weight`` as it is stored; with ``columns`` only these inputs of it, with the same stored values.

        ``name`` tells it from the others of its group.
        """
        make = cuda.make_linear if self.triton else make_linear
        stored = make(weight, self.bits[key], self.compute, self.group, self.activations, columns)
        mean = None if self.means is None else self.means.get(f"{key}.{name}")
        return stored if mean is None else compensated(stored, weight, mean, columns)

    def wide(self, weight: Tensor) -> Linear:
        return Wide(weight, self.compute)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How attention is computed: its ``form``, the ``splits`` of a decode step's context, the linear attention's
    ``chunk`` in prefill, and the function of each op (see `kernels.select`)."""

    form: str
    splits: int
    chunk: int
    kernels: Mapping[str, Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class Segment:
    """Q new tokens of one sequence whose state is in ``slot``; ``borders`` are the counts of new tokens after which
    the recurrent state is copied out: ascending, and each at a multiple of the chunk from the sequence's start."""

    slot: int
    places: Places
    borders: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """One new token of each of Q sequences; ``slots`` [Q] are their states."""

    slots: Tensor
    places: Places

    @classmethod
    def of(cls, rows: Tensor, size: int, length: int) -> Step:
        """From rows [Q, 3 + B] of token, state slot, position and block table, with blocks of ``size`` tokens.

        Every shape follows from B, ``size`` and ``length``, the tokens that attention spans (more than any position,
        at most B · size); no value is looked at, so that the step can be captured.
        """
        positions, table = rows[:, 2], rows[:, 3:]
        past = (table[:, :, None] * size + torch.arange(size)).flatten(1)[:, :length]
        return cls(rows[:, 1], Places(past.gather(1, rows[:, 2:3])[:, 0], positions, table, size, past, rows[:, 1]))


class LinearAttention:
    """Kimi delta attention of one layer over a pool of states."""

    def __init__(self, config: ModelConfig, parts: dict[str, Linear], small: dict[str, Tensor], recipe: Recipe) -> None:
        self.config, self.parts, self.small = config, parts, small
        self.chunk, self.kernels = recipe.chunk, recipe.kernels
        self.shape = (-1, config.linear_num_heads, config.linear_head_dim)
        self.pool: StatePool | None = None
        self.bounds = (config.linear_lower_bound, config.rms_norm_eps)
        self.fused: Kda | None = None

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """qkv before the convolution [T, 3·H·d], raw forget gate [T, H·d], raw β [T, H], raw output gate [T, H·d]."""
        size, heads = self.config.linear_head_dim, self.config.linear_num_heads
        forget, gate, beta = torch.split(self.parts["gates"](x), [size, size, heads], -1)
        return self.parts["qkv"](x), self.parts["f_b"](forget), beta, self.parts["g_b"](gate)

    def decode(self, x: Tensor, at: Step) -> Tensor:
        assert self.pool is not None
        projected = self._project(x)
        if self.fused is not None:
            return self.parts["o"](self.fused.step(*projected, at.slots))
        pool = (self.pool.conv, self.pool.state)
        return self.parts["o"](self.kernels["kda_decode"](projected, pool, at.slots, self.small, self.bounds))

    def prefill(self, x: Tensor, at: Segment) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """[T, D] → [T, D] and (conv, state) after each of the segment's borders."""
        assert self.pool is not None
        projected = self._project(x)
        if self.fused is not None:
            out, copies = self.fused.segment(*projected, at.slot, at.borders)
            return self.parts["o"](out), copies
        qkv, forget, beta, gate = projected
        decay = kda.decays(forget.view(self.shape), self.small, self.bounds[0])
        mixed, padded = kda.convolve(qkv, self.pool.conv[at.slot], self.small["taps"])
        mixed = mixed.view(len(x), 3, *self.shape[1:])
        before, beta = self.pool.state[at.slot].to(torch.float32, copy=True), beta.sigmoid()
        # A piece that begins inside a chunk gets the chunk's earlier tokens as ones that change no state (β = 0, no
        # decay), so that chunks end at the same places however a prompt is cut.
        lead = (at.places.length - len(x)) % self.chunk if at.borders else 0
        if lead:
            mixed, decay, beta = (F.pad(t, (0, 0) * (t.dim() - 1) + (lead, 0)) for t in (mixed, decay, beta))
        out, states = self.kernels["kda_prefill"](*mixed.unbind(1), decay, beta, before, self.chunk)
        out = out[lead:]
        kept = self.config.linear_conv_kernel_dim - 1
        self.pool.conv[at.slot] = padded[len(padded) - kept :]
        self.pool.state[at.slot] = states[-1].to(self.pool.state.dtype)
        copies = [
            (
                padded[border : border + kept].clone(),
                states[(lead + border) // self.chunk - 1].to(self.pool.state.dtype),
            )
            for border in at.borders
        ]
        return self.parts["o"](kda.gated(out, gate.view(self.shape), self.small, self.bounds[1]).flatten(1)), copies


class Layer:
    """One decoder layer: attention and feed-forward, each read from and written to the residual streams.

    ``hc`` are the arguments of `kernels.hyper` for the two, after the streams; ``reads`` what runs them.
    """

    def __init__(self, attention: LinearAttention | LatentAttention, mlp: MLP | MoE, hc: Sequence[Any]) -> None:
        self.attention, self.mlp, self.hc = attention, mlp, hc
        self.reads: list[Callable[[Tensor], Any]] = []

    def read_by(self, read: Callable[..., Any]) -> None:
        """Let ``read``, called as `kernels.hyper`, run the two."""

        def bound(args: Any) -> Callable[[Tensor], Any]:
            return lambda streams: read(streams, *args)

        self.reads = [bound(args) for args in self.hc]

    def forward(self, streams: Tensor, attend: Any, write: Callable[..., Tensor]) -> Tensor:
        """[T, N, D] → [T, N, D]; ``attend(attention, x)`` runs the attention over its pool."""
        x, post, mix = self.reads[0](streams)
        streams = write(streams, attend(self.attention, x), post, mix)
        x, post, mix = self.reads[1](streams)
        return write(streams, self.mlp(x), post, mix)


class Decoder:
    """Token ids in, fp32 logits out. Pools are attached by `attach`; nothing here decides who runs when.

    ``start`` is the number, in the whole model, of its first layer.
    """

    start = 0

    def __init__(
        self, config: ModelConfig, embed: Embedding, layers: list[Layer], norm: Tensor, head: Linear, read: Any
    ) -> None:
        self.config, self.embed, self.layers, self.norm, self.head = config, embed, layers, norm, head
        self.read = read
        self.write: Callable[..., Tensor] = hyper.write
        for layer in layers:
            layer.read_by(read)

    def with_weights(self, layers: list[Layer], head: Linear) -> Self:
        """The same decoder over other layers and another output projection."""
        made = copy.copy(self)
        made.layers, made.head = layers, head
        for layer in layers:
            layer.read_by(self.read)
        return made

    def attach(self, tokens: int, slots: int, kv_dtype: str, state_dtype: str) -> None:
        """Allocate the pools: ``tokens`` latents a sparse layer, ``slots`` sequences' states a layer."""
        for layer in self.layers:
            if isinstance(layer.attention, LinearAttention):
                layer.attention.pool = StatePool(self.config, slots, state_dtype)
            else:
                layer.attention.pool = LatentPool(self.config, tokens, slots, kv_dtype)

    def cache_bytes(self) -> dict[str, int]:
        """Bytes of the pools: of latents with index keys (``kv``), and of recurrent states (``state``)."""
        found = {"kv": 0, "state": 0}
        for attention in (layer.attention for layer in self.layers):
            if attention.pool is not None:
                found["kv" if isinstance(attention, LatentAttention) else "state"] += attention.pool.nbytes
        return found

    def linear_layers(self) -> list[LinearAttention]:
        return [layer.attention for layer in self.layers if isinstance(layer.attention, LinearAttention)]

    def clear_state(self, slot: int) -> None:
        for attention in self.linear_layers():
            assert attention.pool is not None
            attention.pool.conv[slot] = 0
            attention.pool.state[slot] = 0

    def save_state(self, slot: int) -> Snapshot:
        pools = [attention.pool for attention in self.linear_layers()]
        return Snapshot(tuple((p.conv[slot].clone(), p.state[slot].clone()) for p in pools if p is not None))

    def load_state(self, slot: int, snapshot: Snapshot) -> None:
        for attention, (conv, state) in zip(self.linear_layers(), snapshot.layers, strict=True):
            assert attention.pool is not None
            attention.pool.conv[slot], attention.pool.state[slot] = conv, state

    def prefill(self, ids: Tensor, at: Segment, every: bool = False) -> tuple[Tensor, list[Snapshot]]:
        """Logits [V] after the segment (or [T, V] with ``every``), and the snapshots at its borders."""
        copies: list[list[tuple[Tensor, Tensor]]] = []

        def attend(attention: LinearAttention | LatentAttention, x: Tensor) -> Tensor:
            if isinstance(attention, LatentAttention):
                return attention(x, at.places)
            out, states = attention.prefill(x, at)
            copies.append(states)
            return out

        hidden = self._run(ids, attend)
        logits = self._logits(hidden if every else hidden[-1:])
        # Also with no linear layer, as on some pipeline stages, a border has its (empty) snapshot.
        snapshots = [Snapshot(tuple(states[border] for states in copies)) for border in range(len(at.borders))]
        return logits if every else logits[0], snapshots

    def decode(self, ids: Tensor, at: Step) -> Tensor:
        """Logits [Q, V] after one token of each sequence."""

        def attend(attention: LinearAttention | LatentAttention, x: Tensor) -> Tensor:
            return attention(x, at.places) if isinstance(attention, LatentAttention) else attention.decode(x, at)

        return self._logits(self._run(ids, attend))

    def _run(self, ids: Tensor, attend: Any) -> Tensor:
        streams = self._enter(ids)
        for layer in self.layers:
            streams = layer.forward(streams, attend, self.write)
        return self._leave(streams)

    def _enter(self, ids: Tensor) -> Tensor:
        return self.embed(ids)[:, None].expand(-1, self.config.hc_mult, -1).contiguous()

    def _leave(self, streams: Tensor) -> Tensor:
        return streams.mean(1)

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.head(hyper.rms(hidden, self.config.rms_norm_eps) * self.norm)
