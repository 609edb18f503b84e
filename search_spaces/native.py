"""The native engine's space: every knob that `autotune/runtimes/native` obeys, in five groups plus the scheduler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from search_spaces.bits import LAYER_GROUPS, MODEL_GROUPS, misfit, used, vector
from search_spaces.domain import Choice, Int, Pow2, Value
from search_spaces.space import Facts, Knob, Rule, Space

LANES = 16
"""Inputs of an 8-bit weight that are multiplied at once; a part of one holds whole such runs."""
WIDTH = Choice((4, 8, 16), ordered=True)
BITS_SENTENCES = {
    "attention": "Width of the attention projections of every layer.",
    "dense": "Width of the dense feed-forward of the first layers.",
    "experts": "Width of the routed experts, the bulk of the weights.",
    "shared": "Width of the shared expert.",
    "embedding": "Width of the token embedding.",
    "lm_head": "Width of the output projection.",
}


def _backend(kind: str) -> Any:
    """Refuse a value that the engine's own probe refused, with the probe's reason."""

    def refuse(value: Value, facts: Facts) -> str:
        refused: Mapping[str, str] = facts.get("refused", {})
        return refused.get(f"{kind}={value}", "")

    return refuse


def _graphs(value: Value, facts: Facts) -> str:
    if value == "cuda" and not facts.get("cuda", False):
        return "CUDA graphs need a CUDA device, and there is none here"
    return _backend("graphs")(value, facts)  # type: ignore[no-any-return]


def _host(name: str) -> Any:
    """Refuse what needs a device apart from the host, or a host that is the device."""

    def refuse(value: Value, facts: Facts) -> str:
        cuda = bool(facts.get("cuda", False))
        if name == "allocator" and cuda and value == "keep":
            return "glibc's allocator holds no device memory"
        elsewhere = value not in ("device", "plain", "default", "keep")
        return f"{name}={value} needs a CUDA device; here the host's memory is the device's" * (elsewhere and not cuda)

    return refuse


def _threads(value: Value, facts: Facts) -> str:
    cores = facts.get("cores")
    return f"this machine has {cores} cores" if cores is not None and int(value) > int(cores) else ""


def _layers(value: Value, facts: Facts) -> str:
    layers = facts.get("layers")
    if layers is not None and int(value) * 2 > int(layers):
        return f"the model has {layers} layers; protecting {value} at each end would leave none to quantize"
    return ""


def _layout(name: str) -> Any:
    """Refuse what the machine has no devices for, or the model no equal parts of."""

    def refuse(value: Value, facts: Facts) -> str:
        parts, devices = int(value), int(facts.get("devices", 1))
        sizes: Mapping[str, int] = facts.get("sizes", {})
        if parts > devices:
            return f"{parts} ranks need {parts} devices (on CPU, cores); there are {devices}"
        if name == "tp":
            odd = [f"{size} {what}" for what, size in sizes.items() if size % parts]
            return f"{' and '.join(odd)} do not divide over {parts} ranks" if odd else ""
        if name == "ep" and int(facts.get("experts", 0)) % parts:
            return f"{facts['experts']} experts do not divide over {parts} ranks"
        if name == "pp" and parts > int(facts.get("layers", parts)):
            return f"{parts} stages need a layer each; the model has {facts['layers']}"
        return ""

    return refuse


def _ranks(config: Mapping[str, Value]) -> int:
    return int(config["tp"]) * int(config["pp"]) * int(config["dp"])


def _splits_a_group(config: Mapping[str, Value], facts: Facts) -> bool:
    """Whether a part of a packed weight would not be whole groups of inputs, so that it would be stored wider."""
    inputs: Mapping[str, Sequence[int]] = facts.get("inputs", {})
    tp, ep = int(config["tp"]), int(config["ep"])
    # What does not take 4 bits is stored at 8.
    units = {4: (int(config.get("bits_group_size", 64)), LANES), 8: (LANES,), 16: ()}
    for name, width in vector(config, facts.get("mlps", ())).items() if tp > 1 else ():
        group = name.split(".")[-1]
        parts = max(tp // ep, 1) if group == "experts" else tp
        for size in inputs.get(group, ()):
            unit = next((unit for unit in units[width] if size % unit == 0), 1)
            if size % (unit * parts):
                return True
    return False


def _pool(value: Value, facts: Facts) -> str:
    longest = int(facts.get("longest", 0))
    return f"the workload's longest sequence has {longest} tokens" if int(value) < longest else ""


def _checkpoint(value: Value, facts: Facts) -> str:
    size = int(facts.get("state_bytes", 0))
    return f"one recurrent state of this model takes {size / 2**20:.0f} MiB" if int(value) << 20 < size else ""


def _overflows(config: Mapping[str, Value], facts: Facts) -> bool:
    memory = facts.get("memory")
    return memory is not None and memory.overflows(config)


def _uses(*widths: int) -> Any:
    return lambda c: bool(used(c) & set(widths))


def _bits(group: str) -> Knob:
    return Knob(
        f"bits_{group}", "bits", WIDTH, 16, BITS_SENTENCES[group],
        refuse=_backend(f"bits_{group}"), quality=True, restart="reload",
    )  # fmt: skip


ATTENTION = (
    Knob(
        "attention", "attention", Choice(("absorbed", "expanded", "sparse")), "absorbed",
        "Latent attention as MQA over the latent (absorbed), as full multi-head over re-expanded keys and values "
        "(expanded), or absorbed over only the indexer's selected positions (sparse).",
        refuse=_backend("attention"),
    ),
    Knob(
        "kv_splits", "attention", Choice((1, 2, 4, 8), ordered=True), 1,
        "Parts of the context that a decode step's latent attention reads on their own before they are merged.",
        when=lambda c: c["attention"] != "expanded", refuse=_backend("kv_splits"),
    ),
    Knob(
        "kda_chunk", "attention", Choice((16, 32, 64), ordered=True), 64,
        "Tokens per chunk of the linear-attention prefill.", refuse=_backend("kda_chunk"),
    ),
)  # fmt: skip

BITS = (
    *(_bits(group) for group in (*LAYER_GROUPS, *MODEL_GROUPS)),
    Knob(
        "bits_protect_first", "bits", Int(0, 2), 0, "First layers kept one width wider than their group.",
        refuse=_layers, quality=True, restart="reload",
    ),
    Knob(
        "bits_protect_last", "bits", Int(0, 2), 0, "Last layers kept one width wider than their group.",
        refuse=_layers, quality=True, restart="reload",
    ),
    Knob(
        "bits_vector", "bits", Choice(("",)), "",
        "Widths by layer and group (0.attention=8,3.experts=4): these weights have exactly these widths, the others "
        "follow their group. A plan's [knobs] lists the vectors to search.",
        admit=misfit, quality=True, restart="reload",
    ),
    Knob(
        "bits_long", "bits", Choice((0, 8, 16), ordered=True), 0,
        "A second copy of every narrower weight at this width, used from bits_long_from tokens of context (0: none).",
        when=_uses(4, 8), quality=True, restart="reload",
    ),
    Knob(
        "bits_long_from", "bits", Pow2(512, 4096), 1024,
        "Tokens of context from which the weights of bits_long are used.",
        when=lambda c: bool(c.get("bits_long")), quality=True, restart="reload",
    ),
    Knob(
        "bits_compensation", "bits", Choice(("none", "bias")), "none",
        "Add to each output of a narrow weight its mean rounding error over a calibration text (bias), or nothing.",
        when=_uses(4, 8), quality=True, restart="reload",
    ),
    Knob(
        "bits_group_size", "bits", Pow2(32, 128), 64, "Weights that share one 4-bit scale and zero point.",
        when=_uses(4), refuse=_backend("bits_group_size"), quality=True, restart="reload",
    ),
    Knob(
        "activations", "bits", Choice(("weight_only", "int8_token", "int8_tensor")), "weight_only",
        "Activations of 8-bit layers: kept wide, int8 with one scale a token, or int8 with one scale a tensor (often "
        "wrong).",
        when=_uses(8), refuse=_backend("activations"), quality=True, restart="reload",
    ),
    Knob(
        "compute", "bits", Choice(("fp32", "bf16")), "fp32",
        "Type in which 16-bit layers are stored and multiplied (fp32 takes twice the memory).",
        refuse=_backend("compute"), quality=True, restart="reload",
    ),
)  # fmt: skip

LAYOUT = tuple(
    Knob(name, "layout", Pow2(1, 8), 1, sentence, refuse=_layout(name), restart="reload")
    for name, sentence in (
        ("tp", "Tensor-parallel ranks: each matrix is split by heads, inner columns or vocabulary."),
        ("pp", "Pipeline stages: the layers are cut so that the stage with most stored bytes has as few as can be."),
        ("dp", "Replicas of the whole model, each with its own cache; requests go to the least loaded one."),
        ("ep", "Groups of tensor-parallel ranks that hold whole routed experts instead of a part of each."),
    )
)

GRAPHS = (
    Knob(
        "graphs", "graphs", Choice(("eager", "compiled", "fused", "cuda")), "eager",
        "Run operation by operation, through regions compiled by torch, through our own fused kernels (C on CPU), or "
        "as captured CUDA graphs.", refuse=_graphs,
    ),
    Knob(
        "graph_batch", "graphs", Pow2(1, 16), 8, "Largest decode batch that is captured; larger ones run uncaptured.",
        when=lambda c: c["graphs"] == "cuda",
    ),
    Knob(
        "graph_contexts", "graphs", Choice(("whole", "buckets")), "whole",
        "Contexts that are captured: only the longest possible, or powers of two up to it.",
        when=lambda c: c["graphs"] == "cuda",
    ),
    Knob(
        "embed_on", "graphs", Choice(("device", "cpu")), "device",
        "Where the token embedding lives and is looked up.", refuse=_host("embed_on"), restart="reload",
    ),
    Knob(
        "transfers", "graphs", Choice(("plain", "pinned", "zero_copy")), "plain",
        "How a step's inputs reach the device: copied, copied from page-locked memory, or read there by kernels.",
        refuse=_host("transfers"),
    ),
    Knob(
        "allocator", "graphs", Choice(("default", "keep", "expandable_segments", "async")), "default",
        "Memory allocation: torch's default, freed host memory kept (CPU), growing segments, or CUDA's own pool.",
        refuse=_host("allocator"),
    ),
)  # fmt: skip

CACHE = (
    Knob(
        "kv_dtype", "cache", Choice(("bf16", "fp32", "int8")), "bf16", "Storage type of the latent KV cache.",
        refuse=_backend("kv_dtype"), quality=True,
    ),
    Knob(
        "state_dtype", "cache", Choice(("fp32", "bf16")), "fp32", "Storage type of the recurrent state.",
        refuse=_backend("state_dtype"), quality=True,
    ),
    Knob(
        "prefix_reuse", "cache", Choice((False, True)), False,
        "Keep blocks and recurrent states of earlier prompts and continue from the longest known prefix.",
        restart="live",
    ),
    Knob(
        "state_cache_mib", "cache", Pow2(4, 4096), 1024,
        "Most MiB, all ranks together, of recurrent states kept at block borders; a known prefix can be continued only "
        "from one of them. The least recently used go first.",
        when=lambda c: bool(c["prefix_reuse"]), refuse=_checkpoint, restart="live",
    ),
    Knob("block_size", "cache", Pow2(8, 64), 16, "Tokens per cache block; also the step of prefix reuse."),
    Knob("kv_tokens", "cache", Pow2(1024, 16384), 8192, "Tokens that the latent KV pool holds.", refuse=_pool),
)  # fmt: skip

SCHEDULER = (
    Knob("max_seqs", "scheduler", Pow2(1, 16), 8, "Sequences decoded together."),
    Knob("token_budget", "scheduler", Pow2(64, 2048), 512, "Tokens of prefill and decode in one step.", restart="live"),
    Knob("threads", "scheduler", Int(1, 8), 1, "CPU threads of the engine.", refuse=_threads),
)

RULES = (
    Rule(
        "devices",
        "tp × pp × dp ranks must not outnumber the devices (on CPU, the cores)",
        lambda c, facts: _ranks(c) > int(facts.get("devices", 1 << 20)),
    ),
    Rule(
        "cores",
        "the threads of all ranks must not outnumber the cores",
        lambda c, facts: _ranks(c) > 1 and _ranks(c) * int(c["threads"]) > int(facts.get("cores", 1 << 20)),
    ),
    Rule(
        "expert_groups",
        "ep must divide tp, because experts live on the ranks of a tensor group",
        lambda c, facts: int(c["tp"]) % int(c["ep"]) != 0,
    ),
    Rule(
        "whole_groups",
        "each of tp ranks must get whole groups of a packed weight's inputs (16 at 8 bits, bits_group_size at 4)",
        _splits_a_group,
    ),
    Rule(
        "one_scale",
        "int8 activations with one scale a tensor need the whole tensor on one rank: tp must be 1",
        lambda c, facts: int(c["tp"]) > 1 and c.get("activations") == "int8_tensor",
    ),
    Rule(
        "captured",
        "CUDA graphs are captured on one device so far: tp and pp must be 1",
        lambda c, facts: c["graphs"] == "cuda" and int(c["tp"]) * int(c["pp"]) > 1,
    ),
    Rule("memory", "weights, cache and overhead must fit the memory", _overflows),
    Rule(
        "host_embedding",
        "a captured step cannot look tokens up on the host: embed_on must be device",
        lambda c, facts: c["graphs"] == "cuda" and c["embed_on"] == "cpu",
    ),
    Rule(
        "budget",
        "token_budget must be at least max_seqs, or a full batch cannot take one decode step",
        lambda c, facts: int(c["token_budget"]) < int(c["max_seqs"]),
    ),
    Rule(
        "long",
        "bits_long must be wider than the narrowest weight, or it changes nothing",
        lambda c, facts: bool(c.get("bits_long")) and int(c["bits_long"]) <= min(used(c)),
    ),
)

SPACE = Space(
    "native",
    (*ATTENTION, *BITS, *LAYOUT, *GRAPHS, *CACHE, *SCHEDULER),
    RULES,
    reference={"compute": "fp32", "kv_dtype": "fp32", "state_dtype": "fp32"},
)
