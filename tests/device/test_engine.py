"""The whole engine on a real GPU: Triton against reference kernels, and captured decode steps against eager ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autotune.runtimes.native.config import read_config
from autotune.runtimes.native.engine import Engine
from autotune.runtimes.native.kernels import select
from autotune.setting import reference_model
from search_spaces import load

SPACE = load("native").narrow({"cores": 2, "layers": 4, "experts": 8, "cuda": True})
PROMPTS = [[7], list(b"The quick brown fox jumps over the lazy dog. " * 3), list(b"Once upon a time")]
WIDTHS: list[dict[str, Any]] = [
    {}, {"bits_experts": 8, "bits_attention": 8}, {"bits_experts": 4, "bits_shared": 4, "bits_attention": 4},
    {"bits_attention": 8, "activations": "int8_token"},
]  # fmt: skip


def engine(triton: bool, **knobs: Any) -> Engine:
    """In fp32, so that the order of sums seldom decides a token."""
    config = SPACE.complete({"kv_tokens": 2048, "compute": "fp32", "kv_dtype": "fp32", "bits_group_size": 32, **knobs})
    at = select.here(read_config(reference_model()), "fp32")
    return Engine(reference_model(), config, replace(at, triton=triton))


def generate(made: Engine, count: int = 12) -> list[list[int]]:
    outputs: dict[Any, list[int]] = {}
    for number, prompt in enumerate(PROMPTS):
        made.add(number, prompt, count, ignore_eos=True)
    while sum(map(len, outputs.values())) < count * len(PROMPTS):
        for number, tokens, _ in made.step():
            outputs.setdefault(number, []).extend(tokens)
    return [outputs[number] for number in range(len(PROMPTS))]


@pytest.mark.parametrize("attention", ["expanded", "absorbed", "sparse"])
@pytest.mark.parametrize("knobs", WIDTHS[:3], ids=str)  # torch's own int8 product takes no few rows on CUDA
def test_triton_gives_the_tokens_of_the_references(attention: str, knobs: dict[str, Any]) -> None:
    found, wanted = engine(True, attention=attention, **knobs), engine(False, attention=attention, **knobs)
    assert found.effective()["kernel_backends"]["products"] == "triton"
    assert generate(found) == generate(wanted)


@pytest.mark.parametrize("attention", ["expanded", "absorbed", "sparse"])
@pytest.mark.parametrize("knobs", WIDTHS, ids=str)
def test_a_captured_step_gives_the_tokens_of_an_eager_one(attention: str, knobs: dict[str, Any]) -> None:
    eager, captured = (engine(True, attention=attention, graphs=graphs, **knobs) for graphs in ("eager", "cuda"))
    assert generate(captured) == generate(eager)
    assert captured.counters()["graph_steps"] > 0
