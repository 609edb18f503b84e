"""llama.cpp's server as an engine: the GGUF file of a configuration, arguments, read-back, scores.

Facts are of b11549.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
import psutil

from autotune.runtimes.base import Score
from autotune.runtimes.server import discover, failures
from autotune.runtimes.server.http import Dialect, HttpEndpoint
from autotune.runtimes.server.ready import HOST
from autotune.runtimes.server.runtime import Command
from search_spaces import Config, Space, Value, load
from search_spaces.llamacpp import GROUPS
from tuning_db.canonical import digest

WHEEL = ("python3", "-m", "autotune.runtimes.server.llama_serve")
"""The server of the `xllamacpp` wheel as a program."""
ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}
FINISH = {"limit": "length"}
WIDE = "f16"
"""The type of the layers that stay wide."""
LAYOUT = 1
"""Counts changes of what `gguf_file` writes for the same types."""
KEPT = 32
"""GGUF files that are kept; each has the size of the model at its widths."""
VERBOSE = 4
"""The level of its log that says what it runs."""
MOST_TOP = 4096
"""Most likely tokens asked for a position; a token beyond them counts as the least likely of them."""
LOGGED: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "file": (r"load_model: loading model '([^']+)'", str),
    "flash_attn": (r"llama_context: flash_attn\s+= (\w+)", lambda text: "on" if text == "enabled" else "off"),
    "batch_size": (r"llama_context: n_batch\s+= (\d+)", int),
    "ubatch_size": (r"llama_context: n_ubatch\s+= (\d+)", int),
    "parallel": (r"n_slots = (\d+)", int),
    "ctx_slot": (r"n_ctx_slot = (\d+)", int),
    "threads": (r"n_threads = (\d+)", int),
    "cache_type": (r"llama_kv_cache: size = .* K \((\w+)\)", str),
    "cache_ram": (r"prompt cache is enabled, size limit: (\d+) MiB", int),
    "mmap": (r"load_mode = (\w+)", lambda text: text == "mmap"),
    "weight_mib": (r"model buffer size\s*=\s*([\d.]+) MiB", float),
    "kv_mib": (r"llama_kv_cache: size =\s*([\d.]+) MiB", float),
    "state_mib": (r"llama_memory_recurrent: size =\s*([\d.]+) MiB", float),
    "compute_mib": (r"compute buffer size =\s*([\d.]+) MiB", float),
}
"""What its log says of a launch, with how each is read."""


def said(event: Mapping[str, Any], _: int) -> Mapping[str, Any]:
    """One event of `/completion` in the words of OpenAI's stream."""
    if "tokens" not in event:
        return event
    choice = {"token_ids": event["tokens"], "finish_reason": None}
    if not event["stop"]:
        return {"choices": [choice]}
    kind = event.get("stop_type")
    usage = {"prompt_tokens": event["tokens_evaluated"], "completion_tokens": event["tokens_predicted"]}
    return {"choices": [{**choice, "finish_reason": FINISH.get(str(kind), "stop")}], "usage": usage}


class LlamaEndpoint(HttpEndpoint):
    """Scores a text by asking for the next token after each prefix of it, which its slot still holds."""

    def _score(self, sequence: list[int], top: int) -> Score:
        rows = []
        for end in range(1, len(sequence)):
            body = {"prompt": sequence[:end], "max_tokens": 1, "temperature": 0, "n_probs": MOST_TOP,
                    "cache_prompt": True, "id_slot": 0}  # fmt: skip
            found = self._call("/completion", body)["completion_probabilities"][0]["top_logprobs"]
            rows.append([(int(entry["id"]), float(entry["logprob"])) for entry in found])
        width = min([top, *map(len, rows)])
        nexts = [dict(row).get(token, row[-1][1]) for row, token in zip(rows, sequence[1:], strict=True)]
        return Score(
            np.array(nexts, np.float32),
            np.array([[token for token, _ in row[:width]] for row in rows], np.int32).reshape(len(rows), width),
            np.array([[log for _, log in row[:width]] for row in rows], np.float32).reshape(len(rows), width),
        )

    def counters(self) -> Mapping[str, float]:
        found = super().counters()
        return {**found, "prefix_queries": found["prompt_tokens"] + found["prefix_hits"]}

    def reset(self) -> None:
        """Empty every slot. What `cache_ram` keeps of them stays: no request of the server empties it."""
        for slot in range(int(self.effective()["parallel"])):
            self._call(f"/slots/{slot}?action=erase", {})
        super().reset()


class LlamaCpp:
    """``folder`` is a `glm5_next` checkpoint; ``longest`` tokens is the longest sequence that a slot must take.

    ``files`` keeps a GGUF file for each of the last KEPT allocations of types that were asked for.
    """

    name = "llamacpp"
    endpoint = LlamaEndpoint
    dialect = Dialect(
        body={"return_tokens": True},
        counters={
            "prefix_hits": "llamacpp:prompt_tokens_cached_total",
            "prompt_tokens": "llamacpp:prompt_tokens_total",
            "generated": "llamacpp:tokens_predicted_total",
            "decode_steps": "llamacpp:n_decode_total",
        },
        complete="/completion",
        event=said,
    )

    def __init__(self, prefix: Sequence[str], folder: Path, longest: int, files: Path | None = None) -> None:
        self.prefix, self.folder, self.longest = tuple(prefix), folder, longest
        self.files = files or Path(platformdirs.user_cache_dir("autotune")) / "gguf"

    @cached_property
    def build(self) -> discover.Build:
        return discover.ask(self.prefix, ["--version"], ["--help"])

    @cached_property
    def weights(self) -> Mapping[str, Any]:
        from autotune import model

        return model.facts(self.folder).identity()

    def version(self) -> Mapping[str, str]:
        server = "xllamacpp" if self.prefix[1:] == WHEEL[1:] else "llama-server"
        return {"llamacpp": self.build.version, "help": self.build.digest, "server": server}

    @cached_property
    def cores(self) -> int:
        return psutil.cpu_count(logical=False) or 1

    def capabilities(self) -> Mapping[str, Any]:
        return {"platform": "cpu", "devices": 1, "cores": self.cores, "refused": {}}

    def offered(self, space: Space) -> Space:
        return discover.offered(self.build, space)

    def command(self, config: Config, port: int, model: str) -> Command:
        flags = {knob.name for knob in load(self.name).knobs if self.build.has(knob.flag)}
        taken = {name: value for name, value in config.items() if name in flags}
        words = arguments(taken, str(self.file(config)), self.longest, self.cores)
        words += ["--host", HOST, "--port", str(port)]
        if model:
            words += ["--alias", model, "--verbosity", str(VERBOSE), "--slot-save-path", tempfile.gettempdir()]
        return Command(tuple(words), ENVIRONMENT)

    def file(self, config: Mapping[str, Value]) -> Path:
        """The GGUF file of the configuration's types, written once. Raises EngineError where a type cannot be had."""
        from autotune.runtimes.native.config import read_config
        from autotune.runtimes.server import gguf_file

        last = read_config(self.folder).num_hidden_layers - int(config["wide_last"])
        first = int(config["wide_first"])
        parts = {name: config[name] for name in (*(f"type_{g}" for g in GROUPS), "wide_first", "wide_last")}
        file = self.files / f"{digest('gguf', [LAYOUT, self.weights, parts]).partition(':')[2]}.gguf"

        def pick(layer: int, group: str) -> str:
            wide = 0 <= layer < first or layer >= last
            return WIDE if wide and config[f"type_{group}"] != "f32" else str(config[f"type_{group}"])

        if file.exists():
            os.utime(file)
            return file
        self.files.mkdir(parents=True, exist_ok=True)
        try:
            gguf_file.write(self.folder, file, pick)
        except ValueError as error:
            raise failures.named("unsupported", str(error), "launch") from None
        for old in sorted(self.files.glob("*.gguf"), key=lambda path: path.stat().st_mtime)[:-KEPT]:
            old.unlink(missing_ok=True)
        return file

    def effective(self, endpoint: HttpEndpoint, log: str) -> Mapping[str, Any]:
        """What the log says that it runs, and the types that the served file really has."""
        from autotune.runtimes.server import gguf_file

        found = read_back(log, self.cores)
        types = gguf_file.types(Path(found["file"])) if "file" in found else {}
        for group in GROUPS:
            kinds = {kind for name, kind in types.items() if gguf_file.place(name)[1] == group}
            if len(kinds) == 1:
                found[f"type_{group}"] = kinds.pop()
        return found


def arguments(values: Mapping[str, Value], file: str, longest: int, cores: int) -> list[str]:
    """The server's arguments for ``values`` and a GGUF file; each slot takes ``longest`` tokens at least."""
    # Slots are cut to whole 256 tokens, and a context smaller than a step would cut the step short.
    context = max(int(values["parallel"]) * -(-longest // 256) * 256, int(values["batch_size"]))
    words = ["--model", file, "--ctx-size", str(context), "--metrics", "--fit", "off", "--no-warmup"]
    flags = {knob.name: knob.flag for knob in load("llamacpp").knobs if knob.flag}
    for name, flag in flags.items():
        value = values.get(name)
        if isinstance(value, bool):
            words.append(flag if value else discover.no(flag))
        elif value is not None:
            words += [flag, str(cores if name == "threads" and not value else value)]
        if name == "cache_type" and value is not None:  # this architecture takes one type for both
            words += ["--cache-type-v", str(value)]
    return words


def read_back(log: str, cores: int) -> dict[str, Any]:
    """Knobs and facts from the lines of a launch, under our names; as many threads as ``cores`` are 0."""
    found = {name: cast(values[-1]) for name, (pattern, cast) in LOGGED.items() if (values := re.findall(pattern, log))}
    found |= {"cores": cores, "cache_ram": found.get("cache_ram", 0)}
    if found.get("threads") == cores:
        found["threads"] = 0
    return found


def usual_command() -> tuple[str, ...]:
    """The server in the `xllamacpp` wheel where that is installed, else `llama-server`."""
    return (sys.executable, *WHEEL[1:]) if importlib.util.find_spec("xllamacpp") else ("llama-server",)
