"""Who holds which cache block: free ones, those in use, and prefixes kept for reuse. Looks into no tensor."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from autotune.runtimes.native.cache import Snapshot


@dataclass(slots=True)
class Block:
    """``users`` hold it now. Once full it may be kept under ``key``, the hash of the prefix that it ends; ``parent`` is
    then the kept block before it (-1: none) and ``points`` how many checkpoints lie at its end or further on."""

    users: int = 0
    key: bytes | None = None
    parent: int = -1
    points: int = 0


@dataclass(slots=True)
class Counts:
    """What the cache did since the last reset: tokens looked up and found, blocks and checkpoints given up, sequences
    put back and tokens computed again for it, and the most blocks in use at once."""

    queries: int = 0
    hits: int = 0
    evictions: int = 0
    state_evictions: int = 0
    preemptions: int = 0
    recomputed: int = 0
    peak_blocks: int = 0


@dataclass(slots=True)
class Blocks:
    """The block table's owner. A block is free, in use, or kept: full, unused, and part of a known prefix.

    Kept blocks form a tree by prefix. A prefix may be continued from only where a checkpoint of the recurrent state
    lies, because that cannot be rebuilt from latents; so a block with no checkpoint at its end or further on is worth
    nothing and is free as soon as nobody uses it. ``capacity`` bounds the checkpoints. What is given up first is the
    least recently used checkpoint, and with it the blocks that only it was for. Losing any costs time, never answers.
    """

    count: int
    size: int
    reuse: bool
    capacity: int = 256
    used: int = 0
    free: list[int] = field(default_factory=list)
    table: list[Block] = field(default_factory=list)
    kept: dict[bytes, int] = field(default_factory=dict)
    states: OrderedDict[int, Snapshot] = field(default_factory=OrderedDict)
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        self.free = list(range(self.count - 1, -1, -1))
        self.table = [Block() for _ in range(self.count)]

    def extend(self, keys: list[bytes], tokens: Sequence[int], count: int) -> None:
        """Lengthen ``keys``, the chained hashes of the first full blocks of ``tokens``, to ``count`` of them."""
        for start in range(len(keys) * self.size, count * self.size, self.size):
            part = array("q", tokens[start : start + self.size]).tobytes()
            keys.append(hashlib.blake2b((keys[-1] if keys else b"") + part, digest_size=16).digest())

    def match(self, keys: Sequence[bytes]) -> tuple[list[int], Snapshot | None]:
        """The blocks of the longest known prefix that may be continued from, now held by the caller; its state."""
        found: list[int] = []
        for key in keys:
            block = self.kept.get(key)
            if block is None:
                break
            found.append(block)
        while found and found[-1] not in self.states:
            found.pop()
        if not found:
            return [], None
        for block in found:
            self._hold(block)
        self.states.move_to_end(found[-1])
        return found, self.states[found[-1]]

    def take(self, count: int) -> list[int] | None:
        """Blocks for one user, if need be some that were kept; None, and none given up, when too many are in use."""
        if count > self.count - self.used:
            return None
        while len(self.free) < count:
            self._evict()
        found = [self.free.pop() for _ in range(count)]
        for block in found:
            self._hold(block)
        return found

    def keep(self, blocks: list[int], keys: Sequence[bytes]) -> None:
        """Make the first blocks of a sequence known under their prefixes' ``keys``.

        Where another block is known already, the sequence uses that one from now on and gives up its own.
        """
        for index, key in enumerate(keys):
            known = self.kept.setdefault(key, blocks[index])
            entry = self.table[known]
            if known != blocks[index]:
                self._hold(known)
                self.release([blocks[index]])
                blocks[index] = known
            elif entry.key is None:
                entry.key, entry.parent = key, blocks[index - 1] if index else -1

    def checkpoint(self, block: int, state: Snapshot) -> None:
        """Remember the recurrent state at the end of a kept ``block``, giving up the least recently used beyond
        ``capacity``."""
        if block not in self.states:
            for index in self._chain(block):
                self.table[index].points += 1
        self.states[block] = state
        self.states.move_to_end(block)
        while len(self.states) > self.capacity:
            self._drop(next(iter(self.states)))

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one use of each block of a prefix's end."""
        for block in reversed(blocks):
            entry = self.table[block]
            entry.users -= 1
            if entry.users == 0:
                self.used -= 1
                self._tidy(block)

    def clear(self) -> None:
        """Forget every kept prefix and count; blocks in use stay."""
        for block in self.kept.values():
            entry = self.table[block]
            entry.key, entry.parent, entry.points = None, -1, 0
            if not entry.users:
                self.free.append(block)
        self.kept.clear()
        self.states.clear()
        self.counts = Counts(peak_blocks=self.used)

    def _hold(self, block: int) -> None:
        entry = self.table[block]
        self.used += not entry.users
        entry.users += 1
        self.counts.peak_blocks = max(self.counts.peak_blocks, self.used)

    def _chain(self, block: int) -> Iterator[int]:
        """A kept block and those before it, from last to first."""
        while block >= 0:
            yield block
            block = self.table[block].parent

    def _evict(self) -> None:
        """Free the least recently used of the kept blocks that nobody uses, of which there must be some.

        A checkpoint with another further on, or with its block in use, would free nothing and stays. Each unused kept
        block has a last checkpoint at its end or further on, and whoever used that block would use this one.
        """
        before = len(self.free)
        self._drop(next(b for b in self.states if self.table[b].points == 1 and not self.table[b].users))
        self.counts.evictions += len(self.free) - before

    def _drop(self, block: int) -> None:
        """Give up the checkpoint at a block's end, and the blocks that only it was for."""
        del self.states[block]
        self.counts.state_evictions += 1
        for index in list(self._chain(block)):
            self.table[index].points -= 1
            self._tidy(index)

    def _tidy(self, block: int) -> None:
        """Free a block that nobody uses and nobody can continue from."""
        entry = self.table[block]
        if not entry.users and not entry.points:
            if entry.key is not None:
                del self.kept[entry.key]
            entry.key, entry.parent = None, -1
            self.free.append(block)
