"""Split decode attention: any number of parts merges to the whole, also where most parts see nothing."""

from __future__ import annotations

import pytest
import torch
from contracts.latents import cached, queries, scope

from autotune.runtimes.native.kernels.absorbed.reference import absorbed
from autotune.runtimes.native.kernels.split_kv import reference
from autotune.runtimes.native.kernels.split_kv import triton as kernel

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
POSITIONS = [[70], [0], [33], [5]]
BACKENDS = [reference.split_kv, kernel.split_kv]


@pytest.mark.parametrize("run", BACKENDS, ids=["reference", "triton"])
@pytest.mark.parametrize("splits", [1, 2, 4, 8])
def test_parts_merge_to_the_whole(run: object, splits: int) -> None:
    where = scope(POSITIONS)
    latents, query = cached([71] * 4, 20), queries(where, 3, 20)
    found = run(query, latents, where, 0.2, splits, False)  # type: ignore[operator]
    torch.testing.assert_close(found, absorbed(query, latents, where, 0.2), **CLOSE)


@pytest.mark.parametrize("run", BACKENDS, ids=["reference", "triton"])
@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("stored", ["fp32", "int8"])
def test_a_selection_is_split_too(run: object, gather: bool, stored: str) -> None:
    where = scope([[70], [4], [33], [45]], 4, 17)  # all pools of the second are chosen, and most are not real
    latents, query = cached([71] * 4, 16, stored), queries(where, 3, 16)
    found = run(query, latents, where, 0.2, 4, gather)  # type: ignore[operator]
    torch.testing.assert_close(found, absorbed(query, latents, where, 0.2), **CLOSE)


def test_scores_far_apart_do_not_overflow() -> None:
    where = scope([[70]])
    latents, query = cached([71], 16), queries(where, 2, 16) * 100
    for run in BACKENDS:
        found = run(query, latents, where, 1.0, 4, False)
        torch.testing.assert_close(found, absorbed(query, latents, where, 1.0), **CLOSE)
