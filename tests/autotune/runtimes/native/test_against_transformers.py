"""The engine's logits and greedy tokens against transformers, on random and on the trained weights."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.runtimes.native.engine import Engine
from autotune.setting import reference_model
from search_spaces import Config, load

SPACE = load("native").narrow({"cores": 2})
EXACT = {"kv_dtype": "fp32", "state_dtype": "fp32", "compute": "fp32", "kv_tokens": 2048}
RAGGED = (1, 3, 15, 16, 17, 33, 64, 70, 150)
"""Prompt lengths around chunk, block and pool borders, and beyond index_topk."""


def config(**knobs: Any) -> Config:
    return SPACE.complete({**EXACT, **knobs})


def prompts(vocabulary: int, lengths: tuple[int, ...] = RAGGED) -> list[list[int]]:
    source = random.Random(1)
    return [[source.randrange(4, vocabulary) for _ in range(n)] for n in lengths]


@pytest.fixture(scope="module")
def tiny_oracle(tiny: Path, oracle: Any) -> Any:
    return oracle(tiny)


def greedy(logits: Any, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(logits(ids)[-1].argmax()))
    return ids[len(prompt) :]


@pytest.fixture(scope="module")
def expected(tiny_oracle: Any) -> list[list[int]]:
    return [greedy(tiny_oracle, prompt, 12) for prompt in prompts(96)]


@pytest.mark.parametrize(("attention", "chunk"), itertools.product(("expanded", "absorbed", "sparse"), (16, 32, 64)))
def test_logits_agree_over_a_context_beyond_the_selection(
    tiny: Path, tiny_oracle: Any, attention: str, chunk: int
) -> None:
    engine = Engine(tiny, config(attention=attention, kda_chunk=chunk))
    (ids,) = prompts(96, (300,))
    score = engine.score([ids], 96)[0]
    wanted = tiny_oracle(ids)[:-1].log_softmax(-1)
    found = torch.full_like(wanted, torch.nan)
    found.scatter_(1, torch.from_numpy(score.ids).long(), torch.from_numpy(score.top))
    assert (found - wanted).abs().max() <= 1e-4
    actual = wanted.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert (torch.from_numpy(score.logprobs) - actual).abs().max() <= 1e-4


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"attention": "expanded", "max_seqs": 4, "token_budget": 64},
        {"attention": "sparse", "token_budget": 64, "kda_chunk": 16, "block_size": 32},
        {"attention": "sparse", "kv_splits": 4},
        {"attention": "absorbed", "kv_splits": 8, "max_seqs": 16},
        {"attention": "sparse", "max_seqs": 16, "prefix_reuse": True},
        {"max_seqs": 1, "prefix_reuse": True, "kda_chunk": 32, "block_size": 64},
        {"max_seqs": 16, "kv_tokens": 192, "token_budget": 400},
        {"attention": "expanded", "max_seqs": 8, "kv_tokens": 256, "prefix_reuse": True, "kda_chunk": 16},
    ],
    ids=str,
)
def test_a_ragged_batch_gives_the_greedy_tokens(
    tiny: Path, run: Any, expected: list[list[int]], knobs: dict[str, Any]
) -> None:
    engine = Engine(tiny, Config({**config(), **knobs}))
    assert run(engine, prompts(96), 12) == expected
    again = run(engine, prompts(96), 12)
    assert again == expected  # with reuse this one continues from kept prefixes
    if knobs.get("prefix_reuse") and knobs.get("kv_tokens") is None:
        assert engine.counters()["prefix_hits"] > 0


@pytest.mark.parametrize("reuse", [False, True])
def test_a_cache_that_runs_out_preempts_and_gives_the_same_tokens(tiny: Path, run: Any, reuse: bool) -> None:
    lengths = (40, 60, 33, 50, 1)
    wanted = run(Engine(tiny, config()), prompts(96, lengths), 60)
    small = Engine(tiny, Config({**config(prefix_reuse=reuse), "kv_tokens": 160}))
    assert run(small, prompts(96, lengths), 60) == wanted
    assert small.counters()["preemptions"] > 0


def test_decoding_logits_stay_close_to_the_oracle(tiny: Path, tiny_oracle: Any) -> None:
    """The decode path alone, against teacher-forced logits: a greedy token hides small errors."""
    engine = Engine(tiny, config(attention="sparse", max_seqs=2))
    seen = []
    decode = engine.decoder.decode
    engine.decoder.decode = lambda *args: seen.append(decode(*args)) or seen[-1]  # type: ignore[method-assign]
    batch = prompts(96, (37, 90))
    outputs = {0: list(batch[0]), 1: list(batch[1])}
    for number, prompt in enumerate(batch):
        engine.add(number, prompt, 40, ignore_eos=True)
    while engine.busy:
        for number, tokens, _ in engine.step():
            outputs[number].extend(tokens)
    for number, prompt in enumerate(batch):
        wanted = tiny_oracle(outputs[number])[len(prompt) : -1]
        found = torch.stack([logits[number] for logits in seen])
        assert (found - wanted).abs().max() <= 1e-4


def test_the_trained_model_agrees(oracle: Any, run: Any) -> None:
    folder = reference_model()
    logits = oracle(folder)
    text = (folder.parent / "heldout.txt").read_bytes()
    ids = list(text[:300])
    wanted = logits(ids)[:-1].log_softmax(-1)
    for attention in ("expanded", "absorbed", "sparse"):
        engine = Engine(folder, config(attention=attention))
        score = engine.score([ids], 10**6)[0]
        found = torch.zeros_like(wanted)
        found.scatter_(1, torch.from_numpy(score.ids).long(), torch.from_numpy(score.top))
        assert (found - wanted).abs().max() <= 1e-4
    batch = [list(text[i * 400 : i * 400 + n]) for i, n in enumerate((5, 64, 170))]
    assert run(engine, batch, 8) == [greedy(logits, prompt, 8) for prompt in batch]
