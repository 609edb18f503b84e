"""Small random checkpoints of the architecture, made by transformers, which is also the oracle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from autotune.runtimes.native.engine import Engine

SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 0,
    "v_head_dim": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "swiglu_limit": 2.0,
    "index_topk": 32,
    "index_kpool": 4,
    "index_head_dim": 16,
    "index_n_heads": 16,  # with few heads many pools score exactly 0, and which of equals wins is not defined
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "linear_conv_kernel_dim": 4,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 5,
    "first_k_dense_replace": 1,
    "layer_types": ["linear_attention", "indexed_attention", "linear_attention", "indexed_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "eos_token_id": 3,
    "pad_token_id": 0,
}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("tiny"), SHAPE)


@pytest.fixture(scope="session")
def tinier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers that select 8 positions: for what runs element by element."""
    kinds = {"layer_types": SHAPE["layer_types"][:2], "mlp_layer_types": SHAPE["mlp_layer_types"][:2]}
    shape = {**SHAPE, **kinds, "num_hidden_layers": 2, "index_topk": 8}
    return save_checkpoint(tmp_path_factory.mktemp("tinier"), shape)


def save_checkpoint(folder: Path, shape: dict[str, Any]) -> Path:
    """A random checkpoint whose every parameter is away from its neutral value, so that none can be forgotten."""
    from transformers import Glm5NextForConditionalGeneration
    from transformers.models.glm5_next import configuration_glm5_next as configs

    text = configs.Glm5NextTextConfig(**shape)
    config = configs.Glm5NextConfig(text_config=text.to_dict())
    config.vision_config.depth = 1
    torch.manual_seed(7)
    model = Glm5NextForConditionalGeneration(config)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "language_model" not in name or not tensor.is_floating_point():
                continue
            noise = torch.randn_like(tensor)
            if "norm" in name and name.endswith("weight"):
                tensor.copy_(1 + 0.2 * noise)
            elif tensor.dim() >= 2:
                tensor.copy_(noise * tensor.shape[-1] ** -0.5 * 1.5)
            else:
                tensor.copy_(0.5 * noise)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def oracle() -> Callable[[Path], Callable[[list[int]], Tensor]]:
    """folder → (token ids → logits [T, V] in fp32, as transformers computes them)."""
    from transformers import Glm5NextForConditionalGeneration

    def load(folder: Path) -> Callable[[list[int]], Tensor]:
        model = Glm5NextForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()

        @torch.no_grad()
        def logits(ids: list[int]) -> Tensor:
            found: Tensor = model(input_ids=torch.tensor([ids])).logits[0].float()
            return found

        return logits

    return load


def drain(engine: Engine, prompts: list[list[int]], max_tokens: int, **sampling: Any) -> list[list[int]]:
    """Run all prompts together to their ends; the tokens of each."""
    for number, prompt in enumerate(prompts):
        engine.add(number, prompt, max_tokens, **{"ignore_eos": True, **sampling})
    found: dict[int, list[int]] = {number: [] for number in range(len(prompts))}
    while engine.busy:
        for number, tokens, _ in engine.step():
            found[number].extend(tokens)
    return list(found.values())


@pytest.fixture(scope="session")
def run() -> Callable[..., list[list[int]]]:
    return drain
