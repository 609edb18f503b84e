"""The definition: each expert's clamped SwiGLU over the tokens that chose it, dequantized, in plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from autotune.runtimes.native.kernels.w4a16 import reference as w4a16
from autotune.runtimes.native.kernels.w8a8 import reference as w8a8


@dataclass(frozen=True, slots=True)
class Stack:
    """One matrix of every expert, in one tensor.

    16 bits: ``weight`` [E, out, in], no scales. 8 bits: int8, ``scale`` fp32 [E, out]. 4 bits: packed as
    `w4a16.reference` says, [E, out, in / 2], ``scale`` and ``low`` [E, out, in / group].
    """

    weight: Tensor
    scale: Tensor | None = None
    low: Tensor | None = None

    @property
    def bits(self) -> int:
        return 16 if self.scale is None else 8 if self.low is None else 4

    @property
    def group(self) -> int:
        """Inputs a scale; 0 where a scale is not for a group."""
        return 2 * self.weight.shape[2] // self.scale.shape[2] if self.scale is not None and self.bits == 4 else 0

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.weight, self.scale, self.low) if part is not None)

    def dense(self, expert: int) -> Tensor:
        """The matrix of one expert in fp32 [out, in]."""
        if self.scale is None:
            return self.weight[expert].float()
        if self.low is None:
            return self.weight[expert].float() * self.scale[expert][:, None]
        return w4a16.dense(self.weight[expert], self.scale[expert], self.low[expert])


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of one layer: ``gate_up`` [E, 2·inner, hidden] with the gate first, ``down`` [E, hidden, inner].

    The gate is clamped from above at ``limit``, up to ±``limit``. ``dot`` is the type that activations are rounded to:
    int8, for weights of 8 bits, gives each of a token's rows a scale as `w8a8.reference.quantize` does.
    """

    gate_up: Stack
    down: Stack
    limit: float
    dot: torch.dtype


def experts(x: Tensor, chosen: Tensor, weights: Tensor, of: Experts) -> Tensor:
    """fp32 [T, hidden]: Σ weights · expert(x) of ``x`` [T, hidden] over ``chosen`` and ``weights`` [T, k].

    An expert outside 0 … E − 1 is another rank's and adds nothing. No token chooses an expert twice.
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    rounded = _rounded(x, of.dot)
    for expert in range(len(of.gate_up.weight)):
        token, place = (chosen == expert).nonzero(as_tuple=True)
        if len(token) == 0:
            continue
        gate, up = (rounded[token] @ _matrix(of.gate_up, expert, of.dot).t()).chunk(2, -1)
        inner = F.silu(gate.clamp(max=of.limit)) * up.clamp(-of.limit, of.limit)
        made = _rounded(inner, of.dot) @ _matrix(of.down, expert, of.dot).t()
        out.index_add_(0, token, made * weights[token, place, None].float())
    return out


def _rounded(x: Tensor, dot: torch.dtype) -> Tensor:
    if dot is not torch.int8:
        return x.to(dot).float()
    codes, scale = w8a8.quantize(x)
    return codes.float() * scale[:, None]


def _matrix(stack: Stack, expert: int, dot: torch.dtype) -> Tensor:
    """As the product sees it: int8 codes are exact in ``dot`` and scaled after it, other weights rounded to it."""
    dense = stack.dense(expert)
    return dense if stack.bits == 8 else dense.to(dot).float()
