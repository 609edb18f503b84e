"""vLLM's space on a CPU: the engine arguments that a CPU build obeys. Facts are of 0.32.0; nothing here launches it."""

from __future__ import annotations

from search_spaces.domain import Choice, Pow2, Value
from search_spaces.space import Facts, Knob, Rule, Space

EIGHT_BITS = ("avx512f", "amx_tile")


def _cache_type(value: Value, facts: Facts) -> str:
    here = facts.get("cpu_flags")
    if value != "auto" and here is not None and not any(flag in here for flag in EIGHT_BITS):
        return "vLLM's 8-bit cache on a CPU needs AVX-512 or AMX, and this CPU has neither"
    return ""


def _block(value: Value, facts: Facts) -> str:
    if bool(facts.get("mla")) == (value == 16):
        return ""
    if facts.get("mla"):
        return "latent attention (MLA) takes blocks of 16 on a CPU"
    return "attention on a CPU takes blocks of a multiple of 32"


def _not_latent(value: Value, facts: Facts) -> str:
    return "vLLM turns it off for latent attention (MLA) on a CPU" if value and facts.get("mla") else ""


KNOBS = (
    Knob("block_size", "attention", Choice((16, 32, 64, 128), ordered=True), 128,
         "Tokens of a cache block; a prefix is reused in whole blocks.", refuse=_block, flag="--block-size"),
    Knob("dtype", "bits", Choice(("bfloat16", "float32")), "bfloat16",
         "Type of weights and activations; without AVX-512 a CPU multiplies bfloat16 slowly.",
         quality=True, flag="--dtype"),
    Knob("enforce_eager", "graphs", Choice((False, True)), False,
         "Run without compiling the model.", flag="--enforce-eager"),
    Knob("kv_cache_dtype", "cache", Choice(("auto", "fp8_e5m2")), "auto",
         "Type of the KV cache; auto is that of the model.", refuse=_cache_type, quality=True, flag="--kv-cache-dtype"),
    Knob("prefix_caching", "cache", Choice((True, False)), True,
         "Reuse the cache of earlier prompts.", refuse=_not_latent, flag="--enable-prefix-caching"),
    Knob("kv_cache_mib", "cache", Choice((64, 128, 256, 512, 1024, 4096), ordered=True), 256,
         "Memory of the KV cache in MiB.", flag="--kv-cache-memory-bytes"),
    Knob("max_num_seqs", "scheduler", Pow2(1, 128), 128, "Sequences decoded together.", flag="--max-num-seqs"),
    Knob("max_num_batched_tokens", "scheduler", Pow2(256, 8192), 2048, "Tokens of one step.",
         flag="--max-num-batched-tokens"),
    Knob("chunked_prefill", "scheduler", Choice((True, False)), True,
         "Cut long prompts in pieces that share steps with decoding.", refuse=_not_latent,
         flag="--enable-chunked-prefill"),
)  # fmt: skip

RULES = (
    Rule("steps", "max_num_batched_tokens must hold a token of each of max_num_seqs",
         lambda c, facts: int(c["max_num_batched_tokens"]) < int(c["max_num_seqs"])),
    Rule("whole prompts", "without chunked_prefill max_num_batched_tokens must hold the longest sequence",
         lambda c, facts: not c["chunked_prefill"]
         and int(c["max_num_batched_tokens"]) < int(facts.get("max_model_len", 0))),
)  # fmt: skip

SPACE = Space("vllm", KNOBS, RULES, reference={"dtype": "float32", "kv_cache_dtype": "auto", "enforce_eager": True})
