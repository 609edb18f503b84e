"""Two widths by context length: a position is computed by the width of its length, however it comes to be computed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from autotune.runtimes.native.cache import LatentPool
from autotune.runtimes.native.engine import Engine
from autotune.runtimes.native.inspect import packed, weight_bytes
from autotune.runtimes.native.model import LinearAttention, Segment
from autotune.runtimes.native.quant.bias import Biased
from autotune.runtimes.native.scheduler import places
from autotune.setting import reference_model
from search_spaces import load

SPACE = load("native").narrow({"cores": 2, "layers": 4, "experts": 8})
FOUR = {"bits_attention": 4, "bits_experts": 4, "bits_lm_head": 4, "bits_shared": 8}
EIGHT = dict.fromkeys(FOUR, 8)
START = 70
TEXT = [int(token) for token in np.random.default_rng(5).integers(32, 120, 200)]


def engine(widths: dict[str, int], long: int = 0, **knobs: Any) -> Engine:
    config = dict(SPACE.complete({"kv_tokens": 1024, "kv_dtype": "fp32", **widths}))
    return Engine(reference_model(), {**config, "bits_long": long, "bits_long_from": START, **knobs})


def copy_pools(source: Engine, target: Engine) -> None:
    for mine, theirs in zip(target.decoder.layers, source.decoder.layers, strict=True):
        a, b = mine.attention.pool, theirs.attention.pool
        for name in ("latent", "pooled", "tail") if isinstance(a, LatentPool) else ("conv", "state"):
            getattr(a, name).copy_(getattr(b, name))


def teacher_forced(running: Engine, start: int, stop: int) -> torch.Tensor:
    """Log-probabilities of TEXT[start:stop], over what the pools already hold."""
    blocks = list(range(-(-len(TEXT) // running.blocks.size)))
    if start == 0:
        running.decoder.clear_state(0)
    at = Segment(0, places(0, blocks, running.blocks.size, start, stop - start))
    return running.decoder.prefill(torch.tensor(TEXT[start:stop]), at, every=True)[0].log_softmax(-1)


def test_positions_before_and_after_the_border_have_their_own_width() -> None:
    found = torch.from_numpy(engine(FOUR, 8).score([TEXT], 288)[0].logprobs)
    narrow, wide = engine(FOUR), engine(EIGHT)
    before = teacher_forced(narrow, 0, START)
    copy_pools(narrow, wide)
    after = teacher_forced(wide, START, len(TEXT) - 1)
    wanted = torch.cat([before, after]).gather(1, torch.tensor(TEXT[1:])[:, None])[:, 0]
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)
    head, whole = (torch.from_numpy(s.logprobs) for s in engine(FOUR).score([TEXT[: START + 1], TEXT], 288))
    assert torch.equal(found[:START], head)
    assert (found[START:] - whole[START:]).abs().max() > 1e-3


def test_what_has_the_width_already_is_shared_and_both_copies_are_counted() -> None:
    running, narrow, wide = engine(FOUR, 8), engine(FOUR), engine(EIGHT)
    short, long = running.lengths.decoders
    one, other = weight_bytes(narrow.decoder), weight_bytes(wide.decoder)
    doubled = {"attention", "experts", "lm_head"}
    wanted = {group: one[group] + (other[group] if group in doubled else 0) for group in one}
    assert weight_bytes(short, long) == wanted
    assert running.counters()["weight_bytes"] == sum(wanted.values())
    assert running.counters()["cache_bytes"] == narrow.counters()["cache_bytes"]
    shared = {key for (key, a), (_, b) in zip(packed(short), packed(long), strict=True) if a is b}
    assert shared == {"0.dense", "1.shared", "2.shared", "3.shared"}
    assert short.embed is long.embed and short.norm is long.norm
    for a, b in zip(short.layers, long.layers, strict=True):
        assert a.attention.pool is b.attention.pool and a.hc is b.hc
        apart = {name for name, part in a.attention.parts.items() if part is not b.attention.parts[name]}
        assert apart == ({"qkv", "o"} if isinstance(a.attention, LinearAttention) else {"a", "q_b", "o"})


def test_effective_shows_both_widths() -> None:
    found = engine(FOUR, 8).effective()
    assert (found["bits_long"], found["bits_long_from"]) == (8, START)
    assert found["bits_stored"]["3.experts"] == 4 and found["bits_stored_long"]["3.experts"] == 8
    assert found["bits_stored_long"]["0.dense"] == 16 and found["kernels"] == "fp32,int4,int8"
    assert engine(FOUR).effective()["bits_long"] == 0 and "bits_stored_long" not in engine(FOUR).effective()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Below the border, just under it (crossed while decoding), far beyond it, and a repetition."""
    source = random.Random(1)
    texts = [[source.randrange(32, 120) for _ in range(n)] for n in (9, START - 4, 150, START)]
    return [*texts, texts[2]]


@pytest.fixture(scope="module")
def alone(prompts: list[list[int]], run: Callable[..., list[list[int]]]) -> list[list[int]]:
    running = engine(FOUR, 8)
    return [run(running, [prompt], 10)[0] for prompt in prompts]


@pytest.mark.parametrize(
    ("knobs", "counter"),
    [
        ({"token_budget": 64, "max_seqs": 16}, "decode_tokens"), ({"prefix_reuse": True}, "prefix_hits"),
        ({"max_seqs": 2, "prefix_reuse": True}, "prefix_hits"), ({"kv_tokens": 256}, "preemptions"),
        ({"kv_tokens": 256, "prefix_reuse": True}, "preemptions"), ({"graphs": "fused"}, "decode_tokens"),
    ],
)  # fmt: skip
def test_batching_chunking_reuse_and_preemption_change_no_token(
    knobs: dict[str, Any],
    counter: str,
    prompts: list[list[int]],
    alone: list[list[int]],
    run: Callable[..., list[list[int]]],
) -> None:
    running = engine(FOUR, 8, **knobs)
    assert run(running, prompts, 10) == alone
    assert run(running, prompts, 10) == alone
    assert running.counters()[counter] > 0


def test_both_copies_are_compensated_when_that_is_asked_for() -> None:
    short, long = engine(FOUR, 8, bits_compensation="bias").lengths.decoders
    pairs = list(zip(packed(short), packed(long), strict=True))
    assert all(isinstance(a, Biased) == isinstance(b, Biased) == (key != "0.dense") for (key, a), (_, b) in pairs)
    apart = [(a, b) for (_, a), (_, b) in pairs if a is not b]
    assert apart and all(not torch.equal(a.bias, b.bias) for a, b in apart)


def test_the_space_offers_it_only_where_it_means_something() -> None:
    assert "bits_long" not in SPACE.default()
    assert "bits_long_from" not in SPACE.complete({"bits_experts": 4})
    assert not SPACE.broken(SPACE.complete({"bits_experts": 4, "bits_long": 8}))
    eight = {f"bits_{group}": 8 for group in ("attention", "dense", "experts", "shared", "embedding", "lm_head")}
    assert SPACE.broken(SPACE.complete({**eight, "bits_long": 8}))
