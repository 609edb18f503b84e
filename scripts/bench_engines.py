"""The native engine, llama.cpp and transformers on the same reference checkpoint and the same requests, interleaved.

Requests come one after another, each a prompt of its own, on one thread. Prompt and generated tokens a second are given
as ratios to transformers with 95 % intervals over rounds. Needs the `train` and `llamacpp` extras; `--quick` takes
under a minute. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from autotune import stats
from autotune.corpus import heldout_text
from autotune.loadgen import event_loop
from autotune.runtimes.base import Endpoint, Generation, Runtime
from autotune.runtimes.native import NativeRuntime
from autotune.runtimes.server.llamacpp import LlamaCpp, usual_command
from autotune.runtimes.server.runtime import ServerRuntime
from autotune.setting import reference_model
from search_spaces import Config, load
from search_spaces.bits import LAYER_GROUPS, MODEL_GROUPS
from search_spaces.llamacpp import GROUPS

HOME = "transformers, fp32"
Speeds = tuple[float, float]
"""Prompt and generated tokens a second of one request."""


def oracle() -> Callable[[list[int], int], Speeds]:
    """transformers' own model, greedy, with its cache."""
    from transformers import Glm5NextForConditionalGeneration, logging

    logging.set_verbosity_error()
    model = Glm5NextForConditionalGeneration.from_pretrained(reference_model(), dtype=torch.float32).eval()

    def run(prompt: list[int], count: int) -> Speeds:
        start = time.perf_counter()
        out = model(input_ids=torch.tensor([prompt]), use_cache=True)
        middle = time.perf_counter()
        for _ in range(count - 1):
            token = out.logits[:, -1:].argmax(-1)
            out = model(input_ids=token, past_key_values=out.past_key_values, use_cache=True)
        return len(prompt) / (middle - start), (count - 1) / (time.perf_counter() - middle)

    return run


def served(endpoint: Endpoint) -> Callable[[list[int], int], Speeds]:
    """An engine by its endpoint, from the arrival of tokens."""
    loop = event_loop(endpoint)

    async def times(prompt: list[int], count: int) -> list[float]:
        generation = Generation(tuple(prompt), count)
        return [chunk.at for chunk in [c async for c in endpoint.stream(generation)] for _ in chunk.tokens]

    def run(prompt: list[int], count: int) -> Speeds:
        start = time.monotonic()
        at = loop.run_until_complete(asyncio.wait_for(times(prompt, count), 120))
        return len(prompt) / (at[0] - start), (len(at) - 1) / (at[-1] - at[0])

    return run


def engines(folder: Path, longest: int) -> dict[str, tuple[Runtime, Config]]:
    """Each engine as shipped and with narrower weights."""
    native = NativeRuntime(reference_model())
    space = load("native").narrow({**native.capabilities(), "longest": longest})
    eight, four = ({f"bits_{g}": width for g in (*LAYER_GROUPS, *MODEL_GROUPS)} for width in (8, 4))
    prefix = usual_command()
    llama = ServerRuntime(LlamaCpp(prefix, reference_model(), longest, folder), prefix)
    files = load("llamacpp").narrow({"layers": 4})
    shared = {"threads": 1, "parallel": 1, "cache_prompt": False, "cache_ram": 0}
    return {
        "native, fp32, as by default": (native, space.complete({"kv_tokens": 1024})),
        "native, fp32, fused": (native, space.complete({"kv_tokens": 1024, "graphs": "fused"})),
        "native, 8 bits, fused": (
            native,
            space.complete({"kv_tokens": 1024, "graphs": "fused", "compute": "bf16", **eight}),
        ),
        "native, 4 bits, fused": (
            native,
            space.complete({"kv_tokens": 1024, "graphs": "fused", "compute": "bf16", **four}),
        ),
        **{
            f"llama.cpp, {kind}": (llama, files.complete({**{f"type_{g}": kind for g in GROUPS}, **shared}))
            for kind in ("f32", "f16", "q8_0", "q4_0")
        },
    }


def measured(rounds: int, length: int, count: int) -> dict[str, list[dict[int, float]]]:
    """{engine: its two speeds by round}; each round runs all engines in another order, on a prompt of its own."""
    text = list(heldout_text().encode())
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        runs = {HOME: oracle()}
        for engine, (runtime, config) in engines(Path(name), length + count).items():
            log = Path(name) / f"{len(runs)}.log"
            runs[engine] = served(stack.enter_context(runtime.launch(config, log)))
        found: dict[str, list[dict[int, float]]] = {engine: [{}, {}] for engine in runs}
        for number in range(rounds + 1):
            prompt = text[number * length : (number + 1) * length]
            order = list(runs)[number % len(runs) :] + list(runs)[: number % len(runs)]
            for engine in order:
                speeds = runs[engine](prompt, count)
                for kind, speed in enumerate(speeds):
                    if number:  # the first round warms up
                        found[engine][kind][number] = speed
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="4 rounds of 128 + 9 tokens")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    rounds, length, count = (4, 128, 9) if options.quick else (15, 512, 33)
    found = measured(rounds, length, count)
    base = [statistics.median(speeds.values()) for speeds in found[HOME]]
    print(
        f"{rounds} rounds of {length} + {count} tokens; {HOME}: {base[0]:.0f} prompt tokens/s, {base[1]:.0f} generated"
    )
    result: dict[str, Any] = {"prompt_tok_s": base[0], "generated_tok_s": base[1]}
    print(f"{'':<30}{'prompt':>22}{'generated':>22}")
    for engine, kinds in found.items():
        if engine == HOME:
            continue
        ratios = [stats.ratio(kind, home, higher=True) for kind, home in zip(kinds, found[HOME], strict=True)]
        cells = [f"×{r.mean:.2f} [{r.low:.2f}, {r.high:.2f}]" for r in ratios if r is not None]
        print(f"{engine:<30}" + "".join(f"{cell:>22}" for cell in cells))
        result[engine] = [round(r.mean, 3) for r in ratios if r is not None]
    print(json.dumps(result))


if __name__ == "__main__":
    sys.exit(main())
