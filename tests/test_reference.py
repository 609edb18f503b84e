"""The shipped reference model: what the folder promises to the oracle, to other engines and to its licence."""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

ROOT = Path(__file__).parents[1]
DATA = ROOT / "autotune" / "data"
FOLDER = DATA / "reference"
MARGIN = 0.4  # bits per byte that the model must stay under the order-2 baseline on any sample of the held-out text


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    """The training program's modules, by short name."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        names = ("corpus", "export", "fused", "network", "shape")
        yield {name: importlib.import_module(f"reference_{name}") for name in names}
    finally:
        sys.path.remove(str(ROOT / "scripts"))


@pytest.fixture(scope="module")
def oracle() -> tuple[Any, dict[str, Any]]:
    """The folder inside `transformers`, fp32, and what the loader had to say."""
    from transformers import Glm5NextForConditionalGeneration

    model, info = Glm5NextForConditionalGeneration.from_pretrained(
        FOLDER, dtype=torch.float32, output_loading_info=True, local_files_only=True
    )
    return model.eval(), info


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def training() -> dict[str, Any]:
    result: dict[str, Any] = json.loads((FOLDER / "training.json").read_text())
    return result


def test_weights_fit_the_repository() -> None:
    assert (FOLDER / "model.safetensors").stat().st_size <= 20_000_000


def test_transformers_finds_every_weight_and_no_other(oracle: tuple[Any, dict[str, Any]]) -> None:
    assert not any(oracle[1].values()), oracle[1]


def test_architecture_is_the_true_one_made_small(oracle: tuple[Any, dict[str, Any]]) -> None:
    text = oracle[0].config.text_config
    assert text.layer_types == ["linear_attention"] * 3 + ["indexed_attention"]
    assert text.mlp_layer_types[0] == "dense" and set(text.mlp_layer_types[1:]) == {"sparse"}
    assert (text.index_kpool, text.hc_mult, text.qk_rope_head_dim, text.linear_lower_bound) == (4, 4, 0, -5.0)
    assert "index_kpool" in json.loads((FOLDER / "config.json").read_text())["text_config"]  # its default is wrong


def test_model_reads_held_out_text_better_than_counting_does(oracle: tuple[Any, dict[str, Any]]) -> None:
    text = (DATA / "heldout.txt").read_bytes()
    windows = [text[start : start + 385] for start in (0, len(text) // 3, 2 * len(text) // 3, len(text) - 385)]
    ids = torch.tensor([list(window) for window in windows])
    with torch.no_grad():
        logits = oracle[0](input_ids=ids[:, :-1]).logits
    bits = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item() / math.log(2)
    assert bits < training()["order2_bits_per_byte"] - MARGIN


def test_reported_bits_are_ordered() -> None:
    report = training()
    assert report["bits_per_byte"] < report["order2_bits_per_byte"] - MARGIN
    assert report["order2_bits_per_byte"] < report["uniform_bits_per_byte"] == 8.0


@given(text=st.text())
def test_tokenizer_gives_back_any_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    if "<|" not in text:
        assert ids == list(text.encode())
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_every_id_of_the_vocabulary_has_a_token(tokenizer: Tokenizer, oracle: tuple[Any, dict[str, Any]]) -> None:
    vocabulary = oracle[0].config.text_config.vocab_size
    assert tokenizer.get_vocab_size() == vocabulary
    assert all(tokenizer.id_to_token(i) is not None for i in range(vocabulary))
    assert tokenizer.token_to_id("<|endoftext|>") == oracle[0].config.text_config.eos_token_id


def test_held_out_text_is_not_training_text(scripts: dict[str, ModuleType]) -> None:
    corpus = scripts["corpus"].read_corpus()
    assert not corpus.training.keys() & corpus.held_out.keys()
    seen = corpus.training_text()
    text = (DATA / "heldout.txt").read_bytes()
    windows = [text[start : start + 160] for start in range(0, len(text) - 160, 1600)]
    repeated = [window for window in windows if window in seen]
    assert not repeated


def test_held_out_text_is_code_and_prose() -> None:
    text = (DATA / "heldout.txt").read_text(encoding="utf-8")
    assert 64_000 <= len(text.encode()) <= 131_072
    assert "def " in text and "Format String Syntax" in text


def test_licence_travels_with_the_data() -> None:
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in (FOLDER / "LICENSE").read_text()
    assert "PSF-2.0" in (FOLDER / "README.md").read_text()


def test_training_network_is_the_architecture(scripts: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of the fast network equal those of `transformers`, past index_topk, in fp32 and with random weights."""
    monkeypatch.setattr(scripts["fused"], "COMPUTE", torch.float32)
    torch.manual_seed(0)
    shape = scripts["shape"].Shape(hidden_size=64, index_topk=32, n_routed_experts=4)
    model = scripts["network"].Decoder(shape)
    ids = torch.randint(0, 256, (2, 80))
    with torch.no_grad():
        theirs = scripts["export"].to_transformers(model)(input_ids=ids).logits
        ours, _ = model(ids, sparse=True)
        dense, _ = model(ids, sparse=False)
    assert (ours - theirs).abs().max() < 1e-4
    assert (ours - dense).abs().max() > 1e-3  # the selection was in force


def test_order_2_baseline_is_a_probability_model(scripts: dict[str, ModuleType]) -> None:
    order2 = scripts["corpus"].order2_bits
    assert order2(b"abcabcabc" * 200, b"abcabcabc" * 20) < 0.05
    unseen = bytes(range(128, 256))
    assert 8 < order2(b"abc" * 200, unseen) < 24  # costs more than uniform, but is never impossible
