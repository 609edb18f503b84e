"""SGLang's space: the server arguments of 0.5.23 that a `glm5_next` deployment turns. Nothing here launches it.

On compute capability 8.x (A100) this release refuses the model: its sparse attention needs 9.x or 10.x.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from search_spaces.domain import Choice, Float, Int, Pow2, Value
from search_spaces.space import Facts, Knob, Rule, Space

PREFILL = {
    "flashmla_sparse": ("9.", "10."), "flashmla_kv": ("9.",), "fa3": ("9.",), "tilelang": ("8.", "9.", "10."),
    "trtllm": ("10.",),
}  # fmt: skip
"""Kernels of sparse prefill and the compute capabilities that have them."""
DECODE = {"fa3": ("9.",), "flashmla_kv": ("9.",), "flashmla_sparse": ("9.", "10."), "tilelang": ("8.", "9.", "10."),
          "trtllm": ("10.",)}  # fmt: skip


def _kernels(table: Mapping[str, tuple[str, ...]]) -> Callable[[Value, Facts], str]:
    def refuse(value: Value, facts: Facts) -> str:
        here = facts.get("compute_capability")
        if here is None:
            return "it needs an NVIDIA GPU, and none is here; name one with --hardware"
        if str(here).startswith("8."):
            return f"SGLang 0.5.23 has no sparse attention with kpool for compute capability {here}"
        if not str(here).startswith(table[str(value)]):
            return f"it has no kernels for compute capability {here}"
        return ""

    return refuse


def _cache_type(value: Value, facts: Facts) -> str:
    here = facts.get("compute_capability")
    if value == "fp8_e4m3" and here is not None and float(here) < 8.9:
        return f"an FP8 cache needs compute capability 8.9, and here it is {here}"
    return ""


def _ranks(value: Value, facts: Facts) -> str:
    devices = int(facts.get("devices", 1))
    if int(value) > devices:
        return f"{value} ranks need {value} devices; there are {devices}"
    heads = int(facts.get("sizes", {}).get("attention heads", value))
    return f"{heads} attention heads do not divide over {value} ranks" if heads % int(value) else ""


def _stages(value: Value, facts: Facts) -> str:
    return "SGLang 0.5.23 drops the hyper-connection streams between pipeline stages" if int(value) > 1 else ""


def _draft(value: Value, facts: Facts) -> str:
    if value == "NEXTN" and facts.get("mtp_layers") == 0:
        return "the model has no draft layer for multi-token prediction"
    return ""


KNOBS = (
    Knob("dsa_prefill_backend", "attention", Choice(tuple(PREFILL)), "flashmla_sparse",
         "Kernels of sparse attention over prompts.", refuse=_kernels(PREFILL), flag="--dsa-prefill-backend"),
    Knob("dsa_decode_backend", "attention", Choice(tuple(DECODE)), "fa3",
         "Kernels of sparse attention in decode steps.", refuse=_kernels(DECODE), flag="--dsa-decode-backend"),
    Knob("linear_attn_backend", "attention", Choice(("triton", "cutedsl", "flashinfer", "flashkda")), "triton",
         "Kernels of the linear-attention layers.", flag="--linear-attn-backend"),
    Knob("quantization", "bits", Choice(("none", "fp8", "w8a8_int8", "moe_wna16")), "none",
         "Weights: as the checkpoint has them, or made narrower at load.", quality=True, restart="reload",
         flag="--quantization"),
    Knob("moe_runner_backend", "bits", Choice(("auto", "triton", "marlin", "humming")), "auto",
         "Kernels of the routed experts.", flag="--moe-runner-backend"),
    Knob("tp_size", "layout", Pow2(1, 16), 1, "Tensor-parallel ranks.", refuse=_ranks, restart="reload",
         flag="--tp-size"),
    Knob("pp_size", "layout", Pow2(1, 4), 1, "Pipeline stages.", refuse=_stages, restart="reload", flag="--pp-size"),
    Knob("dp_size", "layout", Pow2(1, 8), 1, "Replicas of the attention.", refuse=_ranks, restart="reload",
         flag="--dp-size"),
    Knob("ep_size", "layout", Pow2(1, 16), 1, "Ranks that share whole experts.", refuse=_ranks, restart="reload",
         flag="--ep-size"),
    Knob("cuda_graph", "graphs", Choice((True, False)), True, "Capture decode steps as CUDA graphs.",
         flag="--disable-cuda-graph"),
    Knob("cuda_graph_max_bs", "graphs", Pow2(8, 512), 32, "Rows of the largest captured step.",
         when=lambda c: bool(c["cuda_graph"]), flag="--cuda-graph-max-bs"),
    Knob("torch_compile", "graphs", Choice((False, True)), False, "Compile small decode steps with torch.",
         flag="--enable-torch-compile"),
    Knob("kv_cache_dtype", "cache", Choice(("bfloat16", "fp8_e4m3")), "bfloat16", "Type of the latent KV cache.",
         refuse=_cache_type, quality=True, flag="--kv-cache-dtype"),
    Knob("mamba_ssm_dtype", "cache", Choice(("float32", "bfloat16")), "float32", "Type of the recurrent states.",
         quality=True, flag="--mamba-ssm-dtype"),
    Knob("radix_cache", "cache", Choice((True, False)), True, "Reuse the cache of earlier prompts.",
         flag="--disable-radix-cache"),
    Knob("page_size", "cache", Choice((1, 16, 64), ordered=True), 64, "Tokens of a cache page.", flag="--page-size"),
    Knob("mem_fraction_static", "cache", Float(0.80, 0.94, 0.02), 0.88,
         "Share of a device's memory for weights and caches.", flag="--mem-fraction-static"),
    Knob("max_running_requests", "scheduler", Pow2(4, 256), 32, "Sequences decoded together.",
         flag="--max-running-requests"),
    Knob("chunked_prefill_size", "scheduler", Pow2(1024, 16384), 8192, "Tokens of one piece of a long prompt.",
         flag="--chunked-prefill-size"),
    Knob("schedule_policy", "scheduler", Choice(("lpm", "fcfs", "dfs-weight")), "fcfs",
         "Order of waiting requests: by the length of a cached prefix, or by arrival.", flag="--schedule-policy"),
    Knob("overlap_schedule", "scheduler", Choice((True, False)), True, "Plan a step while the last one runs.",
         flag="--disable-overlap-schedule"),
    Knob("speculative_algorithm", "speculation", Choice(("none", "NEXTN", "NGRAM")), "none",
         "Who drafts tokens: nobody, the model's own draft layer, or the text itself.", refuse=_draft,
         flag="--speculative-algorithm"),
    Knob("speculative_num_draft_tokens", "speculation", Int(2, 8), 4, "Tokens checked in a step.",
         when=lambda c: c["speculative_algorithm"] != "none", flag="--speculative-num-draft-tokens"),
)  # fmt: skip


def _used(c: Mapping[str, Value]) -> int:
    return int(c["tp_size"]) * int(c["pp_size"])


RULES = (
    Rule("devices", "tp_size × pp_size must be the number of devices: dp_size and ep_size share the tensor ranks",
         lambda c, facts: _used(c) != int(facts.get("devices", _used(c)))),
    Rule("replicas", "dp_size must divide tp_size", lambda c, facts: int(c["tp_size"]) % int(c["dp_size"]) != 0),
    Rule("experts", "ep_size must divide tp_size, and the experts must divide over it",
         lambda c, facts: int(c["tp_size"]) % int(c["ep_size"]) != 0
         or int(facts.get("experts", 0)) % int(c["ep_size"]) != 0),
    Rule("capture", "captured steps must hold all that decode together: cuda_graph_max_bs ≥ max_running_requests",
         lambda c, facts: bool(c["cuda_graph"]) and int(c["cuda_graph_max_bs"]) < int(c["max_running_requests"])),
    Rule("pages", "chunked_prefill_size must hold whole pages",
         lambda c, facts: int(c["chunked_prefill_size"]) % int(c["page_size"]) != 0),
)  # fmt: skip

SPACE = Space("sglang", KNOBS, RULES, reference={"quantization": "none", "kv_cache_dtype": "bfloat16"})
