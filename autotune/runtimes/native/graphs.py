"""How steps are run: eagerly, through compiled regions, or (with CUDA) as captured graphs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from autotune.runtimes.native import hyper, kda
from autotune.runtimes.native.model import Decoder, Ops, Step

if TYPE_CHECKING:
    from autotune.runtimes.native.engine import Engine


class Eager:
    """Operation by operation."""

    name = "eager"

    def __init__(self) -> None:
        self.ops = Ops()
        self.seconds = 0.0

    def warm(self, engine: Engine) -> None:
        """Nothing to prepare."""

    def decode(self, decoder: Decoder, ids: Tensor, at: Step) -> Tensor:
        return decoder.decode(ids, at)


class Compiled(Eager):
    """The element-wise regions through torch.compile: one variant for one token, one for any other count.

    Compiled code is kept on disk by torch, so only the first launch on a machine pays for it; ``seconds`` says what
    this launch paid.
    """

    name = "compiled"

    def __init__(self) -> None:
        super().__init__()
        self.ops = Ops(*(torch.compile(piece) for piece in (hyper.read, hyper.write, kda.step)))

    def warm(self, engine: Engine) -> None:
        """Run both variants once, so that no request pays for compilation."""
        start = time.monotonic()
        config = engine.model
        first = engine.decoder.layers[0].hc[0]
        heads, size = config.linear_num_heads, config.linear_head_dim
        for rows in (2, 1):
            streams = torch.randn(rows, config.hc_mult, config.hidden_size)
            x, post, mix = self.ops.read(_any_rows(streams), *first)
            self.ops.write(*map(_any_rows, (streams, x, post, mix)))
            q = torch.randn(rows, 3, heads, size).unbind(1)
            rest = (-torch.rand(rows, heads, size), torch.rand(rows, heads), torch.randn(rows, heads, size, size))
            self.ops.step(*map(_any_rows, (*q, *rest)))
        self.seconds = time.monotonic() - start




def _any_rows(tensor: Tensor) -> Tensor:
    """Tell the compiler that the first size varies (1 gets a variant of its own)."""
    if len(tensor) > 1:
        torch._dynamo.mark_dynamic(tensor, 0)
    return tensor


def policy(name: str) -> Eager:
    """The policy of a ``graphs`` value. Raises ValueError for one that this machine cannot run."""
    if name == "eager":
        return Eager()
    if name == "compiled":
        return Compiled()
    raise ValueError(f"graphs={name} needs a CUDA device")
