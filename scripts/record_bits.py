"""Records the whole-model KL of every allocation of 6 weight groups × 4 widths on the reference model (4,096 of them).

`python scripts/record_bits.py scripts/data/native_bits.jsonl.gz`. Weights are rounded in groups of 64 inputs as the
engine's 4 bits are, at 2, 3, 4 and 8 bits; the text is held out from training and from calibration. Allocations that
differ in the output projection alone share a forward pass. The header holds what one backward pass over the calibration
text predicts for each group and width.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.nn.functional as F
from torch import Tensor

from autotune.corpus import PROMPT_SHARE, read_tokens
from autotune.runtimes.native.quant import fisher
from autotune.runtimes.native.quant.calibrate import through
from autotune.runtimes.native.quant.linear import Linear
from autotune.setting import reference_model

GROUPS = ("attention", "dense", "experts", "shared", "embedding", "lm_head")
LEVELS = (2, 3, 4, 8)
GROUP = 64


def rounded(weight: Tensor, bits: int) -> Tensor:
    """``weight`` [out, in] at 2^bits values in each group of GROUP inputs, with a bf16 scale and minimum."""
    grouped = weight.view(len(weight), -1, GROUP)
    low, top = grouped.amin(-1, keepdim=True).bfloat16().float(), 2**bits - 1
    scale = ((grouped.amax(-1, keepdim=True) - low).clamp(min=1e-8) / top).bfloat16().float()
    return (((grouped - low) / scale).round().clamp(0, top) * scale + low).view_as(weight)


def size(weight: Tensor, bits: int) -> int:
    """Bytes of ``weight`` with its scales and minima."""
    return weight.numel() * bits // 8 + weight.numel() // GROUP * 4


class Switched:
    """A weight at the width that its group has ``now``."""

    kernel = "fp32"

    def __init__(self, weight: Tensor, group: str, now: Mapping[str, int]) -> None:
        self.forms = {bits: rounded(weight, bits) for bits in LEVELS} | {16: weight}
        self.group, self.now, self.nbytes = group, now, weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.dense())

    def dense(self) -> Tensor:
        return self.forms[self.now[self.group]]


@dataclass(frozen=True, slots=True)
class Switching(fisher.Sensing):
    now: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, dict[int, int]] = field(default_factory=dict)

    def linear(self, key: str, weight: Tensor, name: str = "", columns: slice | None = None) -> Linear:
        group = key.rsplit(".")[-1]
        made = self.bytes.setdefault(group, dict.fromkeys(LEVELS, 0))
        for bits in LEVELS:
            made[bits] += size(weight, bits)
        return Switched(weight, group, self.now)


class Recorder:
    """The reference model, its widths switched by group, over sequences of token ids."""

    def __init__(self, sequences: list[list[int]]) -> None:
        self.now = dict.fromkeys(GROUPS, 16)
        self.widths = Switching({}, now=self.now)
        self.model = fisher.Model(reference_model(), self.widths)
        self.table = self.widths.linear("embedding", self.model.table)
        self.ids = [torch.tensor(ids) for ids in sequences]
        self.reference = [logits.log_softmax(-1) for logits in self.logits(self.hidden())]

    def hidden(self) -> list[Tensor]:
        table, config = self.table.dense(), self.model.config
        found = []
        for ids in self.ids:
            streams = table[ids][:, None].repeat(1, config.hc_mult, 1)
            for layer in self.model.layers:
                streams = through(config, layer, streams)
            found.append(self.model.normed(streams))
        return found

    def logits(self, hidden: list[Tensor]) -> list[Tensor]:
        return [self.model.head(part) for part in hidden]

    def kl(self, hidden: list[Tensor]) -> float:
        """Mean KL(full width ‖ now) in nats a token."""
        logs = [logits.log_softmax(-1) for logits in self.logits(hidden)]
        pairs = zip(logs, self.reference, strict=True)
        kls = [F.kl_div(log, base, log_target=True, reduction="none").sum(1) for log, base in pairs]
        return float(torch.cat(kls).mean())


def predicted() -> dict[str, dict[str, float]]:
    """KL by group and width from one backward pass over the calibration text."""
    by_part = fisher.sensitivities(reference_model(), forms=lambda key, weight: {b: rounded(weight, b) for b in LEVELS})
    found = {group: dict.fromkeys(map(str, LEVELS), 0.0) for group in GROUPS}
    for key, costs in by_part.items():
        for bits in LEVELS:
            found[key.rsplit(".")[-1]][str(bits)] += costs[bits]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", type=Path)
    parser.add_argument("--tokens", type=int, default=2048)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokens = read_tokens(reference_model(), 1 << 30)
    start = int(len(tokens) * PROMPT_SHARE)
    sequences = [tokens[i : i + 512] for i in range(start, start + options.tokens, 512)]
    forecast = predicted()
    torch.set_grad_enabled(False)
    recorder = Recorder(sequences)
    rows = []
    for front in itertools.product(range(len(LEVELS)), repeat=len(GROUPS) - 1):
        for group, code in zip(GROUPS, front, strict=False):
            recorder.now[group] = LEVELS[code]
        hidden = recorder.hidden()
        for last, bits in enumerate(LEVELS):
            recorder.now["lm_head"] = bits
            total = sum(recorder.widths.bytes[group][recorder.now[group]] for group in GROUPS)
            kl = float(f"{recorder.kl(hidden):.6g}")
            rows.append({"c": [*front, last], "v": [kl], "s": "ok", "r": "", "bytes": total})
    head = {
        "schema": 1, "name": "native-bits", "metric": "kl", "higher": False, "unit": "nats a token",
        "knobs": dict.fromkeys(GROUPS, LEVELS), "default": dict.fromkeys(GROUPS, LEVELS[-1]), "tokens": options.tokens,
        "fisher": forecast, "bytes": recorder.widths.bytes, "recorded": time.strftime("%Y-%m-%d"), "blocks": 1,
    }  # fmt: skip
    with gzip.GzipFile(options.table, "wb", mtime=0) as file:
        file.write((json.dumps(head) + "\n").encode())
        file.writelines((json.dumps(row) + "\n").encode() for row in rows)
    print(f"{options.table}: {len(rows)} allocations")


if __name__ == "__main__":
    main()
