"""A thousand random requests through a cache ten times too small: the same tokens, nothing lost, nothing left over."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from autotune.metrics import derive
from autotune.runtimes.native.engine import Engine
from autotune.runtimes.native.kernels.cpu import library
from search_spaces import Config, load

EXACT = load("native").narrow({"cores": 2}).complete(
    {"kv_dtype": "fp32", "kda_chunk": 16, "block_size": 8, "token_budget": 128}
)  # fmt: skip
ROOMY, SMALL, REQUESTS, CLIENTS = 4096, 96, 1000, 32
GRAPHS = "fused" if library.library() else "eager"  # C kernels take a third of the time


def requests(seed: int) -> list[tuple[list[int], int]]:
    """(prompt, output tokens), at most 96 together; every second prompt begins with one of four shared prefixes."""
    source = random.Random(seed)
    shared = [[source.randrange(4, 96) for _ in range(length)] for length in (8, 17, 32, 40)]
    found = []
    for _ in range(REQUESTS):
        prompt = [source.randrange(4, 96) for _ in range(source.choice((1, 2, 5, 15, 16, 17, 33, 50)))]
        if source.random() < 0.5:
            prompt = [*source.choice(shared), *prompt][:80]
        found.append((prompt, source.randrange(1, 17)))
    return found


def tokens(engine: Engine, wanted: list[tuple[list[int], int]]) -> list[list[int]]:
    """What each request got; some are always under way or waiting, as of clients that wait for each answer."""
    found: dict[Any, list[int]] = {}
    while len(found) < len(wanted) or engine.busy:
        while len(found) < len(wanted) and len(engine.scheduler.running) + len(engine.scheduler.waiting) < CLIENTS:
            prompt, count = wanted[len(found)]
            engine.add(len(found), prompt, count, ignore_eos=True)
            found[len(found)] = []
        for number, got, _ in engine.step():
            found[number].extend(got)
    return list(found.values())


@pytest.fixture(scope="module")
def unbounded(tinier: Path) -> tuple[list[list[int]], float]:
    engine = Engine(tinier, Config({**EXACT, "max_seqs": CLIENTS, "kv_tokens": ROOMY}))
    return tokens(engine, requests(5)), engine.counters()["kv_peak_tokens"]


@pytest.mark.parametrize("knobs", [{}, {"prefix_reuse": True, "state_cache_mib": 1}], ids=str)
def test_a_thousand_requests_give_the_tokens_of_an_unbounded_cache(
    tinier: Path, unbounded: tuple[list[list[int]], float], knobs: dict[str, Any]
) -> None:
    wanted, peak = unbounded
    engine = Engine(tinier, Config({**EXACT, "max_seqs": CLIENTS, "kv_tokens": SMALL, "graphs": GRAPHS, **knobs}))
    found = tokens(engine, requests(5))
    assert [len(got) for got in found] == [count for _, count in requests(5)]
    assert found == wanted
    counters = engine.counters()
    assert peak >= 10 * SMALL and counters["preemptions"] > 100
    figures = derive([], 1.0, counters=counters)
    assert figures["kv_peak_fraction"] == 1 and 0 < figures["recomputed_fraction"] < 0.5
    assert figures["kv_fragmentation"] < 4 / 32  # half a block of eight in sequences of 32 tokens and more
    assert engine.blocks.used == 0 and sorted(engine.scheduler.slots) == list(range(CLIENTS))
    assert len(engine.blocks.free) + len(engine.blocks.kept) == engine.blocks.count
