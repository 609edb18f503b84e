"""Captured decode steps on a real device: the tokens of uncaptured ones, for every attention form and bucket."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from autotune.runtimes.native.engine import Engine
from autotune.setting import reference_model
from search_spaces import load

pytestmark = [pytest.mark.device, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]
SPACE = load("native").narrow({"cores": 2, "layers": 4, "experts": 8, "cuda": True})
TEXT = list((reference_model().parent / "heldout.txt").read_bytes()[:2000]) if torch.cuda.is_available() else []


def tokens(batch: int, **knobs: Any) -> tuple[list[list[int]], dict[str, float]]:
    engine = Engine(reference_model(), SPACE.complete({"kv_tokens": 4096, **knobs}))
    for number in range(batch):
        engine.add(number, TEXT[number * 90 : number * 90 + 30 + 37 * number], 24, ignore_eos=True)
    found: dict[int, list[int]] = {number: [] for number in range(batch)}
    while engine.busy:
        for number, produced, _ in engine.step():
            found[number].extend(produced)
    return list(found.values()), engine.counters()


@pytest.mark.parametrize("attention", ["absorbed", "expanded", "sparse"])
@pytest.mark.parametrize("batch", [1, 2, 3, 5, 8, 11])
@pytest.mark.parametrize("transfers", ["plain", "pinned", "zero_copy"])
def test_a_replayed_step_gives_the_tokens_of_an_uncaptured_one(attention: str, batch: int, transfers: str) -> None:
    usual = {"attention": attention, "max_seqs": 16, "kv_dtype": "fp32"}
    wanted, _ = tokens(batch, **usual)
    found, counts = tokens(
        batch, **usual, graphs="cuda", graph_batch=8, graph_contexts="buckets", transfers=transfers
    )  # fmt: skip
    assert found == wanted
    assert counts["graph_bytes"] > 0 and (counts["graph_steps"] > 0) == (batch <= 8)


def test_a_closed_engine_gives_its_memory_back() -> None:
    tokens(2)
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    tokens(4, graphs="cuda")
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before + (8 << 20)
