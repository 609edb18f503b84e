"""Element-wise pieces of the reference network, plain functions that can be compiled in place.

On CPU they are bound by memory: one pass instead of ten made a training step 2.9x faster (1.9 s of CPU for 4,096 tokens
against 5.5 s). They know tensors only, no modules and no sizes beyond the four streams.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

COMPUTE = torch.bfloat16  # of large products: the matrix units' type, 4 to 10 times as fast as fp32 here
CHUNK = 16  # chunk x |gate lower bound 5| = 80 keeps the factorised decay inside fp32


def rms(x: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def read_streams(
    streams: Tensor, mixed: Tensor, base: Tensor, scale: Tensor, norm: Tensor, iterations: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Manifold-constrained hyper-connections (Xie et al. 2026): how a block reads four streams.

    ``streams`` [T, 4, D], ``mixed`` [T, 24] the projection before its input norm. Returns the normed block input
    [T, D] as ``COMPUTE``, the write weights [T, 4] and the doubly stochastic stream mix [T, 16] (row-major).
    """
    mixed = mixed * torch.rsqrt(streams.square().mean((1, 2)) + 1e-5)[:, None]
    pre = [torch.sigmoid(mixed[:, i] * scale[0] + base[i]) + 1e-6 for i in range(4)]
    post = 2 * torch.sigmoid(mixed[:, 4:8] * scale[1] + base[4:8])
    # [4][4] lists of token rows: each Sinkhorn step is then a few contiguous additions, not a reduction over 4 numbers
    rows = torch.softmax((mixed[:, 8:] * scale[2] + base[8:]).view(-1, 4, 4), -1) + 1e-6
    comb = rows / (rows.sum(-2, keepdim=True) + 1e-6)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + 1e-6)
        comb = comb / (comb.sum(-2, keepdim=True) + 1e-6)
    collapsed = sum(pre[i][:, None] * streams[:, i] for i in range(4))
    assert isinstance(collapsed, Tensor)
    return (rms(collapsed, 1e-5) * norm).to(COMPUTE), post, comb.flatten(1)


def write_streams(streams: Tensor, output: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """The block's ``output`` [T, D] spread over the mixed streams: [T, 4, D]."""
    output = output.float()
    rows = []
    for j in range(4):
        row = post[:, j, None] * output
        for i in range(4):
            row = row + comb[:, 4 * i + j, None] * streams[:, i]
        rows.append(row)
    return torch.stack(rows, 1)


def prepare_chunks(
    qkv: Tensor, decay: Tensor, beta: Tensor, size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The chunk-local factors of the delta rule from convolved ``qkv`` [N, 16, 3 d] (N = batch x heads x chunks).

    Decays are taken from the chunk's middle, so that both factors of exp(g_i - g_j) stay within exp(+-40).
    """
    q, k, v = qkv.float().split(size, -1)
    q = q / torch.sqrt(q.square().sum(-1, keepdim=True) + 1e-6) * size**-0.5
    k = k / torch.sqrt(k.square().sum(-1, keepdim=True) + 1e-6)
    g = decay.cumsum(-2)
    middle, last = g[..., CHUNK // 2 - 1 : CHUNK // 2, :], g[..., -1:, :]
    up, down = torch.exp(g - middle), torch.exp(middle - g)
    whole = torch.exp(g)
    beta = beta[..., None]
    return q * up, k * beta * up, k * down, v * beta, q * whole, k * beta * whole, k * torch.exp(last - g)


def convolve_taps(x: Tensor, taps: Tensor) -> Tensor:
    """Causal depthwise convolution and SiLU: ``x`` [batch, length, channels], ``taps`` [channels, kernel]; fp32."""
    kernel = taps.shape[1]
    padded = F.pad(x.float(), (0, 0, kernel - 1, 0))
    total = sum(padded[:, i : i + x.shape[1]] * taps[:, i] for i in range(kernel))
    assert isinstance(total, Tensor)
    return F.silu(total)


def norm_and_gate(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    return rms(x, 1e-5) * weight * torch.sigmoid(gate.float())


def fuse() -> None:
    """Compile every piece; callers reach them through this module, so that they get the compiled ones."""
    for piece in (read_streams, write_streams, prepare_chunks, convolve_taps, norm_and_gate):
        globals()[piece.__name__] = torch.compile(piece, dynamic=False)
