"""Weights and experts packed for Triton have the values of the other packing: alone, in a layer and in an engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autotune.runtimes.native.config import read_config
from autotune.runtimes.native.engine import Engine
from autotune.runtimes.native.kernels import select
from autotune.runtimes.native.moe import MLP, Grouped, MoE
from autotune.runtimes.native.quant import cuda, linear
from search_spaces import load

pytestmark = pytest.mark.usefixtures("interpreted")
SPACE = load("native").narrow({"cores": 2})
WIDTHS = [(8, "weight_only", 64), (8, "int8_token", 64), (8, "int8_tensor", 64), (4, "weight_only", 32)]
PROMPTS = [[7], [5, 31, 80, 12, 66]]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("bits, activations, group", WIDTHS)
def test_a_width_means_the_same_in_both_packings(bits: int, activations: str, group: int) -> None:
    arguments = (random(72, 128) * 0.1, bits, "fp32", group, activations)
    here, there = linear.make_linear(*arguments), cuda.make_linear(*arguments)
    assert type(there).__module__ == cuda.__name__
    assert (there.kernel, there.dtype, there.shape) == (here.kernel, here.dtype, here.shape)
    torch.testing.assert_close(there.dense(), here.dense())
    for rows in (1, 19):
        x = random(rows, 128)
        torch.testing.assert_close(there(x), here(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bits, activations", [(8, "weight_only"), (8, "int8_token"), (4, "weight_only")])
def test_a_part_of_the_inputs_is_stored_as_the_whole_would_be(bits: int, activations: str) -> None:
    weight, columns = random(16, 128), slice(64, 128)
    whole = cuda.make_linear(weight, bits, "fp32", 32, activations)
    part = cuda.make_linear(weight, bits, "fp32", 32, activations, columns)
    assert torch.equal(part.dense(), whole.dense()[:, columns])


def test_what_a_packing_does_not_take_stays_wider() -> None:
    assert cuda.make_linear(random(8, 48), 4, "fp32", 32).kernel == "int8"
    assert cuda.make_linear(random(8, 48), 16, "fp32").kernel == "fp32"


def test_four_bits_are_half_of_eight_and_their_scales() -> None:
    eight, four = (cuda.make_linear(random(64, 128), bits, "fp32", 32) for bits in (8, 4))
    assert (eight.nbytes, four.nbytes) == (64 * 128 + 64 * 4, 64 * 64 + 64 * 4 * 2 * 2)


def layer(make: Any, bits: int, count: int = 4, activations: str = "weight_only") -> MoE:
    source = torch.Generator().manual_seed(bits)

    def weight(rows: int, columns: int) -> Any:
        return make(torch.randn(rows, columns, generator=source) * 0.2, bits, "fp32", 32, activations)

    mlps = [MLP(weight(2 * 64, 64), weight(64, 64), 1.5) for _ in range(count + 1)]
    return MoE(torch.randn(count, 64, generator=source), torch.zeros(count), mlps[:count], mlps[count], 2, 2.5)


@pytest.mark.parametrize(
    "bits, activations", [(16, "weight_only"), (8, "weight_only"), (8, "int8_token"), (4, "weight_only")]
)
def test_experts_at_once_are_experts_one_by_one(bits: int, activations: str) -> None:
    here, there = (layer(make, bits, 4, activations) for make in (linear.make_linear, cuda.make_linear))
    there.experts = Grouped.where_possible(there.experts)
    assert isinstance(there.experts, Grouped)
    for rows in (1, 13):
        x = random(rows, 64)
        found, wanted = there(x), here(x)
        near = 1e-3 if activations == "int8_token" else 1e-5  # a code may round the other way
        assert (found - wanted).norm() <= near * wanted.norm()


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_stacking_keeps_every_expert_and_no_second_copy(bits: int) -> None:
    before = layer(cuda.make_linear, bits).experts
    after = Grouped.where_possible(before)
    assert isinstance(after, Grouped)
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old.down.dense(), new.down.dense())
        assert new.gate_up.nbytes == old.gate_up.nbytes
    stack = after.of.gate_up.weight
    assert all(new.gate_up.data.untyped_storage().data_ptr() == stack.data_ptr() for new in after)


class Unread(TorchDispatchMode):
    """Fails at what makes a GPU's host wait for a value, and so cannot be captured in a CUDA graph."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        reads = (
            aten._local_scalar_dense,
            aten.nonzero,
            aten.bincount,
            aten.masked_select,
            aten._unique2,
            aten.unique_dim,
        )
        assert func.overloadpacket not in reads, f"{func} reads a tensor on the host"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_the_host_never_reads_the_routing(bits: int) -> None:
    made = layer(cuda.make_linear, bits)
    with Unread(), pytest.raises(AssertionError, match="on the host"):
        made(random(3, 64))  # expert by expert it does
    made.experts = Grouped.where_possible(made.experts)
    with Unread():
        made(random(3, 64))


def test_experts_stored_in_different_ways_stay_apart() -> None:
    mixed = [*layer(cuda.make_linear, 8, 2).experts, *layer(cuda.make_linear, 4, 2).experts]
    assert Grouped.where_possible(mixed) is mixed
    tensor, token = (cuda.make_linear(random(64, 32), 8, "fp32", 32, name) for name in ("int8_tensor", "int8_token"))
    for up, down in ((tensor, tensor), (token, mixed[0].down)):
        apart = [MLP(up, down, 1.0)] * 2
        assert Grouped.where_possible(apart) is apart


@pytest.mark.parametrize(
    "knobs", [{"bits_attention": 8}, {"bits_experts": 4, "bits_shared": 8, "bits_dense": 4}], ids=str
)
def test_an_engine_on_triton_products_gives_the_same_tokens(tinier: Path, run: Any, knobs: dict[str, Any]) -> None:
    config = SPACE.complete({"kv_tokens": 1024, "compute": "fp32", "bits_group_size": 32, **knobs})
    here = select.here(read_config(tinier), "fp32")
    wanted = Engine(tinier, config, replace(here, interpreter=False))
    found = Engine(tinier, config, replace(here, interpreter=True))
    effective = found.effective()
    assert effective["kernel_backends"]["products"] == "triton"
    assert effective["bits_stored"] == wanted.effective()["bits_stored"]
    assert "compiles for GPUs" in wanted.effective()["kernel_refusals"]["products=triton"]
    assert any(isinstance(one.mlp, MoE) and isinstance(one.mlp.experts, Grouped) for one in found.decoder.layers)
    assert run(found, PROMPTS, 2) == run(wanted, PROMPTS, 2)


def test_the_interpreter_refuses_bf16_products() -> None:
    at = select.Capability("cpu", (0, 0), "fp32", 64, 64, 64, triton=True, interpreter=True)
    assert "wrongly" in select.products(at, "bf16")
    assert select.products(at, "fp32") == ""
    assert "not installed" in select.products(replace(at, triton=False), "fp32")
