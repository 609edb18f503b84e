"""A whole engine on Triton kernels, in the interpreter, gives the tokens of the reference kernels."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.runtimes.native.engine import Engine
from autotune.runtimes.native.kernels import select
from search_spaces import load

SPACE = load("native").narrow({"cores": 2})
SOURCE = random.Random(3)
PROMPTS = [[SOURCE.randrange(4, 96) for _ in range(length)] for length in (1, 11)]
"""One is longer than the selection of 8."""
CASES = [
    {"attention": "expanded", "kv_dtype": "fp32"},
    {"attention": "absorbed", "kv_dtype": "int8"},
    {"attention": "sparse", "kv_dtype": "fp32", "kda_chunk": 16},
    {"attention": "sparse", "kv_dtype": "bf16", "kv_splits": 4},
]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("knobs", CASES, ids=str)
def test_triton_kernels_give_the_greedy_tokens_of_the_reference(tinier: Path, run: Any, knobs: dict[str, Any]) -> None:
    config = SPACE.complete({"kv_tokens": 1024, "compute": "fp32", **knobs})
    wanted = Engine(tinier, config, _capability("reference", tinier, config))
    found = Engine(tinier, config, _capability("triton", tinier, config))
    for engine, name in ((wanted, "reference"), (found, "triton")):
        backends = engine.effective()["kernel_backends"]
        assert {backends[op] for op in select.TRITON} == {name}
    assert run(found, PROMPTS, 3) == run(wanted, PROMPTS, 3)
    reasons = wanted.effective()["kernel_refusals"]
    assert all("compiles for GPUs" in reasons[f"{op}=triton"] for op in select.TRITON)


def _capability(backend: str, folder: Path, config: Any) -> select.Capability:
    from autotune.runtimes.native.config import read_config

    here = select.here(read_config(folder), str(config["kv_dtype"]))
    return replace(here, interpreter=backend == "triton")
