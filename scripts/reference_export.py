"""Writes the trained decoder as the Hugging Face folder that `transformers`, the native engine and converters read.

Knows the checkpoint's layout and the byte tokenizer; knows nothing of training.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from reference_network import Decoder
from reference_shape import Shape
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Glm5NextConfig, Glm5NextForConditionalGeneration

SPECIALS = ("<|endoftext|>", "<|pad|>", "<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>")
KEPT_IN_FP32 = ("_hc.", "e_score_correction_bias", "mlp.gate.weight", "conv1d", "dt_bias", "A_log")
# the multimodal class insists on a vision tower; this one is as small as the class allows and holds zeros
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 16,
    "patch_size": 2,
    "temporal_patch_size": 1,
    "image_size": 8,
    "projection_intermediate_size": 32,
}


def special_tokens(vocabulary: int) -> list[str]:
    """Names of the ids from 256 on: every id of the vocabulary decodes to something."""
    return [*SPECIALS, *(f"<|reserved_{i}|>" for i in range(256 + len(SPECIALS), vocabulary))]


def config(shape: Shape) -> dict[str, Any]:
    """config.json as a dictionary: the sizes in the words that `transformers` and other engines' converters read."""
    linear_layers = [i + 1 for i, kind in enumerate(shape.layer_types) if kind == "linear_attention"]
    text = {
        **{key: value for key, value in asdict(shape).items() if key != "rms_norm_eps"},
        "model_type": "glm5_next_text",
        "rms_norm_eps": shape.rms_norm_eps,
        "num_key_value_heads": shape.num_attention_heads,
        "qk_rope_head_dim": 0,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "index_kpool_always_select_tail": True,
        "layer_types": shape.layer_types,
        "mlp_layer_types": shape.mlp_layer_types,
        "indexer_types": ["full"] * shape.num_hidden_layers,
        "linear_attn_config": {
            "head_dim": shape.linear_head_dim,
            "num_heads": shape.linear_num_heads,
            "short_conv_kernel_size": shape.linear_conv_kernel_dim,
            "gate_lower_bound": shape.linear_lower_bound,
            "safe_gate": True,
            "kda_layers": linear_layers,
            "full_attn_layers": [i + 1 for i in range(shape.num_hidden_layers) if i + 1 not in linear_layers],
        },
        "max_position_embeddings": 8192,
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
        "eos_token_id": 256,
        "pad_token_id": 257,
        "dtype": "bfloat16",
    }
    return {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "model_type": "glm5_next",
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "eos_token_id": 256,
        "pad_token_id": 257,
        "image_token_id": 258,
        "video_token_id": 259,
        "image_start_token_id": 260,
        "image_end_token_id": 261,
        "video_start_token_id": 260,
        "video_end_token_id": 261,
        "text_config": text,
        "vision_config": {**VISION, "model_type": "glm5_next_vision", "out_hidden_size": shape.hidden_size},
    }


def to_transformers(model: Decoder) -> Glm5NextForConditionalGeneration:
    """The same weights inside the class of `transformers`, fp32; raises ValueError where a name does not fit."""
    other = Glm5NextForConditionalGeneration(Glm5NextConfig.from_dict(config(model.shape))).float()
    names = {
        name if name.startswith("lm_head") else f"model.language_model.{name}": value
        for name, value in model.state_dict().items()
    }
    missing, unexpected = other.load_state_dict(names, strict=False)
    missing = [name for name in missing if not name.startswith("model.visual.")]
    if missing or unexpected:
        raise ValueError(f"the decoder and transformers disagree on names: missing {missing}, unexpected {unexpected}")
    with torch.no_grad():
        for parameter in other.model.visual.parameters():
            parameter.zero_()
    return other.eval()


def write_folder(model: Decoder, folder: Path) -> None:
    """Weights (bf16, fp32 where the architecture keeps it), config.json and tokenizer.json into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    other = to_transformers(model)
    for name, tensor in [*other.named_parameters(), *other.named_buffers()]:
        if not any(part in name for part in KEPT_IN_FP32):
            tensor.data = tensor.data.bfloat16()
    other.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "config.json").write_text(json.dumps(config(model.shape), indent=2) + "\n")
    byte_tokenizer(model.shape.vocab_size).save(str(folder / "tokenizer.json"))
    (folder / "model.safetensors").chmod(0o644)


def byte_tokenizer(vocabulary: int) -> Tokenizer:
    """Id b is byte b, without merges; specials follow from 256 on.

    The byte-level pre-tokenizer spells byte b as a printable character: b itself where it is printable, otherwise the
    next free one from 256 on (the GPT-2 alphabet), which is what its decoder and other engines expect.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    ids = {chr(byte if byte in printable else next(spare)): byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special_tokens(vocabulary))
    return tokenizer
