"""What narrow weights would cost a model, by one backward pass: KL to second order for each group and width.

KL(full width ‖ narrow) ≈ ½ Σ_t E[(g_t · δy_t)²] with δy_t = ΔW x_t, the change of a product's output at token t, and
g_t the gradient there of −log p of labels drawn from the model itself, whose expected square is the Fisher information
(Kunstner, Balles, Hennig 2019, on why the labels must be the model's own). Tokens and matrices count as independent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from autotune.corpus import calibration_sequences
from autotune.runtimes.native import hyper
from autotune.runtimes.native.build import Reader, build_layer
from autotune.runtimes.native.config import read_config
from autotune.runtimes.native.kernels import select
from autotune.runtimes.native.model import Layer, Recipe, Widths
from autotune.runtimes.native.quant.calibrate import through
from autotune.runtimes.native.quant.linear import Embedding, Linear, make_linear
from autotune.runtimes.native.weights import Checkpoint
from search_spaces.bits import WIDTHS

SEQUENCES, LENGTH = 16, 512
"""The text of the backward pass: 8,192 tokens of the calibration text."""
NARROW = tuple(width for width in WIDTHS if width < 16)
Costs = dict[int, float]
"""Of one group: Σ over tokens of (g · δy)² by width."""
Forms = Callable[[str, Tensor], Mapping[int, Tensor]]
"""The values that a weight of a group has at each width, as it would be used."""


class Sensed:
    """A weight that lets gradients through and adds up what its narrow forms would change."""

    kernel = "fp32"

    def __init__(self, weight: Tensor, forms: Mapping[int, Tensor], costs: Costs) -> None:
        self.weight, self.costs, self.nbytes = weight, costs, weight.nbytes
        self.changes = {width: form - weight for width, form in forms.items()}

    def __call__(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight)
        seen = x.detach()

        def note(gradient: Tensor) -> None:
            for width, change in self.changes.items():
                self.costs[width] = self.costs.get(width, 0.0) + float(
                    (gradient * F.linear(seen, change)).sum(1).square().sum()
                )

        if self.changes and y.requires_grad:
            y.register_hook(note)  # type: ignore[no-untyped-call]
        return y

    def dense(self) -> Tensor:
        return self.weight


@dataclass(frozen=True, slots=True)
class Sensing(Widths):
    """Full width everywhere, each packable weight sensed for its group."""

    forms: Forms = lambda key, weight: {}
    found: dict[str, Costs] = field(default_factory=dict)

    def linear(self, key: str, weight: Tensor, name: str = "", columns: slice | None = None) -> Linear:
        return Sensed(weight, self.forms(key, weight), self.found.setdefault(key, {}))

    def wide(self, weight: Tensor) -> Linear:
        return Sensed(weight, {}, {})  # never packed


def stored(group: int) -> Forms:
    """The engine's own 4 and 8 bits, with ``group`` weights a 4-bit scale."""

    def forms(key: str, weight: Tensor) -> Mapping[int, Tensor]:
        if key == "embedding":
            every = torch.arange(len(weight))
            return {width: Embedding(weight, width, "fp32")(every) for width in NARROW}
        return {width: make_linear(weight, width, "fp32", group).dense() for width in NARROW}

    return forms


def sensitivities(
    folder: Path, forms: Forms | None = None, count: int = SEQUENCES, length: int = LENGTH, seed: int = 0
) -> dict[str, dict[int, float]]:
    """Predicted KL in nats a token by group (``<layer>.<group>``, embedding, lm_head) and width.

    ``forms`` are the engine's own in groups of 64 by default. The whole model is held in fp32, and what each form
    changes beside it. Leaves gradients off, as engines need them.
    """
    widths = Sensing({}, forms=forms or stored(64))
    try:
        torch.set_grad_enabled(False)
        model = Model(folder, widths)
        torch.set_grad_enabled(True)
        sequences = calibration_sequences(folder, model.config.vocab_size, count, length)
        for index, ids in enumerate(sequences):
            model.backward(torch.tensor(ids), torch.Generator().manual_seed(seed * 1_000_003 + index))
    finally:
        torch.set_grad_enabled(False)
    tokens = sum(map(len, sequences))
    return {key: {w: total / (2 * tokens) for w, total in costs.items()} for key, costs in widths.found.items()}


class Model:
    """The whole decoder of a checkpoint folder, with the weights that ``widths`` makes, differentiable."""

    def __init__(self, folder: Path, widths: Sensing) -> None:
        config, checkpoint = read_config(folder), Checkpoint(folder)
        kernels = select.choose(select.here(config, "fp32")).functions
        recipe = Recipe("absorbed", 1, 64, kernels)
        self.config, self.layers = config, list[Layer]()
        self.table = checkpoint.tensor("embed_tokens.weight", (config.vocab_size, config.hidden_size))
        self.costs: Costs = widths.found.setdefault("embedding", {})
        self.changes = {width: form - self.table for width, form in widths.forms("embedding", self.table).items()}
        for index in range(config.num_hidden_layers):
            layer = build_layer(config, Reader(checkpoint, index, None), widths, index, recipe)
            layer.read_by(kernels["hyper"])
            self.layers.append(layer)
        self.norm = checkpoint.tensor("norm.weight", (config.hidden_size,))
        self.head = widths.linear(
            "lm_head", checkpoint.tensor("lm_head.weight", (config.vocab_size, config.hidden_size))
        )

    def normed(self, streams: Tensor) -> Tensor:
        """What the output projection reads [T, D] of the last streams [T, N, D]."""
        return hyper.rms(streams.mean(1), self.config.rms_norm_eps) * self.norm

    def backward(self, ids: Tensor, source: torch.Generator) -> None:
        """One sequence: forward, labels drawn from the model's own distribution, and the gradients of their −log p."""
        vectors = self.table[ids].requires_grad_()
        streams = vectors[:, None].repeat(1, self.config.hc_mult, 1)
        for layer in self.layers:
            streams = through(self.config, layer, streams)
        logits = self.head(self.normed(streams))
        labels = torch.multinomial(logits.detach().softmax(-1), 1, generator=source)[:, 0]
        F.cross_entropy(logits, labels, reduction="sum").backward()  # type: ignore[no-untyped-call]
        assert vectors.grad is not None
        for width, change in self.changes.items():
            found = (vectors.grad * change[ids]).sum(1).square().sum()
            self.costs[width] = self.costs.get(width, 0.0) + float(found)
