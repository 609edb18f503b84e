"""Which sequences run in the next step: admission, chunked prefill, block growth and preemption. Computes no logits."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from autotune.runtimes.native.attention import Places
from autotune.runtimes.native.blocks import Blocks
from autotune.runtimes.native.cache import Snapshot


@dataclass(slots=True, eq=False)
class Sequence:
    """One request as it runs. ``tokens`` are prompt and output; ``done`` of them are in the cache, ``computed`` were
    when most were, and ``keys`` are the hashes of its full blocks as far as they were needed."""

    id: Hashable
    tokens: list[int]
    prompt: int
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    done: int = 0
    computed: int = 0
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    restore: Snapshot | None = None

    @property
    def produced(self) -> int:
        return len(self.tokens) - self.prompt

    @property
    def decoding(self) -> bool:
        """All but the newest token are in the cache, and the newest is our own."""
        return self.done == len(self.tokens) - 1 and self.produced > 0


class Scheduler:
    """First come, first served; the youngest running sequence gives way when blocks run out and is computed again."""

    def __init__(self, blocks: Blocks, max_seqs: int, token_budget: int) -> None:
        self.blocks, self.max_seqs, self.token_budget = blocks, max_seqs, token_budget
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.slots = list(range(max_seqs - 1, -1, -1))

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def decodes(self) -> list[Sequence]:
        """The sequences that get one token now, each with room for it; may preempt."""
        for sequence in [s for s in self.running if s.decoding]:
            if sequence in self.running:  # an earlier one may have taken its blocks
                self._grow(sequence, len(sequence.tokens))
        return [s for s in self.running if s.decoding]

    def prefills(self, budget: int) -> Iterator[tuple[Sequence, int]]:
        """(sequence, how many of its tokens to compute now) within ``budget`` tokens, admitting waiting ones."""
        for sequence in [s for s in self.running if not s.decoding]:
            if budget <= 0:
                return
            count = min(budget, len(sequence.tokens) - sequence.done)
            if sequence in self.running and self._grow(sequence, sequence.done + count):
                budget -= count
                yield sequence, count
        while budget > 0 and self.waiting and self.slots:
            sequence = self.waiting.popleft()
            self._admit(sequence)
            count = min(budget, len(sequence.tokens) - sequence.done)
            if not self._room(sequence, sequence.done + count):
                self._stop(sequence)
                self.waiting.appendleft(sequence)
                return
            if not sequence.computed:  # one put back finds its own blocks, which tells nothing of reuse
                self.blocks.counts.queries += len(sequence.tokens) if self.blocks.reuse else 0
                self.blocks.counts.hits += sequence.done
            self.running.append(sequence)
            budget -= count
            yield sequence, count

    def finish(self, sequence: Sequence) -> None:
        """A sequence that ended or was aborted gives everything back."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._stop(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def _admit(self, sequence: Sequence) -> None:
        """A state slot, and whatever blocks of its prefix are known."""
        sequence.slot = self.slots.pop()
        if self.blocks.reuse:
            known = (len(sequence.tokens) - 1) // self.blocks.size  # at least one token is left to compute
            self.blocks.extend(sequence.keys, sequence.tokens, known)
            sequence.blocks, sequence.restore = self.blocks.match(sequence.keys[:known])
        sequence.done = len(sequence.blocks) * self.blocks.size

    def advance(self, sequence: Sequence, count: int) -> None:
        """``count`` more tokens of a running sequence are in the cache; with reuse its full blocks are known now."""
        again = min(sequence.done + count, sequence.computed) - sequence.done
        self.blocks.counts.recomputed += max(again, 0)
        sequence.done += count
        sequence.computed = max(sequence.computed, sequence.done)
        full = sequence.done // self.blocks.size
        if self.blocks.reuse and full * self.blocks.size > sequence.done - count:
            self.blocks.extend(sequence.keys, sequence.tokens, full)
            self.blocks.keep(sequence.blocks, sequence.keys[:full])

    def slots_in_use(self) -> tuple[int, int]:
        """Token slots of the blocks that running sequences hold, and how many of those hold no token."""
        size = self.blocks.size
        return self.blocks.used * size, sum(len(s.blocks) * size - s.done for s in self.running)

    def _room(self, sequence: Sequence, tokens: int) -> bool:
        """Blocks for ``tokens`` tokens, taking nothing from anybody."""
        missing = -(-tokens // self.blocks.size) - len(sequence.blocks)
        found = self.blocks.take(max(missing, 0))
        sequence.blocks += found or ()
        return found is not None

    def _grow(self, sequence: Sequence, tokens: int) -> bool:
        """Blocks for ``tokens`` tokens, preempting the youngest; False when ``sequence`` itself had to give way."""
        while not self._room(sequence, tokens):
            victim = self.running[-1]
            self.running.remove(victim)
            self._stop(victim)
            self.waiting.appendleft(victim)
            self.blocks.counts.preemptions += 1
            if victim is sequence:
                return False
        return True

    def _stop(self, sequence: Sequence) -> None:
        self.blocks.release(sequence.blocks)
        self.slots.append(sequence.slot)
        sequence.blocks, sequence.slot, sequence.done, sequence.restore = [], -1, 0, None


def places(slot: int, blocks: list[int], size: int, start: int, count: int) -> Places:
    """Where ``count`` new tokens of the sequence in a state ``slot`` and all before them lie."""
    table = torch.tensor([blocks])
    past = (table[:, :, None] * size + torch.arange(size)).flatten(1)[:, : start + count]
    return Places(past[0, start:], torch.arange(start, start + count), table, size, past, torch.tensor([slot]))


def step_rows(sequences: list[Sequence]) -> Tensor:
    """[Q, 3 + B] on the host: each sequence's last token, state slot, position and blocks (see `model.Step.of`);
    shorter rows repeat their first block."""
    longest = max(len(s.blocks) for s in sequences)
    rows = [[s.tokens[-1], s.slot, s.done, *s.blocks, *s.blocks[:1] * (longest - len(s.blocks))] for s in sequences]
    return torch.tensor(rows, device="cpu")
