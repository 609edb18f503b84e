"""SGLang as a server: arguments, read-back, streams and scores of its own `/generate`. Written against 0.5.23; it has
not run here: its builds are for GPUs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from autotune.runtimes.base import Generation, Score
from autotune.runtimes.server import discover
from autotune.runtimes.server.http import Dialect, HttpEndpoint
from autotune.runtimes.server.ready import HOST
from autotune.runtimes.server.runtime import Command
from search_spaces import Config, Space, Value, load

SWITCHES: Mapping[str, bool] = {
    "--disable-cuda-graph": False, "--disable-radix-cache": False, "--disable-overlap-schedule": False,
    "--enable-torch-compile": True,
}  # fmt: skip
"""Flags without a value, and the value of their knob that they stand for."""
INFO = ("/server_info", "/get_server_info")
READ: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "cuda_graph": ("disable_cuda_graph", lambda off: not off),
    "radix_cache": ("disable_radix_cache", lambda off: not off),
    "overlap_schedule": ("disable_overlap_schedule", lambda off: not off),
    "torch_compile": ("enable_torch_compile", bool),
    "quantization": ("quantization", lambda name: name or "none"),
    "speculative_algorithm": ("speculative_algorithm", lambda name: name or "none"),
}
"""What `/server_info` calls a knob otherwise than we do; all else has the flag's own name there."""
LOGGED: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "kv_tokens": (r"max_total_num_tokens=(\d+)", int),
    "weight_gib": (r"Load weight end\..*mem usage=([\d.]+) GB", float),
    "graph_gib": (r"Capture cuda graph end\..*mem usage=([\d.]+) GB", float),
}


def requested(g: Generation, model: str) -> dict[str, Any]:
    """The body of `/generate`."""
    sampling = {"max_new_tokens": g.max_tokens, "temperature": g.temperature, "ignore_eos": g.ignore_eos}
    return {"input_ids": list(g.prompt), "sampling_params": sampling, "stream": True}


def said(event: Mapping[str, Any], tokens: int) -> Mapping[str, Any]:
    """One event of `/generate` in the words of OpenAI's stream; it holds all ids so far, or the new ones alone."""
    about = event.get("meta_info")
    if about is None:
        return event
    new = int(about["completion_tokens"]) - tokens
    ended = about.get("finish_reason")
    ids = list(event.get("output_ids") or ())[-new:] if new else []
    usage = {"prompt_tokens": about["prompt_tokens"], "completion_tokens": about["completion_tokens"]}
    return {"choices": [{"token_ids": ids, "finish_reason": ended and ended["type"]}], "usage": usage}


class SglangEndpoint(HttpEndpoint):
    """Scores a prompt by its log-probabilities, which the server gives for every position."""

    def _score(self, sequence: list[int], top: int) -> Score:
        body = {"input_ids": sequence, "sampling_params": {"max_new_tokens": 1, "temperature": 0},
                "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": top}  # fmt: skip
        about = self._call("/generate", body)["meta_info"]
        rows = [[(int(token), float(log)) for log, token, *_ in row] for row in about["input_top_logprobs"][1:]]
        actual = [float(log) for log, *_ in about["input_token_logprobs"][1:]]
        width = min([top, *map(len, rows)])
        return Score(
            np.array(actual, np.float32),
            np.array([[token for token, _ in row[:width]] for row in rows], np.int32).reshape(len(rows), width),
            np.array([[log for _, log in row[:width]] for row in rows], np.float32).reshape(len(rows), width),
        )


class Sglang:
    """``folder`` is what it serves; ``longest`` tokens is the longest sequence that it must take."""

    name = "sglang"
    endpoint = SglangEndpoint
    dialect = Dialect(
        counters={
            "prompt_tokens": "sglang:prompt_tokens_total",
            "generated": "sglang:generation_tokens_total",
            "prefix_hits": "sglang:cached_tokens_total",
            "preemptions": "sglang:num_retracted_requests_total",
            "kv_usage": "sglang:token_usage",
        },
        gauges=frozenset({"kv_usage"}),
        reset="/flush_cache",
        complete="/generate",
        request=requested,
        event=said,
    )

    def __init__(self, prefix: Sequence[str], folder: Path, longest: int) -> None:
        self.prefix, self.folder, self.longest = tuple(prefix), folder, longest

    @cached_property
    def build(self) -> discover.Build:
        return discover.ask(self.prefix, ["version"], ["serve", "--help"])

    def version(self) -> Mapping[str, str]:
        return {"sglang": self.build.version, "help": self.build.digest}

    def capabilities(self) -> Mapping[str, Any]:
        return {"platform": "gpu", "devices": 1, "refused": {}}

    def offered(self, space: Space) -> Space:
        return discover.offered(self.build, space)

    def command(self, config: Config, port: int, model: str) -> Command:
        words = arguments(config, self.longest)
        words += ["--served-model-name", model, "--enable-metrics"] if model else []
        argv = ("serve", "--model-path", str(self.folder), "--host", HOST, "--port", str(port), *words)
        return Command(argv, {"HF_HUB_OFFLINE": "1"} if model else {})

    def effective(self, endpoint: HttpEndpoint, log: str) -> Mapping[str, Any]:
        return read_back(endpoint.told(*INFO) or {}, log)


def arguments(values: Mapping[str, Value], longest: int) -> list[str]:
    """The server's arguments for ``values``; none stands for the engine's own choice."""
    flags = {knob.name: knob.flag for knob in load("sglang").knobs}
    words = ["--context-length", str(longest)]
    for name, value in values.items():
        flag = flags[name]
        if flag in SWITCHES:
            words += [flag] if value == SWITCHES[flag] else []
        elif value != "none":
            words += [flag, str(value)]
    return words


def read_back(info: Mapping[str, Any], log: str) -> dict[str, Any]:
    """Knobs and facts from the server's own settings and from its log."""
    found = {name: cast(values[-1]) for name, (pattern, cast) in LOGGED.items() if (values := re.findall(pattern, log))}
    for knob in load("sglang").knobs:
        key, cast = READ.get(knob.name, (knob.name, lambda value: value))
        if key in info and (info[key] is not None or knob.name in READ):
            found[knob.name] = cast(info[key])
    facts = {"kv_tokens": info.get("max_total_num_tokens"), "context_length": info.get("context_length")}
    return found | {name: int(value) for name, value in facts.items() if value is not None}
