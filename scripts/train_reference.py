"""Trains the reference model on CPU within a budget of minutes and writes its folder: weights, tokenizer, report.

Run it as `python scripts/train_reference.py --minutes 45 --out autotune/data/reference`. One thread is enough; the
result depends on the seed and on how many steps the budget holds.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from reference_corpus import order2_bits, read_corpus
from reference_export import write_folder
from reference_fused import fuse
from reference_network import Decoder
from reference_optimizer import AdamW, Muon, split_parameters
from reference_report import write_report
from reference_shape import Shape
from torch import Tensor

TOKENS = 4096  # a step
SPARSE_FROM, LONG_FROM = 0.6, 0.85  # shares of the budget: sparse attention from here, sequences of 1024 from there
LEARNING_RATE = 4e-3
MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000", "MALLOC_TOP_PAD_": "500000000"}


def main() -> None:
    options = parse()
    if any(os.environ.get(name) != value for name, value in MALLOC.items()):
        # glibc reads these at start: without them each large tensor is mapped and faulted in anew, a third of the time
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **MALLOC})
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    corpus = read_corpus()
    training, held_out = corpus.training_text(), corpus.held_out_text()
    baseline = order2_bits(training, held_out)
    print(f"{len(training):,} training bytes, {len(held_out):,} held out; order-2 {baseline:.3f} bits/byte", flush=True)
    options.heldout.write_bytes(held_out)
    fuse()
    model = Decoder(Shape())
    if options.resume:
        model.load_state_dict(torch.load(options.resume, weights_only=True))
    steps = train(model, np.frombuffer(training, dtype=np.uint8), np.frombuffer(held_out, dtype=np.uint8), options)
    bits = evaluate(model, np.frombuffer(held_out, dtype=np.uint8), 1024, len(held_out), sparse=True)
    write_folder(model, options.out)
    report = {
        "bits_per_byte": round(bits, 4),
        "order2_bits_per_byte": round(baseline, 4),
        "uniform_bits_per_byte": 8.0,
        "held_out_bytes": len(held_out),
        "training_bytes": len(training),
        "tokens_trained": steps * TOKENS,
        "steps": steps,
        "minutes": options.minutes,
        "seed": options.seed,
        "threads": options.threads,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "python": sys.version.split()[0],
        "torch": torch.__version__.split("+")[0],
    }
    write_report(report, options.out, model.shape.vocab_size)
    print(f"bits/byte on held-out text: model {bits:.3f}, order-2 {baseline:.3f}, uniform 8.000", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=45.0, help="wall time to train for")
    parser.add_argument("--out", type=Path, default=Path("autotune/data/reference"), help="folder of the weights")
    parser.add_argument("--heldout", type=Path, default=Path("autotune/data/heldout.txt"), help="file of held-out text")
    parser.add_argument("--snapshots", type=Path, help="folder for state_dicts while training (default: none)")
    parser.add_argument("--resume", type=Path, help="start from the weights of a snapshot")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def train(model: Decoder, text: NDArray[np.uint8], held_out: NDArray[np.uint8], options: argparse.Namespace) -> int:
    """Trains in place until the budget is spent; returns the steps. Raises SystemExit when the loss is not finite."""
    random = np.random.default_rng(options.seed)
    matrices, rest = split_parameters(model)
    muon, adam = Muon(matrices), AdamW(rest)
    began = time.monotonic()
    step, smooth, shown = 0, float("nan"), began
    while (progress := (time.monotonic() - began) / (60 * options.minutes)) < 1:
        sparse = progress >= SPARSE_FROM
        length = 1024 if progress >= LONG_FROM else 512
        ids = sample(text, random, TOKENS // length, length + 1)
        logits, distilled = model(ids[:, :-1], sparse)
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        (loss + 0.1 * distilled).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rate = LEARNING_RATE * min(1.0, (step + 1) / 60) * min(1.0, (1 - progress) / 0.6)
        muon.step(rate)
        adam.step(rate)
        worst = max(router.rebalance(0.005 * min(1.0, 2 * (1 - progress))) for router in model.routers())
        bits = loss.item() / np.log(2)
        if not np.isfinite(bits):
            raise SystemExit(f"the loss became {bits} at step {step}; lower LEARNING_RATE")
        smooth = bits if step == 0 else 0.95 * smooth + 0.05 * bits
        step += 1
        if step % 20 == 0:
            minutes = (time.monotonic() - began) / 60
            print(
                f"{minutes:6.1f} min  step {step:5d}  bits {smooth:.3f}  indexer {distilled.item():.3f}  "
                f"rate {rate:.1e}  busiest expert {worst:.2f}x  sparse {sparse}  length {length}",
                flush=True,
            )
        if options.snapshots and (time.monotonic() - shown > 240 or step == 50):
            shown = time.monotonic()
            bits = evaluate(model, held_out, length, 32768, sparse)
            print(f"        held-out {bits:.3f} bits/byte", flush=True)
            options.snapshots.mkdir(parents=True, exist_ok=True)
            torch.save(model.state_dict(), options.snapshots / "latest.pt")
            write_folder(model, options.snapshots / "folder")
    return step


def sample(text: NDArray[np.uint8], random: np.random.Generator, batch: int, length: int) -> Tensor:
    """``batch`` crops of ``length`` bytes from uniform positions."""
    starts = random.integers(0, len(text) - length, batch)
    return torch.from_numpy(np.stack([text[start : start + length] for start in starts]).astype(np.int64))


def evaluate(model: Decoder, text: NDArray[np.uint8], length: int, limit: int, sparse: bool) -> float:
    """Bits per byte over windows of ``length`` bytes without overlap, each read from an empty context.

    Gradients stay on so that the compiled pieces of training are used again; they are never computed.
    """
    windows = min(limit, len(text) - 1) // length
    batch = TOKENS // length
    total, count = 0.0, 0
    for start in range(0, windows - batch + 1, batch):
        ids = np.stack([text[i * length : (i + 1) * length + 1] for i in range(start, start + batch)])
        tokens = torch.from_numpy(ids.astype(np.int64))
        logits = model(tokens[:, :-1], sparse)[0].detach()
        total += F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum").item()
        count += tokens[:, 1:].numel()
    for router in model.routers():
        router.load.zero_()  # balancing counts training tokens only
    return total / count / float(np.log(2))


if __name__ == "__main__":
    main()
