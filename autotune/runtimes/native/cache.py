"""Where tokens and states live: paged pools of latents and index keys, and slots of recurrent states."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from autotune.runtimes.native.config import ModelConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class LatentPool:
    """One sparse-attention layer's tokens: latent [S, R] and pooled index keys [S / kpool, I], fp32, bf16 or int8.

    int8 rows have a bf16 scale each. Index keys are needed one by one only until their group of kpool tokens is
    complete, so ``tail`` [slots, kpool, 2·I] holds just each sequence's unfinished group, in fp32. A sequence that
    continues from a block's border, a multiple of kpool, starts with an empty one.
    """

    def __init__(self, config: ModelConfig, tokens: int, slots: int, dtype: str) -> None:
        self.quantized = dtype == "int8"
        kind = torch.int8 if self.quantized else DTYPES[dtype]
        groups = tokens // config.index_kpool
        self.latent = torch.zeros(tokens, config.kv_lora_rank, dtype=kind)
        self.scale = torch.zeros(tokens if self.quantized else 0, 1, dtype=torch.bfloat16)
        self.pooled = torch.zeros(groups, config.index_head_dim, dtype=kind)
        self.pooled_scale = torch.zeros(groups if self.quantized else 0, 1, dtype=torch.bfloat16)
        self.tail = torch.zeros(slots, config.index_kpool, 2 * config.index_head_dim)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.latent, self.scale, self.pooled, self.pooled_scale, self.tail))

    def write(self, slots: Tensor, latent: Tensor) -> None:
        _write(self.latent, self.scale, slots, latent)

    def write_keys(self, groups: Tensor, keys: Tensor) -> None:
        """Pooled index keys [P, I] of groups [P] (slot // kpool)."""
        _write(self.pooled, self.pooled_scale, groups, keys)

    def read_keys(self, groups: Tensor) -> Tensor:
        """Pooled index keys of any shape of groups, in fp32."""
        keys = self.pooled[groups].float()
        return keys * self.pooled_scale[groups] if self.quantized else keys


def _write(table: Tensor, scales: Tensor, at: Tensor, rows: Tensor) -> None:
    if table.dtype is torch.int8:
        # Rounded before the division, so that its rounding costs nothing but a clamp of the largest value.
        scale = (rows.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127).to(scales.dtype)
        scales[at] = scale
        rows = (rows / scale.float()).round().clamp(-127, 127)
    table[at] = rows.to(table.dtype)


def state_bytes(config: ModelConfig, dtype: str) -> int:
    """Bytes of one sequence's recurrent state, convolution included, over all layers of the model."""
    pool = StatePool(config, 1, dtype)
    return pool.nbytes * config.layers.count("kda")


class StatePool:
    """One linear-attention layer's slots: the last inputs of its convolution and its recurrent state."""

    def __init__(self, config: ModelConfig, slots: int, dtype: str) -> None:
        heads, size = config.linear_num_heads, config.linear_head_dim
        self.conv = torch.zeros(slots, config.linear_conv_kernel_dim - 1, 3 * heads * size)
        self.state = torch.zeros(slots, heads, size, size, dtype=DTYPES[dtype])

    @property
    def nbytes(self) -> int:
        return self.conv.nbytes + self.state.nbytes


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The recurrent part of a sequence at a block border: (conv, state) of every linear-attention layer."""

    layers: tuple[tuple[Tensor, Tensor], ...]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for layer in self.layers for tensor in layer)
