"""A trainable `glm5_next` text decoder that is fast on CPU, under the parameter names that `transformers` gives it.

Knows the architecture's equations (the oracle is transformers/models/glm5_next); knows nothing of text, optimizer or
files. Large products run in bf16, everything that the architecture keeps in fp32 runs in fp32.
"""

from __future__ import annotations

import math

import reference_fused as fused
import torch
import torch.nn.functional as F
from reference_attention import LinearAttention, SparseAttention
from reference_shape import Norm, Shape, linear, product
from torch import Tensor, nn


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


class HyperConnection(nn.Module):
    def __init__(self, shape: Shape, block: int) -> None:
        super().__init__()
        streams = shape.hc_mult
        self.fn = nn.Parameter(torch.randn((2 + streams) * streams, streams * shape.hidden_size) * 0.01)
        base = torch.zeros((2 + streams) * streams)
        base[:streams] = -1.5  # block k starts by reading mostly stream k mod 4, so that the streams can differ
        base[block % streams] = 1.5
        base[2 * streams :] = 4.0 * torch.eye(streams).flatten()  # and by leaving the streams unmixed
        self.base = nn.Parameter(base)
        self.scale = nn.Parameter(torch.full((3,), 0.5))


class DenseMLP(nn.Module):
    def __init__(self, shape: Shape, width: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = linear(shape.hidden_size, width), linear(shape.hidden_size, width)
        self.down_proj = linear(width, shape.hidden_size)
        self.limit = shape.swiglu_limit

    def forward(self, x: Tensor) -> Tensor:
        gate, up = product(x, torch.cat([self.gate_proj.weight, self.up_proj.weight])).chunk(2, -1)
        return product(swiglu(gate, up, self.limit), self.down_proj.weight)


class Router(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape.n_routed_experts, shape.hidden_size) * 0.02)
        self.e_score_correction_bias = nn.Buffer(torch.zeros(shape.n_routed_experts))
        self.load = nn.Buffer(torch.zeros(shape.n_routed_experts), persistent=False)
        self.shape = shape

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Experts [T, k] and their weights; the bias only chooses (balancing without an auxiliary loss)."""
        scores = F.linear(x.float(), self.weight).sigmoid()
        chosen = (scores + self.e_score_correction_bias).topk(self.shape.num_experts_per_tok, -1).indices
        self.load += torch.bincount(chosen.flatten(), minlength=self.shape.n_routed_experts)
        weights = scores.gather(1, chosen)
        return chosen, weights / weights.sum(-1, keepdim=True) * self.shape.routed_scaling_factor

    @torch.no_grad()
    def rebalance(self, rate: float) -> float:
        """Lift the bias of under-used experts, lower the others'; returns the busiest expert's load over the mean."""
        worst = float(self.load.max() / self.load.mean())
        self.e_score_correction_bias += rate * torch.sign(self.load.mean() - self.load)
        self.load.zero_()
        return worst


class Experts(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        count, hidden, width = shape.n_routed_experts, shape.hidden_size, shape.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.randn(count, 2 * width, hidden) * 0.6 / math.sqrt(hidden))
        self.down_proj = nn.Parameter(torch.randn(count, hidden, width) * 0.6 / math.sqrt(width))
        self.shape = shape

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=self.shape.n_routed_experts).tolist()
        inputs = x[order // chosen.shape[1]].split(counts)
        outputs = []
        for part, gate_up, down in zip(inputs, self.gate_up_proj, self.down_proj, strict=True):
            gate, up = product(part, gate_up).chunk(2, -1)
            outputs.append(product(swiglu(gate, up, self.shape.swiglu_limit), down))
        back = torch.cat(outputs)[order.argsort()].view(*chosen.shape, -1)
        return (back * weights.to(back.dtype)[..., None]).sum(1)


class MoE(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.experts, self.gate = Experts(shape), Router(shape)
        self.shared_experts = DenseMLP(shape, shape.moe_intermediate_size)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.experts(x, *self.gate(x)) + self.shared_experts(x)
        return out


class Layer(nn.Module):
    def __init__(self, shape: Shape, index: int) -> None:
        super().__init__()
        self.shape = shape
        linear_layer = shape.layer_types[index] == "linear_attention"
        self.self_attn = LinearAttention(shape) if linear_layer else SparseAttention(shape)
        sparse = shape.mlp_layer_types[index] == "sparse"
        self.mlp = MoE(shape) if sparse else DenseMLP(shape, shape.intermediate_size)
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.attn_hc, self.ffn_hc = HyperConnection(shape, 2 * index), HyperConnection(shape, 2 * index + 1)

    def forward(self, streams: Tensor, batch: int, sparse: bool) -> tuple[Tensor, Tensor]:
        loss = torch.zeros(())
        x, post, comb = self.read(streams, self.attn_hc, self.input_layernorm)
        if isinstance(self.self_attn, SparseAttention):
            out, loss = self.self_attn(x, batch, sparse)
        else:
            out = self.self_attn(x, batch)
        streams = fused.write_streams(streams, out, post, comb)
        x, post, comb = self.read(streams, self.ffn_hc, self.post_attention_layernorm)
        return fused.write_streams(streams, self.mlp(x), post, comb), loss

    def read(self, streams: Tensor, hc: HyperConnection, norm: Norm) -> tuple[Tensor, Tensor, Tensor]:
        mixed = F.linear(streams.flatten(1), hc.fn)
        iterations = self.shape.hc_sinkhorn_iters
        return fused.read_streams(streams, mixed, hc.base, hc.scale, norm.weight, iterations)


class Decoder(nn.Module):
    """Ids [batch, length], length a multiple of 16, to logits [batch, length, vocabulary] and the indexer's loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=0.5)
        self.layers = nn.ModuleList(Layer(shape, index) for index in range(shape.num_hidden_layers))
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = linear(shape.hidden_size, shape.vocab_size)

    def forward(self, ids: Tensor, sparse: bool) -> tuple[Tensor, Tensor]:
        x = self.embed_tokens(ids.flatten())
        streams = x[:, None].expand(-1, self.shape.hc_mult, -1).contiguous()
        total = torch.zeros(())
        for layer in self.layers:
            streams, loss = layer(streams, len(ids), sparse)
            total = total + loss
        logits = product(self.norm(streams.mean(1)), self.lm_head.weight).float()
        return logits.view(*ids.shape, -1), total

    def routers(self) -> list[Router]:
        """The routers of the sparse layers, which balance themselves by their load."""
        return [module for module in self.modules() if isinstance(module, Router)]
