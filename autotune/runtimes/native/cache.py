"""Where tokens and states live: paged latent and index pools, state slots, and blocks shared by prefix hash."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

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


@dataclass(slots=True)
class Block:
    """A block's users; ``key`` is its prefix's hash once it is full and kept for reuse."""

    users: int = 0
    key: bytes | None = None


@dataclass(slots=True)
class Counts:
    """What the cache did since the last reset."""

    queries: int = 0
    hits: int = 0
    evictions: int = 0
    preemptions: int = 0
    peak_blocks: int = 0


@dataclass(slots=True)
class Blocks:
    """The block table's owner: free blocks, shared ones, and the least recently used kept prefixes.

    A kept prefix of n blocks may be continued from only where a Snapshot exists, because the recurrent state cannot
    be rebuilt from latents. ``snapshots`` bounds how many there are.
    """

    count: int
    size: int
    reuse: bool
    snapshots: int = 256
    free: list[int] = field(default_factory=list)
    table: list[Block] = field(default_factory=list)
    kept: OrderedDict[bytes, int] = field(default_factory=OrderedDict)
    states: OrderedDict[bytes, Snapshot] = field(default_factory=OrderedDict)
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        self.free = list(range(self.count - 1, -1, -1))
        self.table = [Block() for _ in range(self.count)]

    def keys(self, tokens: Sequence[int]) -> list[bytes]:
        """The chained hashes of the full blocks of ``tokens``."""
        found, previous = [], b""
        for start in range(0, len(tokens) - self.size + 1, self.size):
            part = array("q", tokens[start : start + self.size]).tobytes()
            previous = hashlib.blake2b(previous + part, digest_size=16).digest()
            found.append(previous)
        return found

    def match(self, tokens: Sequence[int]) -> tuple[list[int], Snapshot | None]:
        """The blocks of the longest known prefix that leaves at least one token to compute, now held by the caller."""
        if not self.reuse:
            return [], None
        self.counts.queries += len(tokens)
        keys = self.keys(tokens[:-1])
        known = next((i for i, key in enumerate(keys) if key not in self.kept), len(keys))
        length = next((n for n in range(known, 0, -1) if keys[n - 1] in self.states), 0)
        if not length:
            return [], None
        blocks = [self.kept[key] for key in keys[:length]]
        for block in blocks:
            self.table[block].users += 1
        self.states.move_to_end(keys[length - 1])
        self.counts.hits += length * self.size
        return blocks, self.states[keys[length - 1]]

    def take(self) -> int | None:
        """A block for one user: a free one, else the least recently used kept one; None when all are in use."""
        if not self.free and not self._evict():
            return None
        block = self.free.pop()
        self.table[block].users = 1
        self.counts.peak_blocks = max(self.counts.peak_blocks, self.count - len(self.free))
        return block

    def keep(self, blocks: Sequence[int], tokens: Sequence[int]) -> None:
        """Remember the full blocks that hold ``tokens`` under their prefix hashes."""
        if not self.reuse:
            return
        for block, key in zip(blocks, self.keys(tokens), strict=False):
            if key in self.kept:
                self.kept.move_to_end(key)
            elif self.table[block].key is None:
                self.table[block].key = key
                self.kept[key] = block

    def snapshot(self, tokens: Sequence[int], state: Snapshot) -> None:
        """Remember the recurrent state after ``tokens``, a whole number of blocks."""
        key = self.keys(tokens)[-1]
        self.states[key] = state
        self.states.move_to_end(key)
        while len(self.states) > self.snapshots:
            self.states.popitem(last=False)

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one use of each block; unkept ones become free, the prefix's end first to be evicted."""
        for block in reversed(blocks):
            entry = self.table[block]
            entry.users -= 1
            if entry.users == 0 and entry.key is None:
                self.free.append(block)

    def clear(self) -> None:
        """Forget every kept prefix and count; blocks in use stay."""
        for key in list(self.kept):
            self._forget(key)
        self.states.clear()
        self.counts = Counts()

    def _evict(self) -> bool:
        key = next((k for k, block in self.kept.items() if self.table[block].users == 0), None)
        if key is None:
            return False
        self._forget(key)
        self.counts.evictions += 1
        return True

    def _forget(self, key: bytes) -> None:
        block = self.kept.pop(key)
        self.states.pop(key, None)
        self.table[block].key = None
        if self.table[block].users == 0:
            self.free.append(block)
