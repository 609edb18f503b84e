"""The C kernels against the torch code that they stand in for."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.runtimes.native import hyper
from autotune.runtimes.native.kernels.cpu import fused
from autotune.runtimes.native.kernels.cpu import library as cpu
from autotune.runtimes.native.kernels.hyper import reference as hyper_kernel
from autotune.runtimes.native.kernels.kda_decode import reference as kda_kernel
from autotune.runtimes.native.moe import MLP, MoE
from autotune.runtimes.native.quant.linear import make_linear

pytestmark = pytest.mark.skipif(bool(cpu.refusal()), reason=cpu.refusal() or "compiled")


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    found = cpu.library()
    assert found is not None
    return found


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 70), st.integers(1, 9), st.integers(1, 40), st.sampled_from([16, 8, 4]),
    st.sampled_from([32, 64, 128]), st.sampled_from(["fp32", "bf16"]), st.integers(1, 2),
)  # fmt: skip
def test_a_product_of_few_rows_is_that_of_the_dequantized_weight(
    out: int, blocks: int, rows: int, bits: int, group: int, compute: str, threads: int
) -> None:
    torch.manual_seed(out * rows)
    weight = torch.randn(out, 32 * blocks)
    stored = make_linear(weight, bits, compute, group)
    stored._builds, stored._threads = [(1000, cpu.library())], threads  # type: ignore[attr-defined]
    x = torch.randn(rows, 32 * blocks)
    wanted = x @ stored.dense().t()
    assert (stored(x) - wanted).abs().max() <= 1e-5 * x.norm(dim=1).max() * weight.norm(dim=1).max()


@pytest.mark.parametrize("group", [32, 64, 128])
def test_unpacking_is_the_same_with_and_without_the_library(group: int) -> None:
    stored = make_linear(torch.randn(24, 384), 4, "fp32", group)
    fast = stored.dense()
    stored._library = None  # type: ignore[attr-defined]
    assert torch.equal(fast, stored.dense())


@pytest.mark.parametrize("streams", [2, 4])
@pytest.mark.parametrize("tokens", [1, 7, 33])
def test_hyper_connections(library: ctypes.CDLL, streams: int, tokens: int) -> None:
    size, total = 48, (2 + streams) * streams
    args = (
        torch.randn(total, streams * size) / size, torch.randn(total), torch.rand(total), torch.rand(size),
        (20, 1e-6, 1e-5),
    )  # fmt: skip
    x = torch.randn(tokens, streams, size)
    wanted = hyper_kernel.hyper(x, *args)
    found = fused.reader(library, args)(x)
    for left, right in zip(found, wanted, strict=True):
        assert torch.allclose(left, right, atol=2e-6, rtol=1e-5)
    output = torch.randn(tokens, size)
    assert torch.allclose(
        fused.writer(library)(x.clone(), output, *wanted[1:]), hyper.write(x, output, *wanted[1:]), atol=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_kda_step_changes_only_its_own_slots(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    heads, size, taps, slots = 3, 32, 4, torch.tensor([[4, 9], [0, 9], [2, 9]])[:, 0]
    inner, many = heads * size, len(slots)
    small = {
        "dt_bias": torch.randn(inner), "rate": torch.rand(heads, 1) * 3, "taps": torch.randn(taps, 3 * inner),
        "o_norm": torch.rand(size),
    }  # fmt: skip
    conv, state = torch.randn(6, taps - 1, 3 * inner), torch.randn(6, heads, size, size).to(dtype)
    inputs = torch.randn(many, 3 * inner), torch.randn(many, inner), torch.randn(many, heads), torch.randn(many, inner)
    window = torch.cat([conv[slots], inputs[0][:, None]], 1)
    wanted, after = kda_kernel.step(window, *inputs[1:], state[slots].float(), small, (-5.0, 1e-5))
    old = conv.clone(), state.clone()
    found = fused.Kda(library, small, (-5.0, 1e-5), conv, state).step(*(x.clone() for x in inputs), slots)
    assert torch.allclose(found, wanted, atol=1e-5, rtol=1e-4)
    assert torch.equal(conv[slots], window[:, 1:])
    assert torch.allclose(state[slots].float(), after, atol=1e-5 if dtype is torch.float32 else 0.02)
    others = torch.tensor([1, 3, 5])
    assert torch.equal(conv[others], old[0][others]) and torch.equal(state[others], old[1][others])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("borders", [(), (2, 5), (3, 9)])
def test_a_segment_is_its_tokens_one_by_one(library: ctypes.CDLL, dtype: torch.dtype, borders: tuple[int, ...]) -> None:
    heads, size, taps, tokens = 2, 16, 4, 9
    inner = heads * size
    small = {
        "dt_bias": torch.randn(inner), "rate": torch.rand(heads, 1), "taps": torch.randn(taps, 3 * inner),
        "o_norm": torch.rand(size),
    }  # fmt: skip
    conv, state = torch.randn(3, taps - 1, 3 * inner), torch.randn(3, heads, size, size).to(dtype)
    inputs = [torch.randn(tokens, n) for n in (3 * inner, inner, heads, inner)]
    wide = [conv.clone(), state.clone().float()]
    alone = fused.Kda(library, small, (-5.0, 1e-5), *wide)
    whole = fused.Kda(library, small, (-5.0, 1e-5), conv, state)
    found, copies = whole.segment(*(x.clone() for x in inputs), 1, borders)
    for token in range(tokens):
        wanted = alone.step(*(x[token : token + 1].clone() for x in inputs), torch.tensor([1]))
        assert torch.allclose(found[token], wanted[0], atol=1e-6)
        if token + 1 in borders:
            window, kept = copies[borders.index(token + 1)]
            assert torch.equal(window, wide[0][1]) and torch.equal(kept, wide[1][1].to(dtype))
    assert torch.equal(conv, wide[0]) and torch.equal(state, wide[1].to(dtype))


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("tokens", [1, 2, 13])
def test_experts(library: ctypes.CDLL, bits: int, tokens: int) -> None:
    torch.manual_seed(tokens)
    hidden, inner, count = 64, 32, 6

    def mlp(width: int) -> MLP:
        up, down = torch.randn(2 * width, hidden) / 3, torch.randn(hidden, width) / 3
        return MLP(make_linear(up, bits, "fp32", 32), make_linear(down, bits, "fp32", 32), 2.0)

    mixture = MoE(torch.randn(count, hidden), torch.rand(count), [mlp(inner) for _ in range(count)], mlp(96), 3, 2.5)
    x = torch.randn(tokens, hidden)
    wanted = mixture(x)
    mixture.fuse(library, 2.0)
    assert mixture.fused is not None and mixture.fused.few >= 16
    assert torch.allclose(mixture(x), wanted, atol=1e-4, rtol=1e-4)


def test_exponentials_keep_their_precision(library: ctypes.CDLL) -> None:
    """Through the KDA gate: β is a sigmoid of its raw value."""
    small = {"dt_bias": torch.zeros(16), "rate": torch.zeros(1, 1), "taps": torch.ones(2, 48), "o_norm": torch.ones(16)}
    betas = torch.linspace(-90, 90, 181)
    state = torch.zeros(181, 1, 16, 16)
    x = torch.ones(181, 48)
    layer = fused.Kda(library, small, (-5.0, 0.0), torch.zeros(181, 1, 48), state)
    layer.step(x, torch.zeros(181, 16), betas[:, None].contiguous(), torch.zeros(181, 16), torch.arange(181))
    written = state[:, 0, 0, 0] / state[-1, 0, 0, 0]
    assert torch.allclose(written, betas.sigmoid(), rtol=2e-6, atol=1e-37)


def test_a_compiler_that_fails_is_a_reason_not_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    cpu.library.cache_clear()
    cpu.refusal.cache_clear()
    try:
        assert cpu.library() is None and "cannot compile" in cpu.refusal()
        weight = torch.randn(32, 64)
        for bits in (16, 8, 4):
            stored = make_linear(weight, bits, "fp32", 32)
            x = torch.randn(3, 64)
            assert torch.allclose(stored(x), x @ stored.dense().t(), atol=1e-4)
    finally:
        cpu.library.cache_clear()
        cpu.refusal.cache_clear()
