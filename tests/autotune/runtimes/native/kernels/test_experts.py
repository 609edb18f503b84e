"""Routed experts: routing made on the device, and the grouped products against the loop over experts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.runtimes.native.kernels.blocks import Blocks
from autotune.runtimes.native.kernels.experts import reference
from autotune.runtimes.native.kernels.experts import triton as kernel
from autotune.runtimes.native.kernels.experts.reference import Experts, Stack
from autotune.runtimes.native.kernels.w4a16.reference import pack
from autotune.runtimes.native.quant.codes import int4_codes, int8_codes

COUNT, HIDDEN, INNER = 5, 64, 96


def stack(weights: torch.Tensor, bits: int, group: int, dot: torch.dtype) -> Stack:
    if bits == 16:
        return Stack(weights.to(dot))
    if bits == 8:
        codes, scales = zip(*map(int8_codes, weights), strict=True)
        return Stack(torch.stack(codes), torch.stack(scales))
    codes, scales, lows = zip(*(int4_codes(weight, group) for weight in weights), strict=True)
    packed = torch.stack([pack(part, scale.shape[1]) for part, scale in zip(codes, scales, strict=True)])
    return Stack(packed, torch.stack(scales), torch.stack(lows))


def layer(bits: int = 16, group: int = 32, dot: torch.dtype = torch.float32) -> Experts:
    generator = torch.Generator().manual_seed(bits)
    gate_up = torch.randn(COUNT, 2 * INNER, HIDDEN, generator=generator) * 0.2
    down = torch.randn(COUNT, HIDDEN, INNER, generator=generator) * 0.2
    return Experts(stack(gate_up, bits, group, dot), stack(down, bits, 32, dot), limit=1.0, dot=dot)


def tokens(count: int, top: int = 2, experts: int = COUNT) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    chosen = torch.rand(count, experts, generator=generator).topk(top).indices
    weights = torch.rand(count, top, generator=generator)
    return torch.randn(count, HIDDEN, generator=generator), chosen, weights


@pytest.mark.parametrize("bits, group", [(16, 0), (8, 0), (4, 32), (4, 64)])
@pytest.mark.parametrize("dot", [torch.float32, torch.float16])
@pytest.mark.parametrize("count", [1, 3, 17])
def test_the_kernels_are_the_reference(count: int, bits: int, group: int, dot: torch.dtype) -> None:
    of = layer(bits, group, dot)
    x, chosen, weights = tokens(count)
    tolerance = {} if dot == torch.float32 else {"rtol": 1e-3, "atol": 1e-3}  # the inner activations are rounded
    expected = reference.experts(x, chosen, weights, of)
    torch.testing.assert_close(kernel.experts(x, chosen, weights, of), expected, **tolerance)


@pytest.mark.parametrize("count", [1, 17])
def test_int8_activations_have_a_scale_a_row_in_both_products(count: int) -> None:
    wide, narrow = layer(8), replace(layer(8), dot=torch.int8)
    x, chosen, weights = tokens(count)
    x *= torch.logspace(-2, 2, count)[:, None]
    found, expected = (run.experts(x, chosen, weights, narrow) for run in (kernel, reference))
    # A code that rounds the other way, since the sums before it were taken in another order, moves a row by a step.
    assert (found - expected).norm() <= 1e-3 * expected.norm()
    exact = reference.experts(x, chosen, weights, wide)
    error = (found - exact).norm(dim=1) / exact.norm(dim=1)
    assert 0 < error.max() < 0.1


@pytest.mark.parametrize("chosen", [[[2]], [[2]] * 40, [[0], [4]] * 9, [[4]] * 17 + [[0]]])
def test_experts_without_tokens_and_one_with_all(chosen: list[list[int]]) -> None:
    of, ids = layer(), torch.tensor(chosen)
    x, weights = torch.randn(len(ids), HIDDEN), torch.ones(len(ids), 1)
    expected = reference.experts(x, ids, weights, of)
    torch.testing.assert_close(kernel.experts(x, ids, weights, of), expected)


def test_experts_of_another_rank_add_nothing() -> None:
    of = layer(8)
    x, chosen, weights = tokens(9)
    far = chosen.clone()
    far[::2, 0], far[1::3, 1] = -1, COUNT
    expected = reference.experts(x, far, weights, of)
    torch.testing.assert_close(kernel.experts(x, far, weights, of), expected)
    kept = (far >= 0) & (far < COUNT)
    torch.testing.assert_close(expected, reference.experts(x, chosen, weights * kept, of))
    nobody = torch.full_like(chosen, -1)
    assert not kernel.experts(x, nobody, weights, of).any()


@pytest.mark.parametrize("m, n, k", [(16, 32, 16), (32, 64, 64), (64, 16, 128)])
def test_no_choice_of_blocks_changes_the_result(m: int, n: int, k: int) -> None:
    of = layer(8)
    x, chosen, weights = tokens(21)
    blocks = Blocks(m, 2 * n, k), Blocks(m, n, k)
    expected = reference.experts(x, chosen, weights, of)
    torch.testing.assert_close(kernel.launch(blocks, x, chosen, weights, of), expected)


@settings(max_examples=40, deadline=None)
@given(
    chosen=st.lists(st.integers(-1, 9), min_size=1, max_size=90),
    experts=st.integers(1, 9),
    rows=st.sampled_from([4, 16]),
)
def test_routing_covers_every_pair_once(chosen: list[int], experts: int, rows: int) -> None:
    order, (owner, first, end) = kernel.route(torch.tensor(chosen)[:, None], experts, rows)
    seen: list[int] = []
    for expert, start, stop in zip(owner.tolist(), first.tolist(), end.tolist(), strict=True):
        if expert < 0:
            continue
        pairs = order[start : min(start + rows, stop)].tolist()
        assert pairs and all(chosen[pair] == expert for pair in pairs)
        seen += pairs
    assert sorted(seen) == [pair for pair, expert in enumerate(chosen) if 0 <= expert < experts]


def test_the_clamp_of_gate_and_up_is_the_models() -> None:
    gate_up = torch.cat([torch.eye(HIDDEN), torch.eye(HIDDEN)])[None] * 10
    of = Experts(Stack(gate_up), Stack(torch.eye(HIDDEN)[None]), limit=2.0, dot=torch.float32)
    x = torch.linspace(-1, 1, HIDDEN)[None]
    gate, up = (10 * x).clamp(max=2.0), (10 * x).clamp(-2.0, 2.0)
    out = kernel.experts(x, torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1), of)
    torch.testing.assert_close(out, torch.nn.functional.silu(gate) * up)
