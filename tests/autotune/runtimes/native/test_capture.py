"""Padded and replayed decode steps give the tokens of unpadded ones; CUDA itself is checked in tests/device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from autotune.metrics import derive
from autotune.outcome import Status
from autotune.runtimes.native.capture import Buckets, CapturedSteps, Frame, GraphError
from autotune.runtimes.native.engine import Engine
from autotune.runtimes.native.scheduler import step_rows
from autotune.runtimes.native.worker import classify
from autotune.setting import reference_model
from search_spaces import load

SPACE = load("native").narrow({"cores": 2, "layers": 4, "experts": 8})


class Rerun:
    """A capture that runs its recording again: what is static under it would be static in a graph, too."""

    def record(self, run: Callable[[], Tensor]) -> Tensor:
        self.run, self.out = run, run()
        return self.out

    def replay(self) -> None:
        self.out.copy_(self.run())


class Reruns:
    """Makes them; the one numbered ``failing`` runs out of memory as CUDA says it."""

    def __init__(self, failing: int = -1) -> None:
        self.made, self.failing, self.free = 0, failing, 1 << 20

    def new(self) -> Rerun:
        self.made += 1
        self.free -= 1000
        if self.made == self.failing:
            raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return Rerun()

    def free_bytes(self) -> int:
        return self.free


def capture(engine: Engine, up_to: int, every: bool, recorder: Reruns) -> CapturedSteps:
    buckets = Buckets.of(up_to, engine.blocks.count, engine.blocks.size, every)
    return CapturedSteps(engine.decoder, engine.run.frame, engine.run.send, buckets, recorder)


def pair(up_to: int, every: bool, **knobs: Any) -> tuple[Engine, Engine]:
    """An engine, and another whose decode steps are padded and replayed."""
    config = SPACE.complete({"kv_tokens": 1024, "kv_dtype": "fp32", **knobs})
    plain, captured = Engine(reference_model(), config), Engine(reference_model(), config)
    captured.run = capture(captured, up_to, every, Reruns())
    return plain, captured


@given(st.data())
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_padded_step_gives_the_tokens_of_an_unpadded_one(run: Any, data: st.DataObject) -> None:
    knobs = {
        name: data.draw(st.sampled_from(SPACE.knob(name).domain.values), label=name)
        for name in ("attention", "kv_dtype", "state_dtype", "prefix_reuse", "block_size")
    }
    knobs["max_seqs"] = data.draw(st.sampled_from([2, 4, 8]))
    up_to, every = data.draw(st.sampled_from([1, 2, 3, 8])), data.draw(st.booleans())
    shared = data.draw(st.lists(st.integers(4, 250), max_size=80))
    tails = st.lists(st.integers(4, 250), min_size=1, max_size=200)
    prompts = [shared + tail for tail in data.draw(st.lists(tails, min_size=1, max_size=4))]
    plain, captured = pair(up_to, every, **knobs)
    for _ in range(2):  # the second time over whatever prefixes the first one left
        assert run(captured, prompts, 8) == run(plain, prompts, 8)
    scores = [engine.score([[*prompts[0], 7]], 3)[0].logprobs for engine in (captured, plain)]
    assert (scores[0] == scores[1]).all(), "padding wrote where sequences live"


@pytest.mark.parametrize("attention", ["absorbed", "expanded", "sparse"])
@pytest.mark.parametrize("tokens", [100, 640])
def test_the_logits_of_every_bucket_are_the_eager_ones(run: Any, attention: str, tokens: int) -> None:
    """Below and beyond the indexer's selection, where the sparse form gathers other things than it masks."""
    plain, captured = pair(4, True, attention=attention)
    for engine in (plain, captured):
        for number in range(3):
            engine.add(number, [(7 * number + i) % 250 for i in range(tokens // (number + 1))], 9, ignore_eos=True)
        while engine.scheduler.waiting or any(not s.decoding for s in engine.scheduler.running):
            engine.step()
    for width in (1, 2, 3):
        rows = step_rows(plain.scheduler.running[:width])
        wanted, found = plain.run(rows), captured.run(step_rows(captured.scheduler.running[:width]))
        assert (wanted - found).abs().max() <= 1e-4


def test_a_batch_beyond_the_largest_bucket_runs_eagerly_and_is_counted(run: Any) -> None:
    plain, captured = pair(2, False, max_seqs=4)
    prompts = [list(range(10 + n, 40 + n)) for n in range(3)]
    assert run(captured, prompts, 6) == run(plain, prompts, 6)
    assert captured.run.counters()["eager_steps"] == 5 and captured.run.counters()["graph_steps"] == 0
    captured.reset()
    run(captured, prompts[:1], 6)
    counts = captured.counters()
    assert counts["eager_steps"] == 0 and counts["graph_steps"] == 5 and counts["graph_padding_rows"] == 0
    assert derive([], 1.0, counters=counts)["padding_share"] == 0
    captured.reset()
    padded = pair(4, False)[1]
    run(padded, prompts, 6)
    assert derive([], 1.0, counters=padded.counters())["padding_share"] == 0.25


def test_capturing_is_counted_apart_and_largest_first() -> None:
    engine = pair(1, False)[0]
    recorder = Reruns()
    found = capture(engine, 3, True, recorder)
    order = list(found._graphs)
    assert order[0] == (3, 64) and order[-1] == (1, 16)
    assert recorder.made == 9
    assert found.counters()["graph_bytes"] == 9000 and found.counters()["graph_seconds"] > 0


def test_a_failed_capture_names_its_bucket_and_phase() -> None:
    engine = pair(1, False)[0]
    with pytest.raises(GraphError, match=r"2 sequences × 1024 tokens.*out of memory") as caught:
        capture(engine, 4, False, Reruns(failing=2))
    assert classify(caught.value, "launch") == (Status.OOM, "graphs", f"GraphError: {caught.value}")
    other = GraphError("capturing failed")
    assert classify(other, "launch")[:2] == (Status.CRASH, "graphs")
    other.__cause__ = RuntimeError("CUDA error: operation not permitted when stream is capturing")
    assert classify(other, "launch")[:2] == (Status.UNSUPPORTED, "graphs")


@given(
    st.integers(1, 16), st.integers(1, 600), st.sampled_from([16, 32, 64]), st.booleans(), st.integers(1, 20), st.data()
)
def test_the_bucket_of_a_step_is_the_smallest_that_holds_it(
    up_to: int, blocks: int, size: int, every: bool, rows: int, data: st.DataObject
) -> None:
    buckets, wide = Buckets.of(up_to, blocks, size, every), data.draw(st.integers(1, blocks))
    found = buckets.fit(rows, wide)
    assert (found is None) == (rows > up_to)
    if found:
        assert rows <= found[0] < 2 * rows and wide <= found[1] <= blocks
        assert not every or found[1] < max(2 * wide, 2 * 256 // size)
        frame = Frame(size, 9, blocks)
        padded = frame.pad(torch.full((rows, 3 + wide), 5), *found)
        assert padded.shape == (found[0], 3 + found[1])
        assert (padded[:rows, : 3 + wide] == 5).all() and (padded[:rows, 3 + wide :] == blocks).all()
        assert padded[rows:, 1].eq(9).all() and padded[rows:, 3:].eq(blocks).all() and not padded[rows:, 2].any()
