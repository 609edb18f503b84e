"""The table of tuned kernels: exact before near before default, always said; and which products a checkpoint has."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autotune.runtimes.native.config import read_config
from autotune.runtimes.native.engine import Engine
from autotune.runtimes.native.inspect import packed
from autotune.runtimes.native.kernels import tuning
from autotune.runtimes.native.kernels.operators import operators, packable
from autotune.runtimes.native.kernels.tuning import NEAR, ROWS, Operator, Table, bucket, digest, packed_rows
from autotune.runtimes.native.quant.linear import make_linear
from autotune.setting import reference_model
from search_spaces import load

SIZES = st.integers(1, 20_000)
OPERATORS = st.builds(
    Operator, st.just("linear"), st.sampled_from(("int8-bf16", "int4g64-bf16")), SIZES, SIZES, st.sampled_from(ROWS)
)


@pytest.fixture(autouse=True)
def untuned() -> Iterator[None]:
    yield
    tuning.use({})


@given(st.dictionaries(OPERATORS, st.integers(0, 9), max_size=8), OPERATORS)
def test_exact_else_nearest_within_bounds_else_default(known: dict[Operator, int], wanted: Operator) -> None:
    table = Table({operator.key: {"mark": mark} for operator, mark in known.items()})
    found = table.find(wanted)
    near = {operator: wanted.distance(operator) for operator in known if math.isfinite(wanted.distance(operator))}
    if wanted in known:
        assert found == {"mark": known[wanted]} and table.said[wanted.key] == "tuned"
    elif near:
        least = min(near.values())
        assert found in [{"mark": known[operator]} for operator, apart in near.items() if apart == least]
        assert table.said[wanted.key].startswith("nearest ")
    else:
        assert found is None
        assert table.said == ({wanted.key: "default"} if known else {})


@given(OPERATORS, OPERATORS)
def test_distance_is_symmetric_and_bounded(left: Operator, right: Operator) -> None:
    assert left.distance(right) == pytest.approx(right.distance(left))
    assert left.distance(left) == 0
    apart = left.distance(right)
    assert math.isinf(apart) or (apart < 3 * NEAR and left.dtype == right.dtype)


@given(OPERATORS)
def test_a_key_names_its_operator(operator: Operator) -> None:
    assert Operator.parse(operator.key) == operator


def test_a_key_that_names_nothing_is_refused() -> None:
    for wrong in ("linear", "linear/int8/512/1", "linear/int8/512x512/1 ", ""):
        with pytest.raises(ValueError, match="no kernel of a tuned table"):
            Table({wrong: {}})


def test_the_nearest_is_named_by_its_shape_and_by_other_rows() -> None:
    table = Table({"linear/int8-bf16/512x256/16": {"path": "dense"}})
    table.find(Operator("linear", "int8-bf16", 600, 256, 16))
    table.find(Operator("linear", "int8-bf16", 512, 256, 20))
    table.find(Operator("linear", "int8-fp32", 512, 256, 16))
    assert list(table.said.values()) == ["nearest 512x256", "nearest 512x256, 16 rows", "default"]


def test_other_entries_are_another_digest() -> None:
    one = {"a/b/1x1/1": {"path": "dense"}}
    assert digest(one) == digest(dict(one)) != digest({"a/b/1x1/1": {"path": "packed"}})


@given(st.integers(1, 4096))
def test_rows_go_to_the_nearest_bucket(rows: int) -> None:
    assert bucket(rows) in ROWS
    assert all(abs(math.log(rows / bucket(rows))) <= abs(math.log(rows / other)) + 1e-12 for other in ROWS)


@pytest.mark.parametrize(
    ("paths", "usual", "few"),
    [
        ("", 16, 16), ("ppppp", 16, 1 << 31), ("ddddd", 16, 0), ("ppddd", 64, 8), ("pdddd", 64, 2), ("pppp-", 16, 128),
        ("p----", 16, 16), ("pp-dd", 16, 16), ("--d--", 64, 8), ("----p", 16, 16),
    ],
)  # fmt: skip
def test_rows_up_to_which_the_packed_product_runs(paths: str, usual: int, few: int) -> None:
    names = {"p": "packed", "d": "dense"}
    choices = {rows: {"path": names[p]} for rows, p in zip(ROWS, paths, strict=False) if p != "-"}
    found = packed_rows(choices, usual)
    assert max((last for last, _ in found), default=0) == few
    assert all(choice == choices.get(bucket(last), {}) for last, choice in found if last < 1 << 31 and last != usual)


def test_operators_are_exactly_the_shapes_that_the_engine_stores() -> None:
    config = load("native").complete({f"bits_{g}": 8 for g in ("attention", "dense", "experts", "shared", "lm_head")})
    engine = Engine(reference_model(), config)
    stored = {tuple(linear.dense().shape) for _, linear in packed(engine.decoder)}
    model = read_config(reference_model())
    assert stored == set(packable(model))
    kept = operators(model, "int8", {"compute": ("bf16",), "bits_lm_head": (8,)})
    assert {(o.outputs, o.inputs) for o in kept} == stored and {o.dtype for o in kept} == {"int8-bf16"}
    assert operators(model, "no such") == []


def test_weights_take_what_was_stored_and_say_so(tmp_path: Path) -> None:
    weight, x = torch.randn(256, 128), torch.randn(40, 128)
    untouched = make_linear(weight, 8, "bf16")
    first = {"linear/int8-bf16/256x128/1": {"path": "packed", "block": 2, "ahead": 256}}
    dense = {f"linear/int8-bf16/256x128/{rows}": {"path": "dense"} for rows in ROWS[1:]}
    table = tuning.use(first | dense)
    tuned = make_linear(weight, 8, "bf16")
    assert tuned.few == 2
    assert table.said == {f"linear/int8-bf16/256x128/{rows}": "tuned" for rows in ROWS}
    near = make_linear(torch.randn(512, 128), 8, "bf16")
    assert near.few == 2
    assert table.said["linear/int8-bf16/512x128/1"] == "nearest 256x128"
    torch.testing.assert_close(tuned(x), untouched(x), atol=0.05, rtol=0.05)
