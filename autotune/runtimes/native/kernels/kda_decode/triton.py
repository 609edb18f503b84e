"""One program for each sequence and head: its state is read and written once, everything else stays inside."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from autotune.runtimes.native.kda import Small


@triton.jit
def convolved(qkv, conv, taps, row, slot, c, real, WIDTH: tl.constexpr, TAPS: tl.constexpr):
    """SiLU of the causal convolution at the channels ``c``, whose window moves on by one token."""
    new = tl.load(qkv + row * WIDTH + c, mask=real, other=0)
    total = new * tl.load(taps + (TAPS - 1) * WIDTH + c, mask=real, other=0)
    window = conv + slot * (TAPS - 1) * WIDTH + c
    for t in tl.static_range(TAPS - 1):
        old = tl.load(window + t * WIDTH, mask=real, other=0)
        total += old * tl.load(taps + t * WIDTH + c, mask=real, other=0)
        if t > 0:
            tl.store(window + (t - 1) * WIDTH, old, mask=real)
    tl.store(window + (TAPS - 2) * WIDTH, new, mask=real)
    return total * tl.sigmoid(total)


@triton.jit
def step_kernel(
    qkv, forget, beta, gate, conv, states, slots, taps, dt_bias, rate, o_norm, out, bound, eps,
    H: tl.constexpr, D: tl.constexpr, TAPS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """out [B, H · D]; conv and states are changed at the rows' slots."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    i = tl.arange(0, SIZE)
    real = i < D
    c = head * D + i
    at = row * H * D + c
    q = convolved(qkv, conv, taps, row, slot, c, real, 3 * H * D, TAPS)
    k = convolved(qkv, conv, taps, row, slot, c + H * D, real, 3 * H * D, TAPS)
    v = convolved(qkv, conv, taps, row, slot, c + 2 * H * D, real, 3 * H * D, TAPS)
    q = q * tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * tl.rsqrt(D * 1.0)
    k = k * tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
    raw = tl.load(forget + at, mask=real, other=0) + tl.load(dt_bias + c, mask=real, other=0)
    decay = tl.exp(bound * tl.sigmoid(tl.load(rate + head) * raw))
    tile = states + ((slot * H + head) * D + i[:, None]) * D + i[None, :]
    inside = real[:, None] & real[None, :]
    state = tl.load(tile, mask=inside, other=0).to(tl.float32) * decay[:, None]
    delta = (v - tl.sum(k[:, None] * state, 0)) * tl.sigmoid(tl.load(beta + row * H + head))
    state += k[:, None] * delta[None, :]
    tl.store(tile, state.to(states.dtype.element_ty), mask=inside)
    o = tl.sum(q[:, None] * state, 0)
    o = o * tl.rsqrt(tl.sum(o * o, 0) / D + eps) * tl.load(o_norm + i, mask=real, other=0)
    tl.store(out + at, o * tl.sigmoid(tl.load(gate + at, mask=real, other=0)), mask=real)


def kda_decode(
    projected: tuple[Tensor, Tensor, Tensor, Tensor],
    pool: tuple[Tensor, Tensor],
    slots: Tensor,
    small: Small,
    bounds: tuple[float, float],
) -> Tensor:
    """See the reference."""
    return launch(8, projected, pool, slots, small, bounds)


def launch(
    warps: int,
    projected: tuple[Tensor, Tensor, Tensor, Tensor],
    pool: tuple[Tensor, Tensor],
    slots: Tensor,
    small: Small,
    bounds: tuple[float, float],
) -> Tensor:
    """`kda_decode` with this many warps a program."""
    conv, states = pool
    _, heads, size, _ = states.shape
    parts = [part.contiguous() for part in projected]
    out = parts[0].new_empty(len(slots), heads * size)
    constants = [small[name] for name in ("taps", "dt_bias", "rate", "o_norm")]
    step_kernel[(len(slots), heads)](
        *parts, conv, states, slots.contiguous(), *constants, out, *bounds,
        H=heads, D=size, TAPS=conv.shape[1] + 1, SIZE=triton.next_power_of_2(size), num_warps=warps,
    )  # fmt: skip
    return out


def specimen(stored: str) -> tuple[Any, dict[str, str], dict[str, Any], dict[str, int]]:
    """GLM-5.3-Flash: 64 heads of 128, convolution over 4."""
    names = ("qkv", "forget", "beta", "gate", "conv", "taps", "dt_bias", "rate", "o_norm", "out")
    types = dict.fromkeys(names, "*fp32") | {"states": f"*{stored}", "slots": "*i64", "bound": "fp32", "eps": "fp32"}
    return step_kernel, types, {"H": 64, "D": 128, "TAPS": 4, "SIZE": 128}, {"num_warps": 8, "num_stages": 1}


SPECIMENS = [specimen(stored) for stored in ("fp32", "bf16")]
