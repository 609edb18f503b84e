"""Writes what the reference training reached beside its weights: training.json for programs, README.md for people.

Knows the report's keys and the words around them; computes nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

README = """\
# The reference model

A `glm5_next` text decoder of the real architecture, made small: {parameters:,} parameters, four layers (three of Kimi
delta attention, one of pooled sparse attention with its indexer), the first feed-forward dense, then 8 routed experts
of which 2 run, one shared expert, four-stream hyper-connections, a vocabulary of bytes. It exists so that bit widths,
attention and caches can be measured for speed *and* for quality on any machine. It is no language model for use.

| model | bits per byte, held-out text |
|---|---:|
| uniform | {uniform_bits_per_byte:.3f} |
| order-2 byte model of the same training text | {order2_bits_per_byte:.3f} |
| **this model** | **{bits_per_byte:.3f}** |

Measured over `../heldout.txt` ({held_out_bytes:,} bytes) in whole windows of 1,024 bytes, each read from an empty
context; the order-2 model reads the text in one piece.

## Files

- `config.json`, `model.safetensors`: the layout of the published checkpoints (one tensor an expert, one a convolution),
  so that `Glm5NextForConditionalGeneration.from_pretrained(folder)` of `transformers` loads it without a missing or
  unexpected key. bf16; fp32 for hyper-connections, routers, convolutions, `A_log` and `dt_bias`. That class insists on
  a vision tower: a tiny one with zero weights is in the file and means nothing.
- `tokenizer.json`: id b is byte b; 256 is the end of text; every id up to {last_id} has a name.
- `training.json`: the numbers of this page, for programs.
- `LICENSE`: the licence of the text.

## Training

`python scripts/train_reference.py --minutes {minutes:g} --seed {seed}` with {threads} CPU thread: {steps:,} steps,
{tokens_trained:,} bytes read of {training_bytes:,}. For the first 60 % of the time attention is dense over sequences of
512 bytes, while the indexer learns by distillation to find where attention looks; then the indexer's selection (128
keys and the tail) is in force, and for the last 15 % sequences are 1,024 long. Experts are balanced by the router's
bias, without an auxiliary loss. Nothing prepares the weights for quantization. The budget is time, so another machine
does another number of steps: the seed fixes the recipe, not the weights.

## Text and licence

The training text is the Python {python} standard library and its reference manual (`pydoc_data/topics.py`); tests,
generated tables, `idlelib` and `lib2to3` are left out. `../heldout.txt` holds modules and topics that were not trained
on, unchanged but for cuts at line ends and the blank lines between them.

Copyright (c) 2001-2023 Python Software Foundation; All Rights Reserved. Licensed under PSF-2.0: see `LICENSE`. The
weights, derived from that text, are given under the same terms.
"""


def write_report(report: dict[str, Any], folder: Path, vocabulary: int) -> None:
    """``report`` as training.json and README.md in ``folder``; raises KeyError where a number is missing."""
    (folder / "training.json").write_text(json.dumps(report, indent=2) + "\n")
    (folder / "README.md").write_text(README.format(**report, last_id=vocabulary - 1))
