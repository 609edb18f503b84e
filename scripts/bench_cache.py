"""The native engine's cache: what prefix reuse saves, what int8 costs and saves, how full the blocks are.

On the reference model, one thread; both sides of each comparison run interleaved. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from autotune.bench import Bench
from autotune.corpus import PROMPT_SHARE, read_tokens
from autotune.model import facts
from autotune.quality import TOP, kl_divergence
from autotune.runtimes.native import NativeRuntime
from autotune.runtimes.native.engine import Engine
from autotune.setting import SEQUENCE, reference_model
from autotune.workload import load_workload
from search_spaces import load

PROMPT, OUTPUT = 1000, 16
SPACE = load("native")


def engine(**knobs: Any) -> Engine:
    return Engine(reference_model(), SPACE.complete({"threads": 1, "token_budget": 2048, **knobs}))


def seconds(running: Engine, prompt: list[int]) -> float:
    running.add(0, prompt, OUTPUT, ignore_eos=True)
    start = time.perf_counter()
    while running.busy:
        running.step()
    return time.perf_counter() - start


def repeated(tokens: list[int], rounds: int) -> dict[str, float]:
    """Time of a prompt of 1,000 tokens and 16 new ones that was sent before, with reuse as a share of without."""
    sides = {reuse: engine(prefix_reuse=reuse, graphs="fused") for reuse in (False, True)}
    ratios = []
    for number in range(rounds + 1):
        prompt = tokens[number * 211 : number * 211 + PROMPT]
        for running in sides.values():
            seconds(running, prompt)
        again = {reuse: seconds(running, prompt) for reuse, running in sides.items()}
        ratios.append(again[True] / again[False])
    cut = 1 - statistics.median(ratios[1:])
    print(f"repeated prompt of {PROMPT} tokens and {OUTPUT} new: reuse cuts {cut:.0%} (published case: 58 %)")
    return {"repeated_cut": cut}


def int8(tokens: list[int], sequences: int) -> dict[str, float]:
    """Bytes of an int8 cache as a share of a bf16 one, and the mean KL that it adds."""
    texts = [tokens[i * SEQUENCE : (i + 1) * SEQUENCE] for i in range(sequences)]
    scores, sizes = {}, {}
    for dtype in ("fp32", "bf16", "int8"):
        running = engine(kv_dtype=dtype)
        scores[dtype], sizes[dtype] = running.score(texts, TOP), running.counters()["kv_bytes"]
    figures = {
        dtype: statistics.fmean(
            float(value) for a, b in zip(scores["fp32"], scores[dtype], strict=True) for value in kl_divergence(a, b)
        )
        for dtype in ("bf16", "int8")
    }
    share = sizes["int8"] / sizes["bf16"]
    print(f"int8 cache: {share:.3f} of the bf16 one's bytes, KL {figures['int8']:.6f} (bf16: {figures['bf16']:.6f})")
    return {"int8_bytes": share, "int8_kl": figures["int8"], "bf16_kl": figures["bf16"]}


def fragmentation(tokens: list[int]) -> dict[str, float]:
    """Share of held cache slots without a token, over all steps of each workload, by tokens a block."""
    folder = reference_model()
    runtime, model, found = NativeRuntime(folder), facts(folder), {}
    with tempfile.TemporaryDirectory() as logs:
        for name in ("chat", "long", "shared", "task"):
            workload = load_workload(name)
            known = {"layers": model.layers, "experts": model.experts, "longest": workload.longest}
            space = SPACE.narrow({**runtime.capabilities(), **known})
            bench = Bench(runtime, space, workload, tokens, Path(logs))
            for size in (8, 16):
                config = space.complete({"graphs": "fused", "prefix_reuse": True, "block_size": size})
                share = bench.measure(config, 0).metrics["kv_fragmentation"]
                found[f"fragmentation_{name}_{size}"] = share
                print(f"workload {name:<7} blocks of {size:>2} tokens: fragmentation {share:.1%}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="under a minute")
    options = parser.parse_args()
    folder = reference_model()
    tokens = read_tokens(folder, facts(folder).vocab)
    cut = int(len(tokens) * PROMPT_SHARE)
    found = repeated(tokens[:cut], 3 if options.quick else 15)
    found |= int8(tokens[cut:], 4 if options.quick else 16)
    found |= fragmentation(tokens[:cut])
    print(json.dumps({name: round(value, 6) for name, value in found.items()}))


if __name__ == "__main__":
    sys.exit(main())
