"""What a `glm5_next` checkpoint is, from its config.json and the headers of its safetensors files alone.

Knows nothing of tensors' values, of torch or of how an engine runs the model.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autotune.safetensors_header import HeaderError, Tensor, read_header

MODEL_TYPES = ("glm5_next", "glm5_next_text")
HASHED_BYTES = 256_000_000
"""Files up to this size are identified by their whole content, larger ones by SAMPLES spread pieces of it."""
SAMPLES, SAMPLE_BYTES = 64, 1 << 20
CONFIG_BYTES = 16_000_000
WANTED = ("num_hidden_layers", "vocab_size", "hidden_size")  # in every architecture's config.json
UNTRAINED_KEYS = ("transformers_version", "_name_or_path")
DEFAULTS: Mapping[str, int] = {
    "vocab_size": 154880, "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 2048,
    "num_hidden_layers": 45, "num_attention_heads": 64, "n_shared_experts": 1, "n_routed_experts": 288,
    "num_experts_per_tok": 8, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 256, "v_head_dim": 256,
    "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 32, "hc_mult": 4, "linear_head_dim": 128,
    "linear_num_heads": 64, "linear_conv_kernel_dim": 4, "first_k_dense_replace": 3,
}  # fmt: skip
"""GLM-5.3-Flash's own values, which `transformers` leaves out of a config.json where they are its defaults too."""
MOST: Mapping[str, int] = {"vocab_size": 10_000_000, "num_hidden_layers": 2_000, "hc_mult": 64}
LINEAR_KEYS = {"linear_head_dim": "head_dim", "linear_num_heads": "num_heads",
               "linear_conv_kernel_dim": "short_conv_kernel_size"}  # fmt: skip
ATTENTION = {"linear_attention": "kda", "indexed_attention": "dsa", "full_attention": "dsa"}


class ModelError(ValueError):
    """A folder that holds no usable model; the message names the file, the key and what to do."""


@dataclass(frozen=True, slots=True)
class Model:
    """Facts of one checkpoint.

    ``parameters``: {group: count} of the text decoder without MTP; ``mlp_kinds``: dense or sparse, ``attention_kinds``:
    kda or dsa, one a layer; ``kv_bytes_per_token``: bytes of all DSA layers with a 16-bit latent and 8-bit indexer
    keys with one fp32 scale a pooled group; ``state_bytes``: bytes a sequence of all KDA layers, recurrent state in
    fp32 and convolution in 16 bits. ``sizes`` are what a tensor-parallel layout divides; ``inputs`` {group: those of
    its weights that are split by their inputs}.
    ``shapes`` are the checked numbers of config.json that decide a shape, ``mtp_layers`` and ``vision_parameters`` too.
    """

    name: str
    config_digest: str
    weights_digest: str
    weight_bytes: int
    layers: int
    mlp_kinds: tuple[str, ...]
    attention_kinds: tuple[str, ...]
    vocab: int
    hidden: int
    experts: int
    kv_bytes_per_token: float
    state_bytes: int
    parameters: Mapping[str, int] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    shapes: Mapping[str, int] = field(default_factory=dict)
    inputs: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def identity(self) -> dict[str, Any]:
        """What makes two checkpoints the same, wherever they lie."""
        return {"name": self.name, "config": self.config_digest, "weights": self.weights_digest}


def facts(folder: str | Path) -> Model:
    """Read ``folder`` (Hugging Face layout). Raises ModelError with one line."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ModelError(f"no model folder {folder}; give the folder that holds config.json with --model")
    file = folder / "config.json"
    model = from_config(_read_json(file), str(file))
    shards, tensors = _headers(folder)
    _check_embedding(model, tensors, folder)
    return _with_weights(model, shards, tensors)


def served(folder: str | Path) -> Model:
    """Facts of a checkpoint of any architecture, for engines that read it themselves. Raises ModelError."""
    folder = Path(folder)
    config = _read_json(folder / "config.json")
    if config.get("model_type") in MODEL_TYPES:
        return facts(folder)
    text, (shards, tensors) = config.get("text_config", config), _headers(folder)
    count = sum(math.prod(tensor.shape) for tensor in tensors.values())
    layers, vocab, hidden = (_size(k, text.get(k), str(folder / "config.json")) for k in WANTED)
    digest = _digest({k: v for k, v in config.items() if k not in UNTRAINED_KEYS})
    model = Model(f"{config.get('model_type')}-{_short(count)}", digest, "", 0, layers, (), (), vocab, hidden,
                  int(text.get("n_routed_experts") or 0), 0.0, 0, {"all": count},
                  shapes={"kv_lora_rank": int(text.get("kv_lora_rank") or 0)})  # fmt: skip
    return _with_weights(model, shards, tensors)


def described(path: str | Path) -> Model:
    """The facts of a checkpoint's folder, or of a config.json alone: a file, or a folder without weights."""
    path = Path(path)
    if path.is_file():
        return from_config(_read_json(path), str(path))
    weights = any(path.glob("*.safetensors")) or (path / "model.safetensors.index.json").exists()
    if path.is_dir() and not weights:
        file = path / "config.json"
        return from_config(_read_json(file), str(file))
    return facts(path)


def from_config(config: Mapping[str, Any], where: str) -> Model:
    """The facts that a parsed config.json holds alone; digest and bytes of the weights stay empty. Raises ModelError.

    Counts follow the module shapes of `transformers` 5.24 `models/glm5_next`.
    """
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise ModelError(f"{where}: model_type {kind!r} is not supported; supported is glm5_next (GLM-5.3-Flash)")
    text = config.get("text_config", config)
    if not isinstance(text, Mapping):
        raise ModelError(f"{where}: text_config must be an object, not {text!r}")
    sizes = _sizes(text, where)
    layers = sizes["num_hidden_layers"]
    attention = _attention_kinds(text, layers, where)
    dense = min(sizes["first_k_dense_replace"], layers)
    mlp = _schedule(text, "mlp_layer_types", ["dense"] * dense + ["sparse"] * (layers - dense), where)
    for value in mlp:
        if value not in ("dense", "sparse"):
            raise ModelError(f"{where}: mlp_layer_types holds {value!r}; it takes dense and sparse")
    parameters = _parameters(sizes, mlp, attention)
    if config.get("tie_word_embeddings") or text.get("tie_word_embeddings"):
        parameters["lm_head"] = 0
    # KDA: [heads, head, head] fp32 and kernel - 1 columns of q, k, v in 16 bits; DSA: the latent and pooled keys.
    width = sizes["linear_num_heads"] * sizes["linear_head_dim"]
    state = width * sizes["linear_head_dim"] * 4 + 3 * width * (sizes["linear_conv_kernel_dim"] - 1) * 2
    kv = sizes["kv_lora_rank"] * 2 + (sizes["index_head_dim"] + 4) / sizes["index_kpool"]
    return Model(
        name=f"glm5_next-{_short(sum(parameters.values()))}",
        config_digest=_digest({k: v for k, v in config.items() if k not in UNTRAINED_KEYS}),
        weights_digest="",
        weight_bytes=0,
        layers=layers,
        mlp_kinds=tuple(mlp),
        attention_kinds=tuple(attention),
        vocab=sizes["vocab_size"],
        hidden=sizes["hidden_size"],
        experts=sizes["n_routed_experts"],
        kv_bytes_per_token=kv * attention.count("dsa"),
        state_bytes=state * attention.count("kda"),
        parameters=parameters,
        sizes={
            "attention heads": sizes["num_attention_heads"],
            "linear attention heads": sizes["linear_num_heads"],
            "inner columns of the dense feed-forward": sizes["intermediate_size"],
            "inner columns of an expert": sizes["moe_intermediate_size"],
            "tokens of the vocabulary": sizes["vocab_size"],
        },
        shapes={**sizes, "mtp_layers": _mtp(text, where), "vision_parameters": _vision(config, where)},
        inputs={
            "attention": (width, sizes["num_attention_heads"] * sizes["v_head_dim"]),
            "dense": (sizes["intermediate_size"],),
            "experts": (sizes["moe_intermediate_size"],),
            "shared": (sizes["moe_intermediate_size"] * sizes["n_shared_experts"],),
        },
    )


def _read_json(file: Path) -> Mapping[str, Any]:
    try:
        if file.stat().st_size > CONFIG_BYTES:
            raise ModelError(f"{file} has {file.stat().st_size:,} bytes; that is no model configuration")
        table = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"no {file.name} in {file.parent}; a model folder in the Hugging Face layout has one"
        ) from None
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{file} is not valid JSON: {error}; download it again") from None
    if not isinstance(table, dict):
        raise ModelError(f"{file} must hold a JSON object, not {type(table).__name__}")
    return table


def _sizes(text: Mapping[str, Any], where: str) -> dict[str, int]:
    """Every number that decides a shape, checked."""
    values = dict(text)
    if "n_routed_experts" not in values and "num_local_experts" in values:
        values["n_routed_experts"] = values["num_local_experts"]
    linear = values.get("linear_attn_config") or {}
    if not isinstance(linear, Mapping):
        raise ModelError(f"{where}: linear_attn_config must be an object, not {linear!r}")
    values |= {key: linear[name] for key, name in LINEAR_KEYS.items() if name in linear}
    if "index_kpool" not in values:
        raise ModelError(
            f"{where}: index_kpool is missing; GLM-5.3-Flash has 4 but transformers would silently assume 16: "
            "write the value that the model was trained with into the file"
        )
    sizes = {name: _size(name, values.get(name, default), where) for name, default in DEFAULTS.items()}
    sizes["index_kpool"] = _size("index_kpool", values["index_kpool"], where)
    if values.get("num_key_value_heads") not in (None, sizes["num_attention_heads"]):
        raise ModelError(f"{where}: num_key_value_heads must equal num_attention_heads in this architecture")
    if values.get("qk_rope_head_dim", 0) != 0:
        raise ModelError(f"{where}: qk_rope_head_dim must be 0, this architecture has no position encoding")
    if sizes["index_topk"] % sizes["index_kpool"]:
        raise ModelError(f"{where}: index_topk {sizes['index_topk']} is no multiple of index_kpool")
    if sizes["num_experts_per_tok"] > sizes["n_routed_experts"]:
        raise ModelError(f"{where}: num_experts_per_tok is larger than n_routed_experts")
    return sizes


def _mtp(text: Mapping[str, Any], where: str) -> int:
    """Draft layers for multi-token prediction, behind the decoder's own."""
    value = text.get("num_nextn_predict_layers") or 0
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 16:
        raise ModelError(f"{where}: num_nextn_predict_layers must be a whole number up to 16, not {value!r}")
    return value


def _vision(config: Mapping[str, Any], where: str) -> int:
    """Weights of the image tower, after `transformers` 5.24 `Glm5NextVisionModel`; 0 for a text-only file."""
    found = config.get("vision_config")
    if not isinstance(found, Mapping):
        return 0
    usual = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "out_hidden_size": 1536,
             "projection_intermediate_size": 10240, "patch_size": 14, "spatial_merge_size": 2}  # fmt: skip
    s = {name: _size(name, found.get(name, default), f"{where} vision_config") for name, default in usual.items()}
    hidden, out = s["hidden_size"], s["out_hidden_size"]
    block = 4 * hidden * hidden + 3 * hidden * s["intermediate_size"]
    merger = out * out + 3 * out * s["projection_intermediate_size"] + hidden * out * s["spatial_merge_size"] ** 2
    return s["depth"] * block + merger + hidden * 3 * 2 * s["patch_size"] ** 2


def _size(name: str, value: Any, where: str) -> int:
    low = 0 if name in ("first_k_dense_replace", "n_shared_experts") else 1
    high = MOST.get(name, 1_000_000)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ModelError(f"{where}: {name} must be a whole number between {low} and {high:,}, not {value!r}")
    return value


def _schedule(text: Mapping[str, Any], key: str, default: list[str], where: str) -> list[str]:
    """The per-layer list ``key``, one text a layer."""
    value = text.get(key)
    if value is None:
        return default
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise ModelError(f"{where}: {key} must be a list of names, not {value!r}")
    if len(value) != len(default):
        raise ModelError(f"{where}: {key} has {len(value)} entries for num_hidden_layers {len(default)}")
    return list(value)


def _attention_kinds(text: Mapping[str, Any], layers: int, where: str) -> list[str]:
    usual = ["indexed_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)]
    kinds = []
    for value in _schedule(text, "layer_types", usual, where):
        if value not in ATTENTION:
            raise ModelError(f"{where}: layer_types holds {value!r}; it takes {', '.join(ATTENTION)}")
        kinds.append(ATTENTION[value])
    linear = text.get("linear_attn_config") or {}
    listed = linear.get("kda_layers")
    # There the layers are counted from 1.
    if isinstance(listed, list) and listed != [i + 1 for i, kind in enumerate(kinds) if kind == "kda"]:
        raise ModelError(f"{where}: linear_attn_config.kda_layers and layer_types name different KDA layers")
    return kinds


def _parameters(s: Mapping[str, int], mlp: list[str], attention: list[str]) -> dict[str, int]:
    """{group: parameters}; the router's correction bias, a buffer, is not among them."""
    hidden, width, head = s["hidden_size"], s["linear_num_heads"] * s["linear_head_dim"], s["linear_head_dim"]
    heads, expert = s["num_attention_heads"], 3 * s["hidden_size"] * s["moe_intermediate_size"]
    kda = (
        4 * hidden * width + 3 * width * s["linear_conv_kernel_dim"]  # q, k, v, o; short convolutions
        + hidden * s["linear_num_heads"] + 2 * (hidden * head + head * width)  # beta; forget and output gates
        + width + s["linear_num_heads"] + head  # dt_bias, A_log, output norm
    )  # fmt: skip
    dsa = (
        hidden * s["q_lora_rank"] + s["q_lora_rank"] * heads * s["qk_nope_head_dim"] + hidden * s["kv_lora_rank"]
        + s["kv_lora_rank"] * heads * (s["qk_nope_head_dim"] + s["v_head_dim"]) + heads * s["v_head_dim"] * hidden
        + s["q_lora_rank"] + s["kv_lora_rank"]  # their norms
    )  # fmt: skip
    indexer = (
        s["q_lora_rank"] * s["index_n_heads"] * s["index_head_dim"] + 2 * hidden * s["index_head_dim"]
        + hidden * s["index_n_heads"] + (s["index_kpool"] + 2) * s["index_head_dim"]
    )  # fmt: skip
    streams = (s["hc_mult"] + 2) * s["hc_mult"]
    hyper = 2 * (streams * s["hc_mult"] * hidden + streams + 3)
    layers, sparse, full = len(mlp), mlp.count("sparse"), attention.count("dsa")
    return {
        "experts": sparse * s["n_routed_experts"] * expert,
        "shared": sparse * s["n_shared_experts"] * expert,
        "dense": mlp.count("dense") * 3 * hidden * s["intermediate_size"],
        "kda": attention.count("kda") * kda,
        "dsa": full * dsa,
        "indexer": full * indexer,
        "router": sparse * s["n_routed_experts"] * hidden,
        "hyper_connections": layers * hyper,
        "embedding": s["vocab_size"] * hidden,
        "lm_head": s["vocab_size"] * hidden,
        "norms": (2 * layers + 1) * hidden,
    }


def _headers(folder: Path) -> tuple[dict[Path, dict[str, Tensor]], dict[str, Tensor]]:
    """The header entries of each weight file by tensor name, and those of all. Raises ModelError."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if not index.is_file() and not single.exists():
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt"))
        hint = "pickled weights are never read; convert them to safetensors" if pickled else "download the weights"
        raise ModelError(f"no model.safetensors in {folder}; {hint}")
    shards = _indexed(folder, index) if index.is_file() else {single: _header(single)}
    return shards, {name: tensor for found in shards.values() for name, tensor in found.items()}


def _indexed(folder: Path, index: Path) -> dict[Path, dict[str, Tensor]]:
    places = _read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(v, str) for v in places.values()):
        raise ModelError(f"{index}: weight_map must name a file for each tensor; download it again")
    shards = {}
    for name in sorted(set(places.values())):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(f"{index}: {name!r} is no safetensors file of this folder")
        if not (folder / name).exists():
            raise ModelError(f"{index} names {name}, which is not in {folder}; download it")
        shards[folder / name] = _header(folder / name)
    for tensor, name in places.items():
        if tensor not in shards[folder / name]:
            raise ModelError(f"{index}: tensor {tensor} is not in {name}; download both again")
    return shards


def _header(file: Path) -> dict[str, Tensor]:
    try:
        return read_header(file)
    except HeaderError as error:
        raise ModelError(str(error)) from None


def _check_embedding(model: Model, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """A config.json of another size of the model shows here at once."""
    found = [t for name, t in tensors.items() if name.endswith("embed_tokens.weight")]
    if not found:
        raise ModelError(f"no embed_tokens.weight among the {len(tensors)} tensors in {folder}; this is no text model")
    if found[0].shape != (model.vocab, model.hidden):
        raise ModelError(
            f"{folder}: config.json says vocabulary {model.vocab} and hidden size {model.hidden}, but "
            f"embed_tokens.weight is {list(found[0].shape)}; config and weights are of different models"
        )


def _with_weights(model: Model, shards: Mapping[Path, Mapping[str, Tensor]], tensors: Mapping[str, Tensor]) -> Model:
    files = []
    for file in shards:
        size = file.stat().st_size
        files.append([size, _sha256(file) if size <= HASHED_BYTES else _sampled(file, size)])
    listing = {name: [tensor.dtype, list(tensor.shape)] for name, tensor in tensors.items()}
    return replace(
        model,
        weights_digest=_digest({"tensors": listing, "files": sorted(files)}),
        weight_bytes=sum(tensor.bytes for tensor in tensors.values()),
    )


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sampled(file: Path, size: int) -> str:
    """The SHA-256 of evenly spread pieces, the first and the last byte among them: any training step changes them."""
    found = hashlib.sha256()
    with file.open("rb") as stream:
        for number in range(SAMPLES):
            stream.seek(number * (size - SAMPLE_BYTES) // (SAMPLES - 1))
            found.update(stream.read(SAMPLE_BYTES))
    return found.hexdigest()


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:32]


def _short(count: int) -> str:  # 9.6M, 314B
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return str(count)
