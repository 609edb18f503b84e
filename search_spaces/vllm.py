"""vLLM's space for GLM-5.3-Flash: what its engine arguments may be, by hardware, build and checkpoint.

Facts are of vLLM 0.33.0 and of the forks that add sparse latent attention for compute capability 8.x. Nothing here
launches it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from search_spaces.domain import Choice, Float, Int, Pow2, Value
from search_spaces.space import Facts, Knob, Rule, Space, SpaceError

FORK = "TRITON_MLA_SPARSE"
BACKENDS: Mapping[str, str] = {
    "FLASH_ATTN_MLA_SPARSE": "9.0", "FLASHINFER_MLA_SPARSE_SM90": "9.0", "FLASHMLA_SPARSE": "9.0", FORK: "8",
}  # fmt: skip
"""Compute capability (or its major part) that each backend of sparse latent attention needs."""
WIDTHS: Mapping[str, tuple[float, ...]] = {"marlin": (4, 6, 8), "triton": (4, 8, 16), "humming": (2, 3, 4, 5, 6, 8)}
"""Expert widths that each backend multiplies; 6 on marlin as half the layers at 8 and half at 4 bits."""
POOL_LIMIT = 4_200_000


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Prepared weights. ``widths``: {group: bits}, 16 where absent; ``group``: weights that share a 16-bit scale, 0 for
    blocks of 128 × 128 with an fp32 one. ``mtp``: it has the draft layer, whose experts are the group ``mtp``."""

    sentence: str
    widths: Mapping[str, float] = field(default_factory=dict)
    group: int = 128
    mtp: bool = True
    vision: bool = True

    @property
    def experts(self) -> float:
        return self.widths.get("experts", 16.0)


def _experts(width: float, draft: float | None = None) -> dict[str, float]:
    return {"experts": width, "mtp": width if draft is None else draft}


def _text(width: float, attention: float, rest: float) -> dict[str, float]:
    return {"experts": width, "attention": attention, "shared": rest, "dense": rest}


CHECKPOINTS: Mapping[str, Checkpoint] = {
    "bf16": Checkpoint("the published 16-bit weights"),
    "w8-g128": Checkpoint("8-bit experts in groups of 128", _experts(8)),
    "fp8": Checkpoint("the official FP8 weights, attention kept at 16 bits on this hardware",
                      {**_experts(8), "shared": 8, "dense": 8}, 0),
    "w6-g128": Checkpoint("6-bit experts, or half the layers at 8 and half at 4 bits", _experts(6)),
    "w5-g128": Checkpoint("5-bit experts", _experts(5)),
    "w4-g128-mtp16": Checkpoint("4-bit experts, those of the draft layer at 16", _experts(4, 16)),
    "w4-g128": Checkpoint("4-bit experts, those of the draft layer too", _experts(4)),
    "w4-g32-a8": Checkpoint("4-bit feed-forward in groups of 32, 8-bit attention, no draft layer, text only",
                            _text(4, 8, 4), 32, mtp=False, vision=False),
    "w3-g128": Checkpoint("3-bit experts", _experts(3)),
    "w3-g128-a8": Checkpoint("3-bit experts, the rest at 8, no draft layer, text only", _text(3, 8, 8),
                             mtp=False, vision=False),
    "w2-g128-a8": Checkpoint("2-bit experts, the rest at 8, no draft layer, text only", _text(2, 8, 8),
                             mtp=False, vision=False),
}  # fmt: skip
"""Widest first."""


def _backend(value: Value, facts: Facts) -> str:
    here, needs = facts.get("compute_capability"), BACKENDS[str(value)]
    if here is None:
        return "it needs an NVIDIA GPU, and none is here; name one with --hardware"
    if value == FORK and not str(here).startswith("8."):
        return f"only forks for compute capability 8.x have it, and here it is {here}"
    if value != FORK and here != needs:
        return f"it needs compute capability {needs} (Hopper), and here it is {here}"
    return ""


def _cache_type(value: Value, facts: Facts) -> str:
    if value != "bfloat16" and str(facts.get("compute_capability", "")).startswith("8."):
        return f"{FORK}, the only backend here, reads a bfloat16 cache alone"
    return ""


def _parts(name: str) -> Any:
    def refuse(value: Value, facts: Facts) -> str:
        parts, devices = int(value), int(facts.get("devices", 1))
        if parts > devices:
            return f"{parts} ranks need {parts} devices; there are {devices}"
        heads = int(facts.get("sizes", {}).get("attention heads", parts))
        if name == "tp" and heads % parts:
            return f"{heads} attention heads do not divide over {parts} ranks"
        if name == "pp" and parts > 1 and not str(facts.get("compute_capability")).startswith("8."):
            return "vLLM 0.33 drops the hyper-connection streams between pipeline stages; only forks for 8.x carry them"
        if name == "pp" and parts > int(facts.get("layers", parts)):
            return f"{parts} stages need a layer each; the model has {facts['layers']}"
        return ""

    return refuse


def _checkpoint(value: Value, facts: Facts) -> str:
    unfit: Mapping[str, str] = facts.get("unfit", {})
    return unfit.get(str(value), "")


def _custom(value: Value, facts: Facts) -> str:
    link = facts.get("link")
    if value == "custom" and link == "PCIe" and int(facts.get("devices", 1)) > 2:
        return "custom all-reduce needs NVLink, or at most two devices on PCIe"
    return ""


def _length(value: Value, facts: Facts) -> str:
    longest = int(facts.get("longest", 0))
    return f"the workload's longest sequence has {longest} tokens" if int(value) < longest else ""


def _draft(value: Value, facts: Facts) -> str:
    if value == "mtp" and facts.get("mtp_layers") == 0:
        return "the model has no draft layer for multi-token prediction"
    return ""


def _graphs(c: Mapping[str, Value]) -> bool:
    return c["cudagraph_mode"] != "NONE"


ATTENTION = (
    Knob("attention_backend", "attention", Choice(tuple(BACKENDS)), "FLASH_ATTN_MLA_SPARSE",
         "Kernels of sparse latent attention.", refuse=_backend, flag="--attention-backend"),
    Knob("indexer_logits_mb", "attention", Choice((128, 256, 512, 1024), ordered=True), 512,
         "Most MiB of the indexer's scores at a time.", flag="VLLM_SPARSE_INDEXER_MAX_LOGITS_MB"),
    Knob("prefill_workspace_factor", "attention", Int(2, 8, 2), 2,
         "Workspace of sparse prefill.", flag="--attention-config sparse_mla_prefill_workspace_factor"),
)  # fmt: skip

BITS = (
    Knob("checkpoint", "bits", Choice(tuple(CHECKPOINTS), ordered=True), "bf16",
         "Prepared weights: width of the experts, g and the weights that share a scale, a and the attention's width.",
         refuse=_checkpoint, quality=True, restart="reload", flag="--model"),
    Knob("moe_backend", "bits", Choice(("marlin", "triton", "humming")), "marlin",
         "Kernels of the routed experts: marlin takes 4 and 8 bits, humming 2 to 8.", flag="--moe-backend"),
    Knob("marlin_input", "bits", Choice(("none", "int8")), "none",
         "Activations of 4-bit experts: kept wide, or int8 with the integer units.",
         when=lambda c: c["moe_backend"] == "marlin" and CHECKPOINTS[str(c["checkpoint"])].experts == 4,
         quality=True, flag="VLLM_MARLIN_INPUT_DTYPE"),
)  # fmt: skip

LAYOUT = (
    Knob("tp", "layout", Pow2(1, 16), 1, "Tensor-parallel ranks; each has the whole KV cache of its layers.",
         refuse=_parts("tp"), restart="reload", flag="--tensor-parallel-size"),
    Knob("pp", "layout", Pow2(1, 16), 1, "Pipeline stages; the KV cache is split by layers.",
         refuse=_parts("pp"), restart="reload", flag="--pipeline-parallel-size"),
    Knob("dp", "layout", Pow2(1, 16), 1, "Replicas of the attention; experts are split over all ranks.",
         refuse=_parts("dp"), restart="reload", flag="--data-parallel-size"),
    Knob("ep", "layout", Choice((False, True)), False, "Whole experts on each rank instead of a part of each.",
         when=lambda c: int(c["tp"]) * int(c["dp"]) > 1, restart="reload", flag="--enable-expert-parallel"),
    Knob("dcp", "layout", Pow2(1, 8), 1, "Parts that the tokens of the KV cache are split in, within a tensor group.",
         when=lambda c: int(c["tp"]) > 1, refuse=_parts("dcp"), restart="reload",
         flag="--decode-context-parallel-size"),
    Knob("pp_last_fewer", "layout", Int(0, 2), 0, "Layers that the last stage gives up, for its output projection.",
         when=lambda c: int(c["pp"]) > 1, restart="reload", flag="VLLM_PP_LAYER_PARTITION"),
    Knob("allreduce", "layout", Choice(("custom", "nccl")), "custom", "What adds up the parts of tensor ranks.",
         when=lambda c: int(c["tp"]) > 1, refuse=_custom, flag="--disable-custom-all-reduce"),
)  # fmt: skip

GRAPHS = (
    Knob("cudagraph_mode", "graphs", Choice(("NONE", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")),
         "FULL_AND_PIECEWISE", "What is captured as CUDA graphs.", flag="--compilation-config cudagraph_mode"),
    Knob("max_capture_size", "graphs", Pow2(4, 512), 32, "Rows of the largest captured batch.",
         when=_graphs, flag="--max-cudagraph-capture-size"),
)  # fmt: skip

CACHE = (
    Knob("kv_cache_dtype", "cache", Choice(("bfloat16", "fp8_ds_mla")), "bfloat16", "Type of the latent KV cache.",
         refuse=_cache_type, quality=True, flag="--kv-cache-dtype"),
    Knob("ssm_dtype", "cache", Choice(("float32", "bfloat16")), "float32", "Type of the recurrent states.",
         quality=True, flag="--mamba-ssm-cache-dtype"),
    Knob("prefix_caching", "cache", Choice((True, False)), True,
         "Reuse earlier prompts; each sequence keeps one state more.", flag="--enable-prefix-caching"),
    Knob("block_size", "cache", Choice((0, 2048, 4608), ordered=True), 0,
         "Tokens a block; 0 lets the engine choose, which makes them as large as a state.",
         when=lambda c: bool(c["prefix_caching"]), flag="--block-size"),
    Knob("kv_cap", "cache", Choice((0, 4_194_304), ordered=True), 0,
         "Most tokens of one replica's KV pool; 0: all that fit.", flag="--num-gpu-blocks-override"),
    Knob("gmu", "cache", Float(0.80, 0.96, 0.01), 0.95, "Share of a device's memory that the engine may use.",
         flag="--gpu-memory-utilization"),
    Knob("max_model_len", "cache", Choice((32768, 131072, 262144, 524288, 1048576), ordered=True), 32768,
         "Longest sequence: what the deployment must take.", refuse=_length, flag="--max-model-len"),
)  # fmt: skip

SPECULATION = (
    Knob("spec_method", "speculation", Choice(("none", "mtp", "ngram", "suffix")), "none",
         "Who drafts tokens: nobody, the model's own draft layer, or the text itself.", refuse=_draft,
         flag="--speculative-config method"),
    Knob("spec_k", "speculation", Int(1, 7), 3, "Tokens drafted at a time.",
         when=lambda c: c["spec_method"] != "none", flag="--speculative-config num_speculative_tokens"),
    Knob("spec_by_batch", "speculation", Choice((False, True)), False, "Two drafted tokens where several decode.",
         when=lambda c: c["spec_method"] != "none" and int(c["spec_k"]) > 2,
         flag="--speculative-config num_speculative_tokens_per_batch_size"),
)  # fmt: skip

SCHEDULER = (
    Knob("max_num_seqs", "scheduler", Pow2(4, 128), 8, "Sequences decoded together.", flag="--max-num-seqs"),
    Knob("max_num_batched_tokens", "scheduler", Choice((1152, 2048, 2312, 3460, 4096, 8192, 16384), ordered=True),
         2048, "Tokens of one step.", flag="--max-num-batched-tokens"),
    Knob("long_prefill", "scheduler", Choice((0, 384, 1024), ordered=True), 0,
         "Tokens from which a prompt counts as long and waits for others; 0: never.",
         flag="--long-prefill-token-threshold"),
    Knob("async_scheduling", "scheduler", Choice((True, False)), True, "Plan a step while the last one runs.",
         flag="--async-scheduling"),
    Knob("shared_expert_stream", "scheduler", Choice((True, False)), True,
         "Run the shared expert beside the routed ones.", flag="VLLM_DISABLE_SHARED_EXPERTS_STREAM"),
    Knob("nccl_ring", "scheduler", Choice((False, True)), False,
         "Ring and Simple in NCCL: full graphs over many ranks are stable with them.", flag="NCCL_ALGO NCCL_PROTO"),
)  # fmt: skip


def ranks(c: Mapping[str, Value]) -> int:
    return int(c["tp"]) * int(c["pp"]) * int(c["dp"])


def drafted(c: Mapping[str, Value]) -> int:
    """Rows of one sequence in a decode step beyond its own."""
    return int(c["spec_k"]) if c["spec_method"] != "none" else 0


def _inner(c: Mapping[str, Value], facts: Facts) -> bool:
    inner = int(facts.get("sizes", {}).get("inner columns of an expert", 0))
    checkpoint, parts = CHECKPOINTS[str(c["checkpoint"])], int(c["tp"]) * int(c["dp"])
    unit = max(64, checkpoint.group or 128)
    packed = checkpoint.experts < 16 and c["moe_backend"] != "triton"
    return packed and not c.get("ep") and (inner % parts != 0 or inner // parts % unit != 0)


def _overflows(c: Mapping[str, Value], facts: Facts) -> bool:
    memory = facts.get("memory")
    return memory is not None and memory.overflows(c)


def _pool(c: Mapping[str, Value], facts: Facts) -> bool:
    memory = facts.get("memory")
    if memory is None or c["attention_backend"] != FORK or facts.get("wide_offsets") or c["kv_cap"]:
        return False
    return bool(memory.tokens(c) / int(c["dp"]) / int(c.get("dcp", 1)) > POOL_LIMIT)


RULES = (
    Rule("C1 devices", "tp × pp × dp must be the number of devices",
         lambda c, facts: ranks(c) != int(facts.get("devices", ranks(c)))),
    Rule("C3 whole groups", "each rank must get whole groups of an expert's inner columns: (inner / ranks) must be a "
         "multiple of 64 and of the group that shares a scale, or ep on", _inner),
    Rule("C4 experts", "with ep the routed experts must divide over tp × dp ranks",
         lambda c, facts: bool(c.get("ep")) and int(facts.get("experts", 0)) % (int(c["tp"]) * int(c["dp"])) != 0),
    Rule("C4 replicas", "dp replicates the attention only; it needs ep for the experts",
         lambda c, facts: int(c["dp"]) > 1 and not c.get("ep")),
    Rule("C6 kernels", "the experts' kernels must take the checkpoint's width: marlin 4 and 8 bits, humming 2 to 8, "
         "triton 4, 8 and 16, and no FP8 in triton below compute capability 8.9",
         lambda c, facts: CHECKPOINTS[str(c["checkpoint"])].experts not in WIDTHS[str(c["moe_backend"])]
         or (c["moe_backend"] == "triton" and c["checkpoint"] == "fp8"
             and float(facts.get("compute_capability") or 0) < 8.9)),
    Rule("draft layer", "mtp needs a checkpoint with the draft layer",
         lambda c, facts: c["spec_method"] == "mtp" and not CHECKPOINTS[str(c["checkpoint"])].mtp),
    Rule("C8 capture", "captured full graphs must hold a whole decode step: max_capture_size at least "
         "max_num_seqs × (spec_k + 1)",
         lambda c, facts: str(c["cudagraph_mode"]).startswith("FULL")
         and int(c["max_capture_size"]) < int(c["max_num_seqs"]) * (drafted(c) + 1)),
    Rule("C9 blocks", "max_num_batched_tokens must hold a block and the drafted tokens",
         lambda c, facts: int(c["max_num_batched_tokens"]) < int(c.get("block_size", 0)) + drafted(c)),
    Rule("C14 draft length", "a draft length that follows the batch needs cudagraph_mode PIECEWISE",
         lambda c, facts: bool(c.get("spec_by_batch")) and c["cudagraph_mode"] != "PIECEWISE"),
    Rule("context ranks", "dcp must divide tp", lambda c, facts: int(c["tp"]) % int(c.get("dcp", 1)) != 0),
    Rule("C7 memory", "weights, states, graphs and overhead must leave a KV cache of max_model_len tokens", _overflows),
    Rule("C10 pool", "the sparse kernels count rows in 32 bits and answer wrongly above 4.2 M tokens of KV cache; "
         "set kv_cap", _pool),
)  # fmt: skip
"""C2 (heads over tp), C5 (backend), C13 (all-reduce) and C15 (stages) are refusals of single values, at the knobs.
C11 and C12 are of llama.cpp and exllamav3."""


SPACE = Space("vllm", (*ATTENTION, *BITS, *LAYOUT, *GRAPHS, *CACHE, *SPECULATION, *SCHEDULER), RULES)


def settled(space: Space) -> Space:
    """``space`` with defaults that break no rule: the widest checkpoint that fits, tensor-parallel as far as can be.

    Raises SpaceError with the broken rules where there are none.
    """
    values = {name: space.knob(name).domain.values for name in ("checkpoint", "tp", "pp", "moe_backend", "kv_cap")}
    broken: dict[str, None] = {}
    tried = (
        {"checkpoint": checkpoint, "tp": tp, "pp": pp, "moe_backend": moe, "kv_cap": cap}
        for checkpoint in values["checkpoint"]
        for tp in reversed(values["tp"])
        for pp in values["pp"]
        if int(tp) * int(pp) == int(space.facts.get("devices", 1))
        for moe in values["moe_backend"]
        for cap in values["kv_cap"]
    )
    for chosen in tried:
        found = space.broken(space.complete(chosen))
        if not found:
            knobs = tuple(replace(k, default=chosen[k.name]) if k.name in chosen else k for k in space.knobs)
            return replace(space, knobs=knobs)
        broken |= dict.fromkeys(found)
    raise SpaceError("no configuration is possible here: " + "; ".join(broken))
