"""The mean input of every packable weight over a calibration text at full width, measured once and kept on disk.

One layer is in memory at a time, so a checkpoint needs no more room for it than for loading. Packs nothing.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import platformdirs
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from autotune import model as models
from autotune.corpus import calibration_sequences
from autotune.runtimes.native import hyper
from autotune.runtimes.native.attention import LatentAttention
from autotune.runtimes.native.build import Reader, build_layer
from autotune.runtimes.native.cache import LatentPool, StatePool
from autotune.runtimes.native.config import ModelConfig
from autotune.runtimes.native.kernels import select
from autotune.runtimes.native.model import Layer, LinearAttention, Recipe, Segment, Widths
from autotune.runtimes.native.quant.linear import Linear, Wide
from autotune.runtimes.native.scheduler import places
from autotune.runtimes.native.weights import Checkpoint

SEQUENCES, LENGTH = 16, 512
"""The calibration text: 8,192 tokens, spread over the whole of it."""


@dataclass(slots=True)
class Moments:
    """Of the inputs [T, in] of one weight: their number, their sum and the sum of their squared lengths."""

    count: int = 0
    total: Tensor | float = 0.0
    squares: float = 0.0

    def add(self, x: Tensor) -> None:
        self.count += len(x)
        self.total = self.total + x.sum(0)
        self.squares += float(x.square().sum())

    def mean(self) -> Tensor | None:
        """The mean, shrunk by the share of its squared length that is sampling noise (positive-part James-Stein).

        An expert that met few tokens so gets a small correction, and none (None) where its mean is all noise. The
        tokens of a text are not independent, so this shrinks a little too little.
        """
        if self.count < 2:
            return None
        assert isinstance(self.total, Tensor)
        mean = self.total / self.count
        length = float(mean.square().sum())
        noise = (self.squares - self.count * length) / (self.count - 1) / self.count
        return mean * (1 - noise / length) if noise < length else None


class Watched:
    """A weight that notes what it is multiplied with."""

    def __init__(self, inner: Linear, moments: Moments) -> None:
        self.inner, self.moments, self.kernel, self.nbytes = inner, moments, inner.kernel, inner.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        self.moments.add(x)
        return self.inner(x)

    def dense(self) -> Tensor:
        return self.inner.dense()


@dataclass(frozen=True, slots=True)
class Watching(Widths):
    """Full width everywhere, each packable weight watched under its name."""

    seen: dict[str, Moments] = field(default_factory=dict)

    def linear(self, key: str, weight: Tensor, name: str = "", columns: slice | None = None) -> Linear:
        return Watched(Wide(weight, "fp32"), self.seen.setdefault(f"{key}.{name}", Moments()))


def measure(config: ModelConfig, checkpoint: Checkpoint, sequences: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """The mean inputs of all packable weights over ``sequences`` at full width."""
    widths = Watching({})
    kernels = select.choose(select.here(config, "fp32")).functions
    recipe = Recipe("absorbed", 1, 64, kernels)
    table = checkpoint.tensor("embed_tokens.weight", (config.vocab_size, config.hidden_size))
    streams = [table[list(ids)][:, None].repeat(1, config.hc_mult, 1) for ids in sequences]
    for index in range(config.num_hidden_layers):
        layer = build_layer(config, Reader(checkpoint, index, None), widths, index, recipe)
        layer.read_by(kernels["hyper"])
        streams = [through(config, layer, part) for part in streams]
    norm, head = checkpoint.tensor("norm.weight", (config.hidden_size,)), Moments()
    for part in streams:
        head.add(hyper.rms(part.mean(1), config.rms_norm_eps) * norm)
    found = {name: moments.mean() for name, moments in (widths.seen | {"lm_head.": head}).items()}
    return {name: mean for name, mean in found.items() if mean is not None}


def through(config: ModelConfig, layer: Layer, streams: Tensor) -> Tensor:
    """The streams [T, N, D] of one sequence after ``layer``."""
    at = Segment(0, places(0, [0], len(streams), 0, len(streams)))
    attention = layer.attention
    if isinstance(attention, LatentAttention):
        attention.pool = LatentPool(config, len(streams), 1, "fp32")
    else:
        attention.pool = StatePool(config, 1, "fp32")

    def attend(part: LinearAttention | LatentAttention, x: Tensor) -> Tensor:
        return part(x, at.places) if isinstance(part, LatentAttention) else part.prefill(x, at)[0]

    return layer.forward(streams, attend, hyper.write)


def input_means(folder: Path, config: ModelConfig, checkpoint: Checkpoint) -> Mapping[str, Tensor]:
    """`measure` over the calibration text of ``folder``, from the user's cache when it has been measured before."""
    sequences = calibration_sequences(folder, config.vocab_size, SEQUENCES, LENGTH)
    kept = platformdirs.user_cache_path("autotune", ensure_exists=True) / "calibration"
    kept.mkdir(exist_ok=True)
    file = kept / f"{_key(folder, sequences)}.safetensors"
    if not file.is_file():
        means = measure(config, checkpoint, sequences)
        with tempfile.TemporaryDirectory(dir=kept) as scratch:
            made = Path(scratch) / file.name
            save_file(means, made)
            made.replace(file)  # atomic: two launches may calibrate at once
    return load_file(file, device=str(torch.get_default_device()))


def _key(folder: Path, sequences: Sequence[Sequence[int]]) -> str:
    """By the content of the checkpoint, the text and this file. Large files count by size and date as well."""
    stats = [path.stat() for path in sorted(folder.glob("*.safetensors"))]
    dates = [(stat.st_size, stat.st_mtime_ns) for stat in stats if stat.st_size > models.HASHED_BYTES]
    parts = [models.facts(folder).identity(), dates, [list(ids) for ids in sequences]]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode() + Path(__file__).read_bytes()).hexdigest()[:32]
