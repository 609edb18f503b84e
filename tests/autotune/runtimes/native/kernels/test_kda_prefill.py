"""Kimi delta attention by chunks: the reference against one token after another, Triton against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autotune.runtimes.native.kernels.kda_decode.reference import delta_rule
from autotune.runtimes.native.kernels.kda_prefill import reference
from autotune.runtimes.native.kernels.kda_prefill import triton as kernel

CLOSE = {"rtol": 2e-5, "atol": 2e-5}


def case(length: int, heads: int, size: int, bound: float = -5.0) -> tuple[Tensor, ...]:
    source = torch.Generator().manual_seed(length * heads * size)
    q, k, v, raw = torch.randn(4, length, heads, size, generator=source).unbind()
    beta = torch.randn(length, heads, generator=source).sigmoid()
    return q, k, v, bound * (2 * raw).sigmoid(), beta, torch.randn(heads, size, size, generator=source)


def one_by_one(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    outs, state = [], state[None]
    for t in range(len(q)):
        out, state = delta_rule(q[t : t + 1], k[t : t + 1], v[t : t + 1], decay[t : t + 1], beta[t : t + 1], state)
        outs.append(out[0])
    return torch.stack(outs), state[0]


@pytest.mark.parametrize("chunk", [16, 32, 64])
@pytest.mark.parametrize("run", [reference.kda_prefill, kernel.kda_prefill], ids=["reference", "triton"])
def test_chunks_are_one_token_after_another(run: object, chunk: int) -> None:
    inputs = case(70, 2, 16)
    out, states = run(*inputs, chunk)  # type: ignore[operator]
    wanted, last = one_by_one(*inputs)
    torch.testing.assert_close(out, wanted, **CLOSE)
    torch.testing.assert_close(states[-1], last, **CLOSE)


@pytest.mark.parametrize("length, chunk", [(1, 16), (15, 16), (16, 16), (33, 16), (33, 32), (20, 64)])
@pytest.mark.parametrize("heads, size", [(1, 16), (3, 20)])
def test_the_kernel_is_the_reference(length: int, chunk: int, heads: int, size: int) -> None:
    inputs = case(length, heads, size)
    (found, states), (wanted, expected) = (m.kda_prefill(*inputs, chunk) for m in (kernel, reference))
    torch.testing.assert_close(found, wanted, **CLOSE)
    assert len(states) == len(expected) == -(-length // chunk)
    torch.testing.assert_close(torch.stack(list(states)), torch.stack(expected), **CLOSE)


def test_equal_keys_without_decay_do_not_grow() -> None:
    """I + A then has the worst powers that there are (a series of squarings loses 5 digits here)."""
    q, k, v, decay, beta, state = case(64, 1, 16)
    inputs = (q, k[:1].expand_as(k), v, torch.zeros_like(decay), torch.ones_like(beta), state)
    out, _ = kernel.kda_prefill(*inputs, 64)
    torch.testing.assert_close(out, one_by_one(*inputs)[0], **CLOSE)


def test_the_fastest_decay_does_not_overflow() -> None:
    q, k, v, decay, beta, state = case(64, 1, 16)
    inputs = (q, k, v, torch.full_like(decay, -5.0), beta, state)
    torch.testing.assert_close(kernel.kda_prefill(*inputs, 64)[0], one_by_one(*inputs)[0], **CLOSE)


def test_no_tile_changes_the_result() -> None:
    q, k, v, decay, beta, state = case(40, 2, 40)
    wanted, _ = reference.kda_prefill(q, k, v, decay, beta, state, 16)
    found, _ = kernel.launch(kernel.Tile(16, 16, 4), q, k, v, (decay, beta), state, 16)
    torch.testing.assert_close(found, wanted, **CLOSE)
