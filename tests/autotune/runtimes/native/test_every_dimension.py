"""Attention, graphs, cache and layout together against transformers: every pair of values appears in some launch."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.runtimes.base import Endpoint, Generation
from autotune.runtimes.native import NativeRuntime
from search_spaces import Space, load

FACTORS: dict[str, tuple[Any, ...]] = {
    "attention": ("expanded", "absorbed", "sparse"),
    "graphs": ("eager", "compiled", "fused"),
    "kv_splits": (1, 4),
    "kda_chunk": (16, 64),
    "prefix_reuse": (False, True),
    "block_size": (16, 32),
    "token_budget": (64, 512),
    "layout": ((1, 1, 1, 1), (2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (2, 1, 1, 2), (2, 2, 1, 1), (2, 1, 2, 2)),
}
"""A layout is (tp, pp, dp, ep)."""
LENGTHS = (5, 70, 33)
Answers = tuple[torch.Tensor, list[list[int]]]


def covering(factors: dict[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Rows in which each pair of values of two factors appears, chosen greedily from random ones."""
    pairs = {
        ((a, x), (b, y)) for a, b in itertools.combinations(factors, 2) for x in factors[a] for y in factors[b]
    }  # fmt: skip
    source, rows = random.Random(0), []
    while pairs:
        tries = [{name: source.choice(values) for name, values in factors.items()} for _ in range(200)]
        covered = [{pair for pair in pairs if all(row[name] == value for name, value in pair)} for row in tries]
        best = max(range(len(tries)), key=lambda i: len(covered[i]))
        pairs -= covered[best]
        rows.append(tries[best])
    return rows


ROWS = covering(FACTORS)


@pytest.fixture(scope="module")
def space() -> Space:
    return load("native").narrow({"cores": 4, "devices": 4, "layers": 4, "experts": 8})


@pytest.fixture(scope="module")
def sequence() -> list[int]:
    source = random.Random(1)
    return [source.randrange(4, 96) for _ in range(150)]


@pytest.fixture(scope="module")
def wanted(tiny: Path, oracle: Any, sequence: list[int]) -> Answers:
    """Log-probabilities [T - 1, V] of the sequence and the greedy tokens after its beginnings, from transformers."""
    logits: Callable[[list[int]], torch.Tensor] = oracle(tiny)
    tokens = []
    for length in LENGTHS:
        ids = sequence[:length]
        for _ in range(8):
            ids = [*ids, int(logits(ids)[-1].argmax())]
        tokens.append(ids[length:])
    return logits(sequence)[:-1].log_softmax(-1), tokens


def answers(endpoint: Endpoint, sequence: list[int]) -> Answers:
    """What `wanted` holds, from a running engine: all prompts at once, and again, so that reuse has what to reuse."""

    async def one(length: int) -> list[int]:
        stream = endpoint.stream(Generation(tuple(sequence[:length]), 8))
        return [token async for chunk in stream for token in chunk.tokens]

    async def all_of_them() -> list[list[int]]:
        return list(await asyncio.gather(*map(one, LENGTHS)))

    first, second = (asyncio.run(all_of_them()) for _ in range(2))
    assert first == second
    score = endpoint.score([sequence], 96)[0]
    found = torch.full((len(sequence) - 1, 96), torch.nan)
    found.scatter_(1, torch.from_numpy(score.ids).long(), torch.from_numpy(score.top))
    return found, first


def launched(tiny: Path, space: Space, row: dict[str, Any], sequence: list[int], log: Path) -> Answers:
    layout = dict(zip(("tp", "pp", "dp", "ep"), row["layout"], strict=True))
    knobs = {name: value for name, value in row.items() if name != "layout"} | layout
    if row["attention"] == "expanded":
        del knobs["kv_splits"]
    exact = {"kv_dtype": "fp32", "state_dtype": "fp32", "compute": "fp32", "kv_tokens": 1024}
    with NativeRuntime(tiny).launch(space.complete({**knobs, **exact}), log) as endpoint:
        return answers(endpoint, sequence)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(str(value) for value in row.values()))
def test_logits_and_greedy_tokens_are_those_of_transformers(
    tiny: Path, space: Space, sequence: list[int], wanted: Answers, row: dict[str, Any], tmp_path: Path
) -> None:
    found, tokens = launched(tiny, space, row, sequence, tmp_path / "log")
    assert (found - wanted[0]).abs().max() <= 1e-4
    assert tokens == wanted[1]
    if row["layout"] != (1, 1, 1, 1):
        alone = launched(tiny, space, {**row, "layout": (1, 1, 1, 1)}, sequence, tmp_path / "alone")
        assert (found - alone[0]).abs().max() <= 1e-5


def test_the_rows_cover_every_pair() -> None:
    for a, b in itertools.combinations(FACTORS, 2):
        seen = {(row[a], row[b]) for row in ROWS}
        assert seen == set(itertools.product(FACTORS[a], FACTORS[b]))
