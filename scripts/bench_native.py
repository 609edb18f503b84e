"""Native engine against transformers on the reference, and decode against memory bandwidth on a larger random model.

All variants run interleaved in one process, on one thread by default; read the ratios. Needs the `train` extra.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from random_checkpoint import write

from autotune.corpus import heldout_text
from autotune.runtimes.native.engine import Engine
from autotune.runtimes.native.inspect import packed
from autotune.runtimes.native.model import LinearAttention
from autotune.runtimes.native.moe import MoE
from autotune.setting import reference_model
from search_spaces import load

GROUPS = ("attention", "dense", "experts", "shared", "lm_head", "embedding")
SPACE = load("native")


def engine(folder: Path, threads: int, bits: int = 16, **knobs: Any) -> Engine:
    widths = {f"bits_{group}": bits for group in GROUPS}
    return Engine(
        folder, SPACE.complete({"threads": threads, "token_budget": 2048, "kv_tokens": 8192, **widths, **knobs})
    )


def native(running: Engine, prompts: list[list[int]], count: int) -> tuple[float, float]:
    """Prompt and generated tokens a second."""
    for number, prompt in enumerate(prompts):
        running.add(number, prompt, count, ignore_eos=True)
    start = time.perf_counter()
    while any(s.produced == 0 for s in (*running.scheduler.running, *running.scheduler.waiting)):
        running.step()
    middle = time.perf_counter()
    produced = sum(s.produced for s in running.scheduler.running)
    while running.busy:
        running.step()
    done = time.perf_counter() - middle
    return sum(map(len, prompts)) / (middle - start), (len(prompts) * count - produced) / done


def oracle(model: Any, prompts: list[list[int]], count: int) -> tuple[float, float]:
    start = time.perf_counter()
    out = model(input_ids=torch.tensor(prompts), use_cache=True)
    middle = time.perf_counter()
    for _ in range(count - 1):
        token = out.logits[:, -1:].argmax(-1)
        out = model(input_ids=token, past_key_values=out.past_key_values, use_cache=True)
    done = time.perf_counter() - middle
    return sum(map(len, prompts)) / (middle - start), len(prompts) * (count - 1) / done


def against_transformers(rounds: int, threads: int, length: int, count: int) -> dict[str, float]:
    """Ratios to transformers: prefill at batch 1, decode at batch 1 and 8, by the best native variant and by each."""
    from transformers import Glm5NextForConditionalGeneration, logging

    logging.set_verbosity_error()

    folder, text = reference_model(), list(heldout_text().encode())
    model = Glm5NextForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    variants: dict[str, Callable[[list[list[int]], int], tuple[float, float]]] = {
        "transformers": lambda prompts, count: oracle(model, prompts, min(count, 9))
    }
    for name, knobs in {
        "eager": {}, "compiled": {"graphs": "compiled"}, "fused": {"graphs": "fused"},
        "fused bf16": {"graphs": "fused", "compute": "bf16"},
        "fused 8 bits": {"graphs": "fused", "bits": 8, "compute": "bf16"},
        "fused 4 bits": {"graphs": "fused", "bits": 4, "compute": "bf16"},
    }.items():  # fmt: skip
        running = engine(folder, threads, **knobs)
        variants[name] = lambda prompts, count, running=running: native(running, prompts, count)  # type: ignore[misc]
    found = {}
    for batch in (1, 8):
        prompts = [text[i * length : (i + 1) * length] for i in range(batch)]
        speeds: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
        for _ in range(rounds + 1):
            for name, run in variants.items():
                speeds[name].append(run(prompts, count))
        for phase, index in (("prefill", 0), (f"decode_{batch}", 1)):
            base = statistics.median(s[index] for s in speeds["transformers"][1:])
            print(f"{phase}, batch {batch}: transformers {base:.0f} tokens/s")
            for name in [n for n in variants if n != "transformers"]:
                ratio = statistics.median(s[index] for s in speeds[name][1:]) / base
                print(f"  {name:<16} ×{ratio:.2f}")
                key = phase if batch == 1 or phase != "prefill" else "prefill_8"
                found[key] = max(found.get(key, 0.0), ratio)
    return found


def read_bandwidth(seconds: float) -> float:
    """Bytes a second that one pass over a large fp32 tensor reads here."""
    block = torch.ones(64 << 20)
    best, end = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        block.sum()
        best = max(best, block.nbytes / (time.perf_counter() - start))
    return best


def active_bytes(running: Engine) -> float:
    """Bytes that one token's decode step must read: weights, but for experts it is not routed to, and states."""
    share = running.model.num_experts_per_tok / running.model.n_routed_experts
    total = sum(w.nbytes * (share if key.endswith("experts") else 1) for key, w in packed(running.decoder))
    for layer in running.decoder.layers:
        attention, mlp = layer.attention, layer.mlp
        total += sum(args[0].nbytes for args in layer.hc)
        total += mlp.router.nbytes if isinstance(mlp, MoE) else 0
        if isinstance(attention, LinearAttention):
            assert attention.pool is not None
            total += sum(attention.parts[name].nbytes for name in ("gates", "f_b", "g_b"))
            total += attention.pool.nbytes / len(attention.pool.state)
        else:
            assert attention.indexer is not None
            total += attention.up.nbytes + attention.down.nbytes
            total += attention.indexer.query.nbytes + attention.indexer.keys.nbytes
    return total


def against_bandwidth(hidden: int, rounds: int, threads: int) -> dict[str, float]:
    """The share of the read bandwidth that batch-1 decode reaches at each width."""
    with tempfile.TemporaryDirectory() as name:
        write(Path(name), hidden)
        engines = {bits: engine(Path(name), threads, bits, compute="bf16", graphs="fused") for bits in (16, 8, 4)}
    limit = read_bandwidth(1.0)
    speeds: dict[int, list[float]] = {bits: [] for bits in engines}
    for _ in range(rounds + 1):
        for bits, running in engines.items():
            speeds[bits].append(native(running, [list(range(100, 164))], 17)[1])
    found = {}
    for bits, running in engines.items():
        speed = statistics.median(speeds[bits][1:])
        size = active_bytes(running)
        found[f"bandwidth_{bits}"] = size * speed / limit
        print(
            f"hidden {hidden}, {bits:>2} bits: {speed:.1f} tokens/s, {size / 1e6:.0f} MB a token, "
            f"{found[f'bandwidth_{bits}']:.0%} of {limit / 1e9:.1f} GB/s"
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="under a minute: fewer rounds, shorter prompts, hidden 1024"
    )
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    rounds = 1 if options.quick else 5
    found = against_transformers(rounds, options.threads, *((128, 9) if options.quick else (512, 33)))
    found |= against_bandwidth(1024 if options.quick else 2048, rounds, options.threads)
    print(json.dumps({name: round(value, 3) for name, value in found.items()}))


if __name__ == "__main__":
    sys.exit(main())
