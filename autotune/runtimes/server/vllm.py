"""vLLM and its forks as a server: flags, read-back of what runs, counters. Written against 0.32–0.33."""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from autotune.runtimes.server import discover
from autotune.runtimes.server.http import Dialect, HttpEndpoint
from autotune.runtimes.server.ready import HOST
from autotune.runtimes.server.runtime import Command
from search_spaces import Config, Knob, Space, SpaceError, Value
from search_spaces.vllm import FORK

DIALECT = Dialect(
    body={"return_token_ids": True},
    counters={
        "prefix_hits": "vllm:prefix_cache_hits_total",
        "prefix_queries": "vllm:prefix_cache_queries_total",
        "preemptions": "vllm:num_preemptions_total",
        "generated": "vllm:generation_tokens_total",
        "prompt_tokens": "vllm:prompt_tokens_total",
        "drafted": "vllm:spec_decode_num_draft_tokens_total",
        "accepted": "vllm:spec_decode_num_accepted_tokens_total",
        "kv_usage": "vllm:kv_cache_usage_perc",
    },
    gauges=frozenset({"kv_usage"}),
    reset="/reset_prefix_cache",
)
ENVIRONMENT: Mapping[str, str] = {
    "VLLM_SERVER_DEV_MODE": "1",  # /server_info and /reset_prefix_cache
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",  # it serves a folder
}
READ: Mapping[str, str] = {
    "max_num_seqs": "scheduler_config.max_num_seqs",
    "max_num_batched_tokens": "scheduler_config.max_num_batched_tokens",
    "chunked_prefill": "scheduler_config.enable_chunked_prefill",
    "long_prefill": "scheduler_config.long_prefill_token_threshold",
    "async_scheduling": "scheduler_config.async_scheduling",
    "prefix_caching": "cache_config.enable_prefix_caching",
    "block_size": "cache_config.block_size",
    "kv_cache_dtype": "cache_config.cache_dtype",
    "kv_cache_mib": "cache_config.kv_cache_memory_bytes",
    "gmu": "cache_config.gpu_memory_utilization",
    "ssm_dtype": "cache_config.mamba_ssm_cache_dtype",
    "enforce_eager": "model_config.enforce_eager",
    "dtype": "model_config.dtype",
    "max_model_len": "model_config.max_model_len",
    "tp": "parallel_config.tensor_parallel_size",
    "pp": "parallel_config.pipeline_parallel_size",
    "dp": "parallel_config.data_parallel_size",
    "ep": "parallel_config.enable_expert_parallel",
    "dcp": "parallel_config.decode_context_parallel_size",
    "attention_backend": "attention_config.backend",
    "prefill_workspace_factor": "attention_config.sparse_mla_prefill_workspace_factor",
    "cudagraph_mode": "compilation_config.cudagraph_mode",
    "max_capture_size": "compilation_config.max_cudagraph_capture_size",
    "moe_backend": "kernel_config.moe_backend",
    "spec_method": "speculative_config.method",
    "spec_k": "speculative_config.num_speculative_tokens",
}
"""Where `/server_info` has each knob."""
MODES: Mapping[str, str] = {
    "0": "NONE", "1": "PIECEWISE", "2": "FULL", "[2, 0]": "FULL_DECODE_ONLY", "[2, 1]": "FULL_AND_PIECEWISE",
}  # fmt: skip
LOGGED: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "attention_backend": (r"Using (?:AttentionBackendEnum\.)?(\w+) (?:attention )?backend(?: out of|\.|$)", str),
    "kv_tokens": (r"KV cache size: ([\d,]+) tokens", lambda text: int(text.replace(",", ""))),
    "weight_gib": (r"Model loading took ([\d.]+) Gi", float),
    "kv_gib": (r"Available KV cache memory: (-?[\d.]+) Gi", float),
    "graph_gib": (r"Graph capturing finished in [\d.]+ secs?, took (-?[\d.]+) Gi", float),
    "aligned_block": (r"Setting attention block size to (\d+) tokens", int),
    "padded_pages": (r"Padding mamba page size by ([\d.]+)%", float),
    "kernel_table": (r"Using configuration from (\S+) for", lambda text: Path(text).name),
    "no_kernel_table": (r"Using default (MoE|W8A8 Block FP8 kernel) config", str),
    "skipped_graphs": (r"(Skipping CUDA graph capture)", str),
}
"""Facts that only the log has, with how each is read."""


class VLLM:
    """``folder`` is what it serves; ``longest`` tokens is the longest sequence that it must take."""

    name = "vllm"
    dialect = DIALECT
    endpoint = HttpEndpoint

    def __init__(self, prefix: Sequence[str], folder: Path, longest: int) -> None:
        self.prefix, self.folder, self.longest = tuple(prefix), folder, longest

    @cached_property
    def build(self) -> discover.Build:
        return discover.ask(self.prefix, ["--version"], ["serve", "--help=all"])

    def version(self) -> Mapping[str, str]:
        return {"vllm": self.build.version, "help": self.build.digest}

    def capabilities(self) -> Mapping[str, Any]:
        cpu = "cpu" in self.build.version
        return {
            "platform": "cpu" if cpu else "gpu",
            "devices": 1,
            "cores": psutil.cpu_count(logical=False) or 1,
            "cpu_flags": _cpu_flags(),
            "max_model_len": self.longest,
            "refused": {},
        }

    def offered(self, space: Space) -> Space:
        return discover.offered(self.build, space)

    def command(self, config: Config, port: int, model: str) -> Command:
        from search_spaces import load

        space = load(self.name, str(self.capabilities()["platform"]))
        knobs = {knob.name: knob for knob in space.knobs}
        words, environment = arguments({k: v for k, v in config.items() if self._takes(knobs[k])}, knobs)
        if "max_model_len" not in config:
            words += ["--max-model-len", str(self.longest)]
        if model:
            words += ["--served-model-name", model, "--max-logprobs", "-1"]
        argv = ("serve", str(self.folder), "--host", HOST, "--port", str(port), *words)
        return Command(argv, {**(ENVIRONMENT if model else {}), **environment})

    def _takes(self, knob: Knob) -> bool:
        flag = knob.flag.split(" ")[0]
        return not flag.startswith("--") or flag == "--model" or self.build.has(flag)

    def effective(self, endpoint: HttpEndpoint, log: str) -> Mapping[str, Any]:
        """Every knob that the server reports, under our name, and facts of memory, backend and graphs.

        A build without `/server_info` says them in its log: what it was given, and what it made of it.
        """
        info = endpoint.told("/server_info?config_format=json")
        return read_back(info.get("vllm_config", {}) if info else logged_config(log), log)


def arguments(values: Mapping[str, Value], knobs: Mapping[str, Knob]) -> tuple[list[str], dict[str, str]]:
    """Flags and environment of ``values``. A flag of two words is one key of a JSON flag; one in capitals a variable.

    0 for a size means the engine's own choice, which is made by not passing it.
    """
    words: list[str] = []
    tables: dict[str, dict[str, Any]] = {}
    environment: dict[str, str] = {}
    for name, value in values.items():
        flag, _, key = knobs[name].flag.partition(" ")
        if name in SPECIAL:
            more, variables = SPECIAL[name](value)
            words += more
            environment |= variables
        elif not flag.startswith("--"):
            environment |= {flag: str(int(value)) if isinstance(value, bool) else str(value)}
        elif key:
            tables.setdefault(flag, {})[key] = value
        elif isinstance(value, bool):
            words.append(flag if value else discover.no(flag))
        else:
            words += [flag, str(value)]
    _speculation(tables, values)
    if values.get("attention_backend") == FORK:  # without it the forks' backend refuses this model
        tables.setdefault("--attention-config", {})["sparse_mla_force_mqa"] = True
    for flag, table in tables.items():
        words += [flag, json.dumps(table, sort_keys=True)]
    return words, environment


def _speculation(tables: dict[str, dict[str, Any]], values: Mapping[str, Value]) -> None:
    """No table where nobody drafts; a draft length by batch as ranges: all of it alone, two tokens in company."""
    table = tables.get("--speculative-config", {})
    if table.get("method") == "none":
        del tables["--speculative-config"]
    elif table.pop("num_speculative_tokens_per_batch_size", False):
        ranges = [[1, 1, values["spec_k"]], [2, values["max_num_seqs"], 2]]
        table["num_speculative_tokens_per_batch_size"] = ranges


Special = Callable[[Value], tuple[list[str], dict[str, str]]]


def _unless_zero(flag: str) -> Special:
    return lambda value: ([flag, str(value)] if value else [], {})


def _zero_alone(name: str, why: str) -> Special:
    """For a knob that cannot be passed yet: 0 means that it is not there, and anything else is refused, not ignored."""

    def refuse(value: Value) -> tuple[list[str], dict[str, str]]:
        if value:
            raise SpaceError(f"{name}={value} cannot be passed to vLLM: {why}; pin it to 0 in the plan's [knobs]")
        return [], {}

    return refuse


SPECIAL: Mapping[str, Special] = {
    "checkpoint": lambda value: ([], {}),  # the served folder itself
    "kv_cache_mib": lambda value: (["--kv-cache-memory-bytes", str(int(value) << 20)], {}),
    "block_size": _unless_zero("--block-size"),
    "long_prefill": _unless_zero("--long-prefill-token-threshold"),
    "kv_cap": _zero_alone("kv_cap", "vLLM counts it in blocks, whose size is known only once it runs"),
    "pp_last_fewer": _zero_alone("pp_last_fewer", "it needs the number of layers of each stage"),
    "allreduce": lambda value: (["--disable-custom-all-reduce"] if value == "nccl" else [], {}),
    "shared_expert_stream": lambda value: ([], {} if value else {"VLLM_DISABLE_SHARED_EXPERTS_STREAM": "1"}),
    "nccl_ring": lambda value: ([], {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"} if value else {}),
    "marlin_input": lambda value: ([], {} if value == "none" else {"VLLM_MARLIN_INPUT_DTYPE": str(value)}),
}


LISTED: Mapping[str, str] = {
    "dtype": "model_config.dtype",
    "max_seq_len": "model_config.max_model_len",
    "enforce_eager": "model_config.enforce_eager",
    "tensor_parallel_size": "parallel_config.tensor_parallel_size",
    "pipeline_parallel_size": "parallel_config.pipeline_parallel_size",
    "data_parallel_size": "parallel_config.data_parallel_size",
    "kv_cache_dtype": "cache_config.cache_dtype",
    "enable_prefix_caching": "cache_config.enable_prefix_caching",
    "enable_chunked_prefill": "scheduler_config.enable_chunked_prefill",
}
"""Settings of the line with which the engine starts, and where `/server_info` would have them."""


def logged_config(log: str) -> dict[str, Any]:
    """As much of a ``vllm_config`` as the engine's first line and its list of arguments hold."""
    found: dict[str, Any] = {}
    given = re.search(r"non-default args: (\{.*\})", log)
    begun = re.search(r"Initializing a V1 LLM engine .*? with config: (.*)", log)
    values: dict[str, Any] = {}
    with contextlib.suppress(ValueError, SyntaxError):  # an option may be an object, which is no literal
        values = ast.literal_eval(given.group(1)) if given else {}
    options = {path.rpartition(".")[2]: path for path in READ.values()}
    named = {path: values[name] for name, path in options.items() if name in values}
    for name, text in re.findall(r"(\w+)=([^,\s]+)", begun.group(1)) if begun else []:
        if name in LISTED:
            named[LISTED[name]] = {"True": True, "False": False}.get(text, int(text) if text.isdigit() else text)
    for path, value in named.items():
        part, _, key = path.partition(".")
        found.setdefault(part, {})[key] = value
    return found


def read_back(config: Mapping[str, Any], log: str) -> dict[str, Any]:
    """Knobs and facts from `/server_info`'s ``vllm_config`` and from the log's lines."""
    found = {name: cast(text) for name, (pattern, cast) in LOGGED.items() if (text := _last(pattern, log))}
    for name, path in READ.items():
        value = _at(config, path)
        if value is not None:
            found[name] = value
    if "kv_cache_mib" in found:
        found["kv_cache_mib"] = int(found["kv_cache_mib"]) >> 20
    if "dtype" in found:
        found["dtype"] = str(found["dtype"]).removeprefix("torch.")
    if "cudagraph_mode" in found:
        mode = found["cudagraph_mode"]
        found["cudagraph_mode"] = MODES.get(json.dumps(mode), str(mode).removeprefix("CUDAGraphMode."))
    blocks, size = _at(config, "cache_config.num_gpu_blocks"), _at(config, "cache_config.block_size")
    if blocks is not None and size is not None:
        found |= {"kv_blocks": int(blocks)}
        found.setdefault("kv_tokens", int(blocks) * int(size))
    return found


def _last(pattern: str, log: str) -> str:
    found = re.findall(pattern, log)
    return str(found[-1]) if found else ""


def _at(config: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path; None where any part is missing."""
    value: Any = config
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _cpu_flags() -> tuple[str, ...]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ()
    line = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return tuple(line.group(1).split()) if line else ()
