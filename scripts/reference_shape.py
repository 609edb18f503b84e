"""Sizes of the reference model and the small layers that all of its parts share.

Knows the shape and in which type a large product runs; knows no architecture.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import reference_fused as fused
import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Shape:
    """The reference model's sizes, in the words of the Hugging Face config."""

    vocab_size: int = 288
    hidden_size: int = 512
    num_hidden_layers: int = 4
    intermediate_size: int = 512
    moe_intermediate_size: int = 128
    n_routed_experts: int = 8
    num_experts_per_tok: int = 2
    routed_scaling_factor: float = 2.5
    swiglu_limit: float = 10.0
    linear_num_heads: int = 4
    linear_head_dim: int = 64
    linear_conv_kernel_dim: int = 4
    linear_lower_bound: float = -5.0
    num_attention_heads: int = 4
    q_lora_rank: int = 128
    kv_lora_rank: int = 128
    qk_nope_head_dim: int = 64
    v_head_dim: int = 64
    index_topk: int = 128
    index_kpool: int = 4
    index_n_heads: int = 4
    index_head_dim: int = 32
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 4
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-5

    @property
    def layer_types(self) -> list[str]:
        return ["indexed_attention" if i % 4 == 3 else "linear_attention" for i in range(self.num_hidden_layers)]

    @property
    def mlp_layer_types(self) -> list[str]:
        return ["dense"] + ["sparse"] * (self.num_hidden_layers - 1)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T in the type of large products."""
    return F.linear(x.to(fused.COMPUTE), weight.to(fused.COMPUTE))


def linear(inputs: int, outputs: int) -> nn.Linear:
    """A bias-free layer, normal with the standard deviation that keeps the scale of its input."""
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=0.6 / math.sqrt(inputs))
    return layer


class Norm(nn.Module):
    """Root-mean-square norm with a weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return fused.rms(x, self.eps) * self.weight
