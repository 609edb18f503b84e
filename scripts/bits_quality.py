"""What narrow weights cost on the reference model: KL and perplexity by group, width, compensation and activations.

Scored on held-out text that is neither trained nor calibrated on. A few tokens whose sparse selection flips carry much
of the mean, so read its standard error, and the median. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np

from autotune.corpus import PROMPT_SHARE, read_tokens
from autotune.quality import TOP, kl_divergence
from autotune.runtimes.base import Score
from autotune.runtimes.native.engine import Engine
from autotune.setting import SEQUENCE, reference_model
from search_spaces import load
from search_spaces.bits import LAYER_GROUPS, MODEL_GROUPS

SPACE = load("native")
GROUPS = (*LAYER_GROUPS, *MODEL_GROUPS)
EXACT = {"kv_tokens": 1024, "kv_dtype": "fp32"}


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, knobs) of every row."""
    for group in (*GROUPS, "all"):
        for width in (8, 4):
            widths = {f"bits_{name}": width for name in (GROUPS if group == "all" else (group,))}
            yield f"{group} {width}", widths
            if group != "embedding":  # looked up, not multiplied
                yield f"{group} {width} bias", {**widths, "bits_compensation": "bias"}
    every = {f"bits_{name}": 4 for name in GROUPS}
    for size in (32, 128):
        yield f"all 4 group size {size}", {**every, "bits_group_size": size}
    yield "all 4, from 256 tokens 8", {**every, "bits_long": 8, "bits_long_from": 256}
    for kind in ("int8_token", "int8_tensor"):
        yield f"all 8 {kind}", {**{f"bits_{name}": 8 for name in GROUPS}, "activations": kind}


def score(sequences: list[list[int]], threads: int, knobs: dict[str, Any]) -> tuple[list[Score], float]:
    """Scores of ``sequences`` and the bytes of the weights."""
    border = {k: v for k, v in knobs.items() if k == "bits_long_from"}  # shorter than the space offers, as the text is
    config = SPACE.complete({**EXACT, "threads": threads, **{k: v for k, v in knobs.items() if k not in border}})
    engine = Engine(reference_model(), {**config, **border})
    return engine.score(sequences, TOP), engine.counters()["weight_bytes"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2560)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    tokens = read_tokens(reference_model(), 1 << 30)
    tokens = tokens[int(len(tokens) * PROMPT_SHARE) :][: options.tokens]
    sequences = [tokens[i : i + SEQUENCE] for i in range(0, len(tokens), SEQUENCE)]
    reference, whole = score(sequences, options.threads, {})
    base = np.concatenate([s.logprobs for s in reference]).mean()
    print(f"{len(tokens)} tokens; at 16 bits perplexity {np.exp(-base):.4f}, {whole / 1e6:.2f} MB of weights in fp32")
    print(f"{'':<26}{'KL, nats a token':>24}{'median':>10}{'perplexity':>12}{'MB':>8}")
    found = {}
    for name, knobs in cases():
        scores, size = score(sequences, options.threads, knobs)
        kl = np.concatenate([kl_divergence(r, s) for r, s in zip(reference, scores, strict=True)])
        ratio = float(np.exp(base - np.concatenate([s.logprobs for s in scores]).mean()))
        error = float(kl.std() / len(kl) ** 0.5)
        middle = float(np.median(kl))
        print(
            f"{name:<26}{kl.mean():>14.6f} ±{error:.6f}{middle:>10.6f}{f'×{ratio:.5f}':>12}{size / 1e6:>8.2f}",
            flush=True,
        )
        found[name] = {
            "kl": round(float(kl.mean()), 7), "median": round(middle, 7), "perplexity": round(ratio, 6), "bytes": size,
        }  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    sys.exit(main())
