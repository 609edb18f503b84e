"""Bias correction: the algebra, what counts as a known mean, what is measured and that it is measured once."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.corpus import PROMPT_SHARE, calibration_sequences, read_tokens
from autotune.quality import kl_divergence
from autotune.runtimes.native.config import read_config
from autotune.runtimes.native.engine import Engine
from autotune.runtimes.native.inspect import packed, weight_bytes
from autotune.runtimes.native.model import Segment, Widths
from autotune.runtimes.native.quant import calibrate
from autotune.runtimes.native.quant.bias import Biased, compensated
from autotune.runtimes.native.quant.calibrate import LENGTH, SEQUENCES, Moments, Watched, input_means, measure
from autotune.runtimes.native.quant.linear import Wide, make_linear
from autotune.runtimes.native.scheduler import places
from autotune.runtimes.native.weights import Checkpoint
from autotune.setting import reference_model
from search_spaces import load

SPACE = load("native").narrow({"cores": 2, "layers": 4, "experts": 8})
FOUR = {f"bits_{group}": 4 for group in ("attention", "dense", "experts", "shared", "lm_head")}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The user's own cache is neither read nor written."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


def engine(**knobs: Any) -> Engine:
    return Engine(reference_model(), SPACE.complete({"kv_tokens": 1024, "kv_dtype": "fp32", **knobs}))


@given(st.sampled_from([4, 8]), st.integers(1, 200), st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_the_mean_output_over_the_calibration_text_is_that_of_the_full_weight(bits: int, rows: int, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    weight = torch.randn(64, 128, generator=source)
    x = torch.randn(rows, 128, generator=source) + 3 * torch.randn(128, generator=source)
    stored = make_linear(weight, bits, "fp32", 32)
    corrected = compensated(stored, weight, x.mean(0))
    assert isinstance(corrected, Biased) and corrected.nbytes == stored.nbytes + 4 * 64
    exact = x.mean(0) @ weight.t()
    mean = x.mean(0) @ corrected.dense().t() + corrected.bias
    torch.testing.assert_close(mean, exact, rtol=0, atol=1e-3)
    torch.testing.assert_close(corrected(x), stored(x) + corrected.bias)
    assert torch.equal(corrected.dense(), stored.dense())


def test_an_unpacked_weight_and_an_unknown_mean_need_no_correction() -> None:
    weight = torch.randn(64, 64)
    wide = make_linear(weight, 16, "bf16")
    assert compensated(wide, weight, torch.ones(64)) is wide
    known = Widths({"0.dense": 8}, means={"0.dense.down": torch.ones(64)})
    assert isinstance(known.linear("0.dense", weight, "down"), Biased)
    assert not isinstance(known.linear("0.dense", weight, "gate_up"), Biased)


@given(st.sampled_from([4, 8]), st.integers(0, 2**31))
@settings(max_examples=20, deadline=None)
def test_parts_of_a_weight_split_by_its_inputs_add_up(bits: int, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    weight, mean = torch.randn(48, 128, generator=source), torch.randn(128, generator=source)
    widths = Widths({"0.dense": bits}, 32, means={"0.dense.down": mean})
    x = torch.randn(5, 128, generator=source)
    halves = (slice(0, 64), slice(64, 128))
    parts = sum(widths.linear("0.dense", weight, "down", half)(x[:, half]) for half in halves)
    torch.testing.assert_close(parts, widths.linear("0.dense", weight, "down")(x), rtol=1e-4, atol=1e-4)


def test_a_mean_is_shrunk_by_its_sampling_noise() -> None:
    source = torch.Generator().manual_seed(0)
    true = torch.randn(256, generator=source)

    def mean(count: int, spread: float) -> torch.Tensor | None:
        moments = Moments()
        for part in (spread * torch.randn(count, 256, generator=source) + true).split(7):
            moments.add(part)
        return moments.mean()

    assert Moments().mean() is None and mean(1, 0.1) is None
    many = mean(5000, 1.0)
    assert many is not None and (many - true).norm() < 0.05 * true.norm()
    # With as much noise as signal in the mean, half of it is kept, and it is nearer to the truth than the plain mean.
    few = mean(16, 4.0)
    assert few is not None and 0.3 < float(few @ true / true.square().sum()) < 0.7
    assert sum(mean(16, 40.0) is None for _ in range(20)) >= 5


def test_what_is_measured_is_what_a_running_engine_multiplies(tiny: Path) -> None:
    config, checkpoint = read_config(tiny), Checkpoint(tiny)
    ids = torch.arange(90) % 90 + 4
    found = measure(config, checkpoint, [ids.tolist()])
    running = Engine(tiny, SPACE.complete({"kv_tokens": 1024, "kv_dtype": "fp32"}))
    seen: dict[str, Moments] = {}

    def watch(name: str, part: Any) -> Any:
        return Watched(part, seen.setdefault(name, Moments()))

    layers = running.decoder.layers
    projection = "self_attn.o_proj.weight"
    for index, part, name in ((0, "qkv", "qkv"), (2, "o", projection), (1, "q_b", "q_b"), (3, "o", projection)):
        parts = layers[index].attention.parts
        parts[part] = watch(f"{index}.attention.{name}", parts[part])
    for part, name in (("gate_up", "gate_up"), ("down", "down_proj.weight")):
        for at, mlp in (("0.dense.mlp", layers[0].mlp), ("3.shared.mlp.shared_experts", layers[3].mlp.shared)):
            setattr(mlp, part, watch(f"{at}.{name}", getattr(mlp, part)))
    running.decoder.head = watch("lm_head.", running.decoder.head)
    running.decoder.clear_state(0)
    running.decoder.prefill(ids, Segment(0, places(0, list(range(6)), 16, 0, 90)), every=True)
    assert len(seen) == 9
    for name, moments in seen.items():
        wanted = moments.mean()
        assert (wanted is None) == (name not in found), name
        if wanted is not None:
            torch.testing.assert_close(found[name], wanted, rtol=1e-3, atol=1e-3)


def test_every_packed_weight_of_the_reference_is_corrected_and_accounted(cache: Path) -> None:
    plain, running = engine(**FOUR), engine(**FOUR, bits_compensation="bias")
    pairs = list(zip(packed(plain.decoder), packed(running.decoder), strict=True))
    assert all(isinstance(b, Biased) and b.kernel == a.kernel for (_, a), (_, b) in pairs)
    added = sum(4 * len(b.dense()) for _, (_, b) in pairs)
    assert sum(weight_bytes(running.decoder).values()) == sum(weight_bytes(plain.decoder).values()) + added
    assert running.effective()["bits_compensation"] == "bias"
    assert running.effective()["bits_stored"] == plain.effective()["bits_stored"]
    half = engine(bits_experts=8, bits_compensation="bias")
    assert {key for key, part in packed(half.decoder) if isinstance(part, Biased)} == {
        "1.experts", "2.experts", "3.experts",
    }  # fmt: skip
    assert all(isinstance(part, Wide) for key, part in packed(half.decoder) if "experts" not in key)


def test_correction_lowers_kl_on_text_that_was_not_calibrated_on() -> None:
    tokens = read_tokens(reference_model(), 288)
    judged = tokens[int(len(tokens) * PROMPT_SHARE) :][:1024]
    texts = [judged[i : i + 512] for i in (0, 512)]
    reference = engine().score(texts, 288)

    def kl(**knobs: Any) -> float:
        scores = engine(**knobs).score(texts, 288)
        return float(np.concatenate([kl_divergence(r, s) for r, s in zip(reference, scores, strict=True)]).mean())

    # Without attention and embedding, where single flips of the sparse selection make the mean of 1,024 tokens noisy.
    widths = {"bits_experts": 4, "bits_lm_head": 4}
    assert kl(**widths, bits_compensation="bias") < 0.9 * kl(**widths)


def test_it_is_measured_once_for_a_checkpoint_and_a_text(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny, folder)
    shutil.copy(reference_model() / "tokenizer.json", folder)
    config, checkpoint, runs = read_config(folder), Checkpoint(folder), []
    monkeypatch.setattr(calibrate, "measure", lambda *args: (runs.append(args[2]), {"lm_head.": torch.ones(64)})[1])
    first = input_means(folder, config, checkpoint)
    again = input_means(folder, config, checkpoint)
    assert len(runs) == 1 and torch.equal(first["lm_head."], again["lm_head."])
    shutil.copytree(folder, tmp_path / "elsewhere")
    input_means(tmp_path / "elsewhere", config, checkpoint)
    assert len(runs) == 1
    (folder / "calibration.txt").write_text("Quite another text. " * 200)
    input_means(folder, config, checkpoint)
    assert len(runs) == 2 and runs[0] != runs[1]


def test_the_calibration_text_is_spread_and_never_judged() -> None:
    folder = reference_model()
    tokens = read_tokens(folder, 288)
    half = tokens[: int(len(tokens) * PROMPT_SHARE)]
    found = calibration_sequences(folder, 288, SEQUENCES, LENGTH)
    assert len(found) == SEQUENCES and {len(part) for part in found} == {LENGTH}
    stride = len(half) // SEQUENCES
    assert found == [half[i * stride : i * stride + LENGTH] for i in range(SEQUENCES)]
