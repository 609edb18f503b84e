"""The C kernels of a decode step over latents against the torch code that they stand in for."""

from __future__ import annotations

import pytest
import torch

from autotune.runtimes.native.kernels.absorbed.reference import absorbed
from autotune.runtimes.native.kernels.choose.reference import choose
from autotune.runtimes.native.kernels.cpu import fused
from autotune.runtimes.native.kernels.cpu import library as cpu
from autotune.runtimes.native.kernels.latents import Latents, Scope

pytestmark = pytest.mark.skipif(bool(cpu.refusal()), reason=cpu.refusal() or "compiled")
KPOOL, SIZE = 4, 16


@pytest.fixture(scope="module")
def kernels() -> dict[str, object]:
    found = cpu.library()
    assert found is not None
    return fused.attention(found)


def latents(dtype: torch.dtype, sequences: int, length: int, width: int) -> Latents:
    blocks = -(-length // SIZE)
    table = torch.randperm(sequences * blocks + 3)[: sequences * blocks].view(sequences, blocks)
    rows = torch.randn((sequences * blocks + 3) * SIZE, width)
    scale = torch.rand(len(rows) if dtype is torch.int8 else 0, 1).bfloat16() / 50
    rows = (rows * 40).clamp(-127, 127).round().to(dtype) if dtype is torch.int8 else rows.to(dtype)
    slots = (table[:, :, None] * SIZE + torch.arange(SIZE)).flatten(1)[:, :length]
    return Latents(rows, scale, table, SIZE, slots)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize(
    ("lengths", "picks"), [((1, 2, 3), 0), ((37, 5, 90), 0), ((90, 41, 77), 6), ((64, 63, 62), 15)]
)
def test_a_step_reads_what_each_query_may_see(
    kernels: dict[str, object], dtype: torch.dtype, lengths: tuple[int, ...], picks: int
) -> None:
    count, heads, width, length = len(lengths), 3, 48, max(lengths)
    rows = torch.tensor([[n - 1, 7] for n in lengths])  # positions lie apart in memory, as in a step
    positions, seen = rows[:, :1], latents(dtype, count, length, width)
    query = torch.randn(heads, count, 1, width).permute(1, 2, 0, 3)  # as a product a head leaves it
    scope = Scope(positions, KPOOL)
    if picks:
        keys = torch.randn(count, length // KPOOL, 32)
        pools, real = choose(torch.randn(count, 2, 32), torch.rand(count, 2), keys, rows[:, 0], KPOOL, picks)
        scope = Scope(positions, KPOOL, pools[:, None], real[:, None])
    wanted = absorbed(query, seen, scope, 0.2)
    for form in ("absorbed", "sparse"):
        if form == "absorbed" or picks:
            found = kernels[form](query, seen, scope, 0.2)  # type: ignore[operator]
            assert torch.allclose(found, wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top", [1, 5, 40])
def test_the_choice_of_pools_is_the_reference_one(kernels: dict[str, object], dtype: torch.dtype, top: int) -> None:
    count, pools = 4, 23
    queries, weights = torch.randn(count, 3, 32), torch.rand(count, 3)
    keys = torch.randn(count, pools, 32).to(dtype)
    keys[:, 11] = keys[:, 4]  # a tie goes to the earlier pool
    positions = torch.tensor([91, 3, 50, 2])
    wanted, true = choose(queries, weights, keys, positions, KPOOL, top)
    found, real = kernels["choose"](queries, weights, keys, positions, KPOOL, top)  # type: ignore[operator]
    assert torch.equal(real, true)
    assert torch.equal(found[real], wanted[true])
