"""Feed-forward layers: the clamped SwiGLU, the fp32 sigmoid router, and routed experts with packed weights."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from autotune.runtimes.native.kernels.cpu import fused
from autotune.runtimes.native.kernels.experts.reference import Experts
from autotune.runtimes.native.quant import cuda
from autotune.runtimes.native.quant.linear import Linear


def gated(gate_up: Tensor, limit: float) -> Tensor:
    """silu(min(gate, limit)) · clamp(up, ±limit) of [T, 2·n]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


class MLP:
    """Gate and up in one product, then down."""

    def __init__(self, gate_up: Linear, down: Linear, limit: float) -> None:
        self.gate_up, self.down, self.limit = gate_up, down, limit

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(gated(self.gate_up(x), self.limit))


class Grouped(list[MLP]):
    """Routed experts that one set of kernels runs for all tokens, without reading on the host who was chosen."""

    run: Callable[..., Tensor]
    of: Experts

    @classmethod
    def where_possible(cls, experts: Sequence[MLP]) -> Sequence[MLP]:
        """``experts`` as views of one tensor a matrix, or as they are where they are stored in different ways."""
        up, down = cuda.stacked([one.gate_up for one in experts]), cuda.stacked([one.down for one in experts])
        if up is None or down is None or cuda.dot(up[1][0]) != cuda.dot(down[1][0]):
            return experts
        limit = experts[0].limit
        found = cls(MLP(*parts, limit) for parts in zip(up[1], down[1], strict=True))
        found.of = Experts(up[0], down[0], limit, cuda.dot(up[1][0]))
        found.run = importlib.import_module("autotune.runtimes.native.kernels.experts.triton").experts
        return found

    def mix(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of what the chosen experts make of ``x``; numbers that are none of them add nothing."""
        return self.run(x, chosen, weights, self.of)


class MoE:
    """Top-k routed experts plus a shared one. ``router`` [E, D] and ``bias`` [E] stay fp32; the bias only chooses.

    ``first`` is the number of the first of ``experts``.
    """

    first = 0

    def __init__(
        self, router: Tensor, bias: Tensor, experts: Sequence[MLP], shared: MLP, top_k: int, scaling: float
    ) -> None:
        self.router, self.bias, self.experts, self.shared = router, bias, experts, shared
        self.top_k, self.scaling = top_k, scaling
        self.fused: fused.Experts | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.fused is not None and len(x) <= self.fused.few:
            return self.fused(x)
        return self.mix(x, *self.route(x))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The experts of each token [T, k] and their weights [T, k]."""
        scores = F.linear(x, self.router).sigmoid()
        chosen = (scores + self.bias).topk(self.top_k, -1, sorted=False).indices
        weights = scores.gather(1, chosen)
        return chosen, weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.scaling

    def mix(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """What the chosen experts and the shared one make of ``x``."""
        out = self.shared(x)
        if isinstance(self.experts, Grouped):
            return out + self.experts.mix(x, chosen - self.first if self.first else chosen, weights)
        if len(x) == 1:
            for expert, weight in zip(chosen[0].tolist(), weights[0].unbind(), strict=True):
                out = torch.addcmul(out, self.experts[expert](x), weight)
            return out
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        token = order // self.top_k
        counts = torch.bincount(flat, minlength=len(self.experts)).tolist()
        shares = zip(self.experts, torch.split(x[token], counts), strict=True)
        parts = [expert(rows) for expert, rows in shares if len(rows)]
        routed = torch.cat(parts) * weights.flatten()[order, None]
        return out.index_add(0, token, routed)

    def fuse(self, library: ctypes.CDLL, limit: float) -> None:
        """Run few tokens through the C kernel, where every weight has one."""
        rule = (self.top_k, self.scaling, limit)
        self.fused = fused.Experts(library, self.router, self.bias, [*self.experts, self.shared], self.first, rule)
