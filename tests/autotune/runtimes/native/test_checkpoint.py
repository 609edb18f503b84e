"""Bad checkpoints: each gets one line that names the file, the key or tensor, and what to do; good variants load."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from autotune.runtimes.native.config import CheckpointError, read_config
from autotune.runtimes.native.engine import Engine
from search_spaces import load

CONFIG = load("native").narrow({"cores": 2}).complete({"kv_tokens": 1024})
IDS = list(range(4, 40))


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    for path in tiny.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def change(folder: Path, edit: Callable[[dict[str, Any], dict[str, Any]], Any]) -> None:
    """Rewrite config.json after ``edit(whole, text_config)``."""
    path = folder / "config.json"
    whole = json.loads(path.read_text())
    edit(whole, whole["text_config"])
    path.write_text(json.dumps(whole))


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        Engine(folder, CONFIG)
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("hidden_size", "big", ("hidden_size", "number")),
        ("hidden_size", 2**40, ("hidden_size", "not a possible size")),
        ("hidden_size", 0, ("hidden_size", "not a possible size")),
        ("hidden_size", float("inf"), ("hidden_size",)),
        ("hidden_size", 72, ("embed_tokens.weight", "[96, 64]", "[96, 72]")),
        ("num_hidden_layers", 5, ("layer_types", "5")),
        ("qk_rope_head_dim", 8, ("qk_rope_head_dim",)),
        ("n_group", 4, ("n_group",)),
        ("num_experts_per_tok", 9, ("experts",)),
        ("linear_lower_bound", -50.0, ("linear_lower_bound",)),
        ("layer_types", ["linear_attention"] * 3 + ["sliding_attention"], ("layer_types",)),
        ("layer_types", 7, ("layer_types",)),
        ("first_k_dense_replace", "one", ("first_k_dense_replace",)),
        ("eos_token_id", "end", ("eos_token_id",)),
    ],
)
def test_an_absurd_value_names_its_key(copy: Path, key: str, value: Any, words: tuple[str, ...]) -> None:
    change(copy, lambda whole, text: (text.update({key: value}), whole.pop("eos_token_id", None)))
    sentence = refusal(copy)
    assert all(word in sentence for word in words), sentence


def test_a_missing_key_is_named(copy: Path) -> None:
    change(copy, lambda whole, text: text.pop("index_kpool"))
    assert "index_kpool is missing" in refusal(copy)


def test_another_architecture_is_refused(copy: Path) -> None:
    change(copy, lambda whole, text: (whole.update(model_type="llama"), text.update(model_type="llama")))
    assert "'llama'" in refusal(copy) and "glm5_next" in refusal(copy)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"x"', '{"text_config": 3}', "\x00"])
def test_a_broken_config_is_refused(copy: Path, text: str) -> None:
    (copy / "config.json").write_text(text)
    assert "config.json" in refusal(copy)


def test_undecodable_bytes_in_a_config_are_refused(copy: Path) -> None:
    (copy / "config.json").write_bytes(b"\xff\xfe{}")
    assert "config.json" in refusal(copy)


@pytest.mark.parametrize("keep", [0, 4, 60, -1])
def test_a_cut_off_file_is_refused(copy: Path, keep: int) -> None:
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert "model.safetensors" in refusal(copy) and "download it again" in refusal(copy)


def test_a_missing_tensor_a_wrong_shape_and_a_wrong_type_are_named(copy: Path) -> None:
    path = copy / "model.safetensors"
    tensors = load_file(path)
    name = next(n for n in tensors if n.endswith("layers.2.self_attn.o_proj.weight"))
    save_file({k: v for k, v in tensors.items() if k != name}, path)
    assert name in refusal(copy) and "missing" in refusal(copy)
    save_file({**tensors, name: torch.zeros(3, 5)}, path)
    assert name in refusal(copy) and "[3, 5]" in refusal(copy)
    save_file({**tensors, name: torch.zeros(tensors[name].shape, dtype=torch.int8)}, path)
    assert name in refusal(copy) and "int8" in refusal(copy)


def test_pickled_weights_are_never_read(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    torch.save({}, copy / "pytorch_model.bin")
    assert "never loaded" in refusal(copy)


def shard(folder: Path, prefix: str = "") -> None:
    """Split the one file into two with an index, as large checkpoints come."""
    tensors = {f"{prefix}{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    where = {name: file for file, part in halves.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def test_a_sharded_checkpoint_is_the_same_model(tiny: Path, copy: Path) -> None:
    wanted = Engine(tiny, CONFIG).score([IDS], 1)[0].logprobs
    shard(copy)
    assert (Engine(copy, CONFIG).score([IDS], 1)[0].logprobs == wanted).all()
    (copy / "b.safetensors").unlink()
    assert "b.safetensors is missing" in refusal(copy)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 7}}', "{}"])
def test_a_broken_index_is_refused(copy: Path, text: str) -> None:
    shard(copy)
    (copy / "model.safetensors.index.json").write_text(text)
    assert "index" in refusal(copy)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd"])
def test_an_index_cannot_name_a_file_outside_the_folder(copy: Path, name: str) -> None:
    shard(copy)
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    assert "no .safetensors file of this folder" in refusal(copy)


def test_the_reference_sizes_are_read(tiny: Path) -> None:
    config = read_config(tiny)
    assert config.layers == ("kda", "dsa", "kda", "dsa") and config.mlps == ("dense", "sparse", "sparse", "sparse")
    assert config.eos == (3,)
