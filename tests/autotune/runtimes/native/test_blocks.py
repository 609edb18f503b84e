"""Blocks and scheduler over random requests: who holds what, what may be given up, and that no sequence is mixed."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.runtimes.native.blocks import Blocks
from autotune.runtimes.native.scheduler import Scheduler, Sequence

SIZE = 4


class Machine:
    """A scheduler without a model: a slot holds the prefix that it was written with, a state the one it stands for."""

    def __init__(self, count: int, reuse: bool, capacity: int, max_seqs: int, budget: int) -> None:
        self.blocks = Blocks(count, SIZE, reuse, capacity)
        self.scheduler = Scheduler(self.blocks, max_seqs, budget)
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}
        self.finished: list[Sequence] = []

    def step(self) -> None:
        for sequence in self.scheduler.decodes():
            self._compute(sequence, 1)
        for sequence, count in self.scheduler.prefills(self.scheduler.token_budget):
            if sequence.restore is not None:
                assert sequence.restore == tuple(sequence.tokens[: sequence.done])
                sequence.restore = None
            self._compute(sequence, count)
        self.check()

    def _compute(self, sequence: Sequence, count: int) -> None:
        tokens, start = tuple(sequence.tokens), sequence.done
        for at in range(start, start + count):
            self.slots[sequence.blocks[at // SIZE], at % SIZE] = tokens[: at + 1]
        self.scheduler.advance(sequence, count)
        if self.blocks.reuse and self.blocks.capacity:
            for end in range(start - start % SIZE + SIZE, sequence.done + 1, SIZE):
                self.blocks.checkpoint(sequence.blocks[end // SIZE - 1], tokens[:end])  # type: ignore[arg-type]
        if sequence.done == len(tokens):
            sequence.tokens.append(sum(tokens) % 3)
            if sequence.produced == sequence.max_tokens:
                self.finished.append(sequence)
                self.scheduler.finish(sequence)

    def check(self) -> None:
        blocks, running = self.blocks, self.scheduler.running
        for sequence in running:
            held = [self.slots[sequence.blocks[at // SIZE], at % SIZE] for at in range(sequence.done)]
            assert held == [tuple(sequence.tokens[: at + 1]) for at in range(sequence.done)]
        users = Counter(block for sequence in running for block in sequence.blocks)
        assert [entry.users for entry in blocks.table] == [users[block] for block in range(blocks.count)]
        unused = set(blocks.kept.values()) - set(users)
        assert sorted([*blocks.free, *users, *unused]) == list(range(blocks.count))
        assert blocks.used == len(users) and len(blocks.states) <= blocks.capacity
        points = Counter(index for block in blocks.states for index in blocks._chain(block))
        assert [entry.points for entry in blocks.table] == [points[block] for block in range(blocks.count)]
        assert unused <= set(points)  # nothing is kept that cannot be continued from
        assert all(blocks.table[block].key == key for key, block in blocks.kept.items())
        slots = [sequence.slot for sequence in running]
        assert sorted(slots + self.scheduler.slots) == list(range(self.scheduler.max_seqs))
        held_slots, empty = self.scheduler.slots_in_use()
        assert 0 <= empty <= held_slots == len(users) * SIZE


def prompt(branch: int, length: int) -> list[int]:
    """Prompts of equal branches share everything, of others the first six tokens."""
    return [*[7] * min(length, 6), *[branch] * max(length - 6, 0)]


EVENT = st.tuples(st.sampled_from(["add", "add", "step", "step", "step", "abort", "clear"]), st.integers(0, 59))
SHAPE = st.tuples(st.integers(7, 14), st.booleans(), st.sampled_from([0, 1, 3, 99]), st.integers(1, 4))


@given(SHAPE, st.integers(1, 20), st.lists(EVENT, max_size=80))
@settings(max_examples=250, deadline=None)
def test_blocks_are_never_lost_mixed_or_kept_in_vain(
    shape: tuple[Any, ...], budget: int, events: list[tuple[str, int]]
) -> None:
    machine = Machine(*shape, budget)
    added: list[Sequence] = []
    for event, number in events:
        if event == "add":
            length = 1 + number % 20
            added.append(Sequence(len(added), prompt(number % 3, length), length, 1 + number % 8))
            machine.scheduler.add(added[-1])
        elif event == "step":
            machine.step()
        elif event == "abort" and added:
            machine.scheduler.finish(added[number % len(added)])
        elif event == "clear":
            machine.blocks.clear()
        machine.check()
    for _ in range(3000):
        if not machine.scheduler.running and not machine.scheduler.waiting:
            break
        machine.step()
    assert not machine.scheduler.running and not machine.scheduler.waiting
    assert machine.blocks.used == 0
    machine.blocks.clear()
    assert len(machine.blocks.free) == machine.blocks.count


def filled(count: int, capacity: int, *prompts: list[int]) -> Machine:
    """A machine that has run each prompt alone to its end."""
    machine = Machine(count, True, capacity, 4, 64)
    for tokens in prompts:
        machine.scheduler.add(Sequence(len(machine.finished), list(tokens), len(tokens), 1))
        while machine.scheduler.running or machine.scheduler.waiting:
            machine.step()
    return machine


def test_the_least_recently_used_prefix_is_given_up_from_its_end() -> None:
    first, second = [1] * 12, [2] * 12
    machine = filled(8, 99, first, second, first, [3] * 12)
    keys: list[bytes] = []
    machine.blocks.extend(keys, first, 3)
    assert all(key in machine.blocks.kept for key in keys)
    keys = []
    machine.blocks.extend(keys, second, 3)
    assert [key in machine.blocks.kept for key in keys] == [True, True, False]
    assert machine.blocks.counts.evictions == 1


def test_blocks_beyond_the_last_checkpoint_are_free() -> None:
    machine = filled(8, 1, [1] * 12, [2] * 8)
    assert len(machine.blocks.kept) == 2 and len(machine.blocks.free) == 6
    assert machine.blocks.counts.state_evictions == 4


def test_equal_prompts_side_by_side_end_in_the_same_blocks() -> None:
    machine = Machine(8, True, 99, 2, 64)
    for number in range(2):
        machine.scheduler.add(Sequence(number, [1] * 13, 13, 5))
    machine.step()
    one, other = machine.scheduler.running
    assert one.blocks[:3] == other.blocks[:3] and one.blocks[3] != other.blocks[3]
    assert machine.blocks.used == 5


def test_what_is_computed_again_after_a_preemption_is_counted() -> None:
    machine = Machine(4, False, 0, 2, 64)
    for number in range(2):
        machine.scheduler.add(Sequence(number, [number] * 7, 7, 6))
    while machine.scheduler.running or machine.scheduler.waiting:
        machine.step()
    counts = machine.blocks.counts
    assert counts.preemptions == 1 and counts.recomputed == 8
    assert counts.queries == counts.hits == 0 and counts.peak_blocks == 4


def test_only_first_lookups_count_as_hits() -> None:
    machine = filled(8, 99, [1] * 12, [1] * 12)
    assert (machine.blocks.counts.queries, machine.blocks.counts.hits) == (24, 8)
