"""Model facts: the published table of GLM-5.3-Flash, agreement with real headers, one clear line for bad folders."""

from __future__ import annotations

import json
import shutil
import struct
from importlib import resources
from math import prod
from pathlib import Path

import pytest

from autotune.model import ModelError, facts, from_config
from autotune.safetensors_header import read_header

REAL = {
    "model_type": "glm5_next", "architectures": ["Glm5NextForConditionalGeneration"],
    "text_config": {
        "vocab_size": 154880, "hidden_size": 4096, "num_hidden_layers": 45, "num_attention_heads": 64,
        "num_key_value_heads": 64, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 256,
        "qk_rope_head_dim": 0, "v_head_dim": 256, "intermediate_size": 12288, "moe_intermediate_size": 2048,
        "n_routed_experts": 288, "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 3,
        "index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048, "index_kpool": 4, "hc_mult": 4,
        "hc_sinkhorn_iters": 20, "num_nextn_predict_layers": 1, "swiglu_limit": 10.0,
        "linear_attn_config": {
            "head_dim": 128, "num_heads": 64, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0,
            "kda_layers": [i + 1 for i in range(45) if i % 4 != 3],
        },
    },
}  # fmt: skip
SMALL = {
    "vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 2,
    "q_lora_rank": 4, "kv_lora_rank": 4, "qk_nope_head_dim": 4, "v_head_dim": 4, "intermediate_size": 8,
    "moe_intermediate_size": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "index_n_heads": 2,
    "index_head_dim": 4, "index_topk": 8, "index_kpool": 4, "linear_head_dim": 4, "linear_num_heads": 2,
}  # fmt: skip
FLAT = {"model_type": "glm5_next", **SMALL}


def checkpoint(folder: Path, config=FLAT, tensors=None, name="model.safetensors", data=None) -> Path:
    """A folder with a config and one safetensors file; ``tensors``: {name: shape}, all F32."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    header, place = {}, 0
    for tensor, shape in (tensors or {"model.embed_tokens.weight": [16, 8]}).items():
        header[tensor] = {"dtype": "F32", "shape": shape, "data_offsets": [place, place + 4 * prod(shape)]}
        place += 4 * prod(shape)
    raw = json.dumps(header).encode()
    (folder / name).write_bytes(struct.pack("<Q", len(raw)) + raw + (bytes(place) if data is None else data))
    return folder


def test_the_real_configuration_has_the_published_parameters():
    model = from_config(REAL, "config.json")
    assert model.parameters == {
        "experts": 304_405_807_104, "shared": 1_056_964_608, "dense": 452_984_832, "kda": 4_682_897_792,
        "dsa": 1_291_868_160, "indexer": 82_190_592, "router": 49_545_216, "hyper_connections": 35_391_870,
        "embedding": 634_388_480, "lm_head": 634_388_480, "norms": 368_640 + 4_096,
    }  # fmt: skip
    assert sum(model.parameters.values()) == pytest.approx(313.79e9 - 0.46e9, rel=1e-4)
    assert model.name == "glm5_next-313B"
    assert (model.layers, model.vocab, model.hidden, model.experts) == (45, 154_880, 4096, 288)
    assert model.mlp_kinds == ("dense",) * 3 + ("sparse",) * 42
    assert [i for i, kind in enumerate(model.attention_kinds) if kind == "dsa"] == list(range(3, 45, 4))


def test_the_real_configuration_has_the_published_cache():
    model = from_config(REAL, "config.json")
    assert model.kv_bytes_per_token == 11_627
    assert model.state_bytes / 2**20 == pytest.approx(140.8, abs=0.05)


def test_flat_and_nested_and_shortened_configurations_agree():
    nested, flat = from_config(REAL, "x"), from_config({**REAL["text_config"], "model_type": "glm5_next_text"}, "x")
    short = from_config({"model_type": "glm5_next", "index_kpool": 4}, "x")
    assert nested.parameters == flat.parameters == short.parameters
    assert nested.attention_kinds == short.attention_kinds


def test_the_shipped_model_has_the_counted_parameters():
    folder = Path(str(resources.files("autotune") / "data" / "reference"))
    if not (folder / "model.safetensors").is_file():
        pytest.skip("the reference model is not there yet")
    tensors = read_header(folder / "model.safetensors")
    text = {name: t for name, t in tensors.items() if "visual" not in name and "e_score_correction_bias" not in name}
    model = facts(folder)
    assert sum(prod(t.shape) for t in text.values()) == sum(model.parameters.values())
    experts = {name: t for name, t in text.items() if ".mlp.experts." in name}
    assert sum(prod(t.shape) for t in experts.values()) == model.parameters["experts"]
    assert model.weight_bytes == sum(t.bytes for t in tensors.values())


def test_identity_is_content_not_place(tmp_path):
    one = facts(checkpoint(tmp_path / "one"))
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    assert facts(tmp_path / "two").identity() == one.identity()
    changed = checkpoint(tmp_path / "three", data=bytes(16 * 8 * 4 - 1) + b"\x01")
    assert facts(changed).identity()["weights"] != one.identity()["weights"]
    reworded = checkpoint(tmp_path / "four", {**FLAT, "transformers_version": "9.9"})
    assert facts(reworded).identity() == one.identity()
    assert facts(checkpoint(tmp_path / "five", {**FLAT, "swiglu_limit": 7.0})).identity() != one.identity()


@pytest.mark.parametrize("place", [0, 300, 16 * 8 * 4 - 1])
def test_a_large_file_is_told_apart_by_pieces_of_its_content(tmp_path, monkeypatch, place):
    monkeypatch.setattr("autotune.model.HASHED_BYTES", 100)
    monkeypatch.setattr("autotune.model.SAMPLE_BYTES", 64)
    data = bytearray(16 * 8 * 4)
    one = facts(checkpoint(tmp_path / "one", data=bytes(data))).identity()
    assert facts(checkpoint(tmp_path / "two", data=bytes(data))).identity() == one
    data[place] = 1
    assert facts(checkpoint(tmp_path / "three", data=bytes(data))).identity() != one


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("{", "config.json is not valid JSON"),
        ("[" * 100_000, "config.json is not valid JSON"),
        ("[1]", "must hold a JSON object, not list"),
        ({"model_type": "llama"}, "model_type 'llama' is not supported; supported is glm5_next"),
        ({}, "model_type None is not supported"),
        ({"model_type": "glm5_next", "text_config": 3}, "text_config must be an object"),
        ({**FLAT, "hidden_size": 0}, "hidden_size must be a whole number between 1 and 1,000,000, not 0"),
        ({**FLAT, "hidden_size": -8}, "hidden_size must be"),
        ({**FLAT, "hidden_size": 8.5}, "hidden_size must be"),
        ({**FLAT, "hidden_size": True}, "hidden_size must be"),
        ({**FLAT, "vocab_size": 10**30}, "vocab_size must be"),
        ({**FLAT, "num_hidden_layers": "4"}, "num_hidden_layers must be .* not '4'"),
        ({**FLAT, "num_hidden_layers": 10**9}, "num_hidden_layers must be"),
        ({**FLAT, "num_key_value_heads": 1}, "num_key_value_heads must equal"),
        ({**FLAT, "qk_rope_head_dim": 64}, "qk_rope_head_dim must be 0"),
        ({**FLAT, "index_topk": 9}, "index_topk 9 is no multiple of index_kpool"),
        ({**FLAT, "num_experts_per_tok": 5}, "larger than n_routed_experts"),
        ({**FLAT, "layer_types": ["linear_attention"]}, "layer_types has 1 entries for num_hidden_layers 4"),
        ({**FLAT, "layer_types": ["mamba"] * 4}, "layer_types holds 'mamba'"),
        ({**FLAT, "mlp_layer_types": ["moe"] * 4}, "mlp_layer_types holds 'moe'"),
        ({**FLAT, "mlp_layer_types": "dense"}, "must be a list of names"),
        ({**FLAT, "linear_attn_config": 3}, "linear_attn_config must be an object"),
        ({**FLAT, "linear_attn_config": {"kda_layers": [1]}}, "name different KDA layers"),
        ({k: v for k, v in FLAT.items() if k != "index_kpool"}, "index_kpool is missing; .* 4 .* assume 16"),
    ],
)
def test_a_bad_configuration_is_one_clear_line(config, says, tmp_path):
    with pytest.raises(ModelError, match=says) as caught:
        facts(checkpoint(tmp_path / "m", config))
    assert "\n" not in str(caught.value)


def test_missing_folders_and_files_are_named(tmp_path):
    with pytest.raises(ModelError, match="no model folder"):
        facts(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"no config\.json in"):
        facts(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(FLAT))
    with pytest.raises(ModelError, match=r"no model\.safetensors in .*download the weights"):
        facts(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ModelError, match="pickled weights are never read"):
        facts(tmp_path)


def test_config_and_weights_of_different_models(tmp_path):
    with pytest.raises(ModelError, match=r"vocabulary 16 and hidden size 8, but embed_tokens\.weight is \[32, 8\]"):
        facts(checkpoint(tmp_path / "a", tensors={"model.embed_tokens.weight": [32, 8]}))
    with pytest.raises(ModelError, match=r"no embed_tokens\.weight among the 1 tensors"):
        facts(checkpoint(tmp_path / "b", tensors={"x": [2]}))


def damage(raw: bytes, how: str) -> bytes:
    entry = b'{"model.embed_tokens.weight":{"dtype":"F32","shape":[16,8],"data_offsets":[0,511]}}'
    return {
        "empty": b"",
        "short": raw[:5],
        "cut in the header": raw[:40],
        "cut in the data": raw[:-1],
        "longer": raw + b"x",
        "huge header": struct.pack("<Q", 2**62) + raw[8:],
        "no JSON": struct.pack("<Q", 4) + b"abcd",
        "no object": struct.pack("<Q", 2) + b"[]",
        "no entry": struct.pack("<Q", 7) + b'{"x":3}',
        "wrong offsets": struct.pack("<Q", len(entry)) + entry + bytes(511),
        "an HTML page": b"<!DOCTYPE html><html>Not found</html>",
    }[how]


@pytest.mark.parametrize(
    "how",
    ["empty", "short", "cut in the header", "cut in the data", "longer", "huge header", "no JSON", "no object",
     "no entry", "wrong offsets", "an HTML page"],
)  # fmt: skip
def test_damaged_weights_are_one_clear_line(how, tmp_path):
    file = checkpoint(tmp_path / "m") / "model.safetensors"
    file.write_bytes(damage(file.read_bytes(), how))
    with pytest.raises(ModelError, match=r"model\.safetensors") as caught:
        facts(tmp_path / "m")
    assert "\n" not in str(caught.value)


def test_sharded_weights(tmp_path):
    folder = checkpoint(tmp_path / "m", name="a.safetensors")
    checkpoint(folder, tensors={"lm_head.weight": [16, 8]}, name="b.safetensors")
    index = folder / "model.safetensors.index.json"
    places = {"model.embed_tokens.weight": "a.safetensors", "lm_head.weight": "b.safetensors"}
    index.write_text(json.dumps({"weight_map": places}))
    assert facts(folder).weight_bytes == 2 * 512
    for wrong, says in (
        ({**places, "x": "c.safetensors"}, r"names c\.safetensors, which is not in"),
        ({**places, "x": "a.safetensors"}, "tensor x is not in a.safetensors"),
        ({**places, "x": "../b.safetensors"}, "is no safetensors file of this folder"),
        ({}, "weight_map must name a file"),
        ({"x": 3}, "weight_map must name a file"),
    ):
        index.write_text(json.dumps({"weight_map": wrong}))
        with pytest.raises(ModelError, match=says):
            facts(folder)
    index.write_text("{")
    with pytest.raises(ModelError, match=r"index\.json is not valid JSON"):
        facts(folder)
