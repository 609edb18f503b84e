"""The two optimizers of the reference training: Muon for the hidden matrices, AdamW for everything else.

Knows parameters by shape and name only; knows nothing of text or time.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Hidden matrices (a stack of expert matrices too), and the rest: embeddings, norms, gates, hyper-connections."""
    matrices, rest = [], []
    for name, parameter in model.named_parameters():
        small = parameter.ndim < 2 or min(parameter.shape[-2:]) < 16  # routers, convolutions, per-head gates too
        if small or any(part in name for part in ("embed_tokens", "lm_head", "_hc.")):
            rest.append(parameter)
        else:
            matrices.append(parameter)
    return matrices, rest


def orthogonal(matrices: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrices of a stack [n, rows, columns], by five quintic Newton-Schulz steps.

    Coefficients: Jordan et al., Muon (2024).
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = (matrices.mT if tall else matrices).bfloat16()
    x = x / (x.float().flatten(1).norm(dim=1)[:, None, None] + 1e-7).bfloat16()
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


class Muon:
    """Orthogonalised momentum; the update's root mean square is 0.2 x rate, as AdamW's is (Liu et al. 2025)."""

    def __init__(self, parameters: list[nn.Parameter], momentum: float = 0.95, decay: float = 0.1) -> None:
        self.groups: dict[torch.Size, list[nn.Parameter]] = {}
        for parameter in parameters:
            self.groups.setdefault(parameter.shape[-2:], []).append(parameter)
        self.momenta = {parameter: torch.zeros_like(parameter) for parameter in parameters}
        self.momentum, self.decay = momentum, decay

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Updates and clears gradients; parameters without one are left alone."""
        for shape, members in self.groups.items():
            scale = 0.2 * max(shape) ** 0.5 * rate
            for parameter in (p for p in members if p.grad is not None):
                gradient, momentum = parameter.grad, self.momenta[parameter]
                assert gradient is not None
                momentum.lerp_(gradient, 1 - self.momentum)
                update = orthogonal(gradient.lerp_(momentum, self.momentum).view(-1, *shape)).view_as(parameter)
                parameter.mul_(1 - rate * self.decay).add_(update.float(), alpha=-scale)
                parameter.grad = None


class AdamW:
    """torch's AdamW, decaying only matrices, with one rate a step."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.02},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]
        self.inner = torch.optim.AdamW(groups, betas=(0.9, 0.98), eps=1e-10)

    def step(self, rate: float) -> None:
        """Updates and clears gradients."""
        for group in self.inner.param_groups:
            group["lr"] = rate
        self.inner.step()
        self.inner.zero_grad()
