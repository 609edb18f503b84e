"""Tuned blocks of the Triton products, in the interpreter: really launched, and no choice changes the answer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from autotune.runtimes.native.kernels import blocks, tuning
from autotune.runtimes.native.kernels.blocks import Blocks
from autotune.runtimes.native.kernels.measure import Bench
from autotune.runtimes.native.kernels.operators import operators
from autotune.runtimes.native.kernels.tuning import Operator
from autotune.runtimes.native.kernels.w8a16 import triton as w8a16
from search_spaces.kernels import kernel_space

OPERATORS = [
    Operator("w8a16", "int8-fp32", 48, 96, 4),
    Operator("w4a16", "int4g32-fp32", 48, 96, 4),
    Operator("w8a8", "int8-int8", 48, 96, 4),
]


@pytest.fixture(autouse=True)
def untuned() -> Iterator[None]:
    yield
    tuning.use({})


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.op)
def test_every_choice_that_the_space_allows_answers_as_the_reference(operator: Operator) -> None:
    bench = Bench(operator, 1)
    found = bench.product.first.tunable(operator.rows)
    space = kernel_space("triton", found["facts"], found["defaults"])
    assert space.broken(space.default()) == ()
    for choice in (space.default(), space.complete({"m": 16, "n": 32, "k": 32, "split": 2, "warps": 2, "stages": 1})):
        timing = bench.measure(choice)
        assert timing.error <= timing.limit == 1e-4 and len(timing.samples) >= 5


def test_a_product_is_launched_with_what_was_tuned_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Blocks] = []
    launch = w8a16.launch
    monkeypatch.setattr(w8a16, "launch", lambda blocks, *rest: used.append(blocks) or launch(blocks, *rest))
    choice = {"m": 32, "n": 16, "k": 64, "split": 1, "warps": 2, "stages": 2}
    Bench(OPERATORS[0], 1).measure(choice)
    assert set(used) == {Blocks(32, 16, 64, 1, 2, 2)}


def test_blocks_are_the_tuned_the_nearest_or_the_default() -> None:
    choice = {"m": 32, "n": 16, "k": 64, "split": 1, "warps": 2, "stages": 2}
    table = tuning.use({"w8a16/int8-bf16/4096x4096/16": choice})
    assert blocks.chosen("w8a16", "int8-bf16", (20, 4096, 4096), 16) == Blocks(**choice)
    assert blocks.chosen("w8a16", "int8-bf16", (16, 4096, 6144), 16) == Blocks(**choice)
    usual = blocks.default(1, 4096, 4096, 16)
    assert blocks.chosen("w8a16", "int8-bf16", (1, 4096, 4096), 16) == usual
    assert list(table.said.values()) == ["tuned", "nearest 4096x4096", "default"]


@pytest.mark.parametrize("op", ["w8a16/int8-bf16", "w4a16/int4g32-bf16", "w4a16/int4g128-fp32", "w8a8/int8-int8"])
@pytest.mark.parametrize("shape", [(24576, 4096), (4096, 2048), (256, 512)])
def test_the_default_of_every_shape_breaks_no_rule(op: str, shape: tuple[int, int]) -> None:
    name, dtype = op.split("/")
    group = int(dtype.partition("g")[2].partition("-")[0] or 0)
    facts = {"group": group or 1, "weight_bytes": 0.5 + 4 / group if group else 1, "inputs": shape[1],
             "activation_bytes": 1 if name == "w8a8" else 4}  # fmt: skip
    for rows in tuning.ROWS:
        made = blocks.default(rows, *shape, group or 32)
        defaults = {name: getattr(made, name) for name in ("m", "n", "k", "split", "warps", "stages")}
        space = kernel_space("triton", {**facts, "rows": rows}, defaults)
        assert space.broken(space.default()) == ()


def test_a_gpu_has_the_triton_operators() -> None:
    from autotune.runtimes.native.config import read_config
    from autotune.setting import reference_model

    found = operators(read_config(reference_model()), gpu=True)
    assert {(o.op, o.dtype) for o in found} == {
        ("w8a16", "int8-fp32"), ("w8a16", "int8-bf16"), ("w4a16", "int4g64-fp32"), ("w4a16", "int4g64-bf16"),
        ("w8a8", "int8-int8"),
    }  # fmt: skip
    assert len(found) == len(set(found))
