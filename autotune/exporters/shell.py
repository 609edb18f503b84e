"""The export as a shell script that serves it: environment, one command, the evidence as comments."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Any

from autotune.exporters.base import Export, ExportError
from autotune.runtimes.native.runtime import serve_command
from autotune.runtimes.server import llamacpp, sglang
from autotune.runtimes.server.vllm import arguments
from search_spaces import load

ENVIRONMENT = {"native": {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}}
"""What must be set before an engine's process starts, as it was when the configuration was measured."""


class Shell:
    """One file, `serve.sh`, for sh: nothing in an export can end a comment or a quoted word."""

    name = "shell"

    def render(self, export: Export) -> dict[str, str]:
        """See `Exporter`. Raises ExportError for a NUL character, which no command line can hold."""
        if export.engine == "vllm":
            words, environment = vllm_command(export)
        elif export.engine == "sglang":
            words, environment = _sglang(export), {}
        elif export.engine == "llamacpp":
            words, environment = _llamacpp(export)
        else:
            words = serve_command(export.folder, export.config, export.engine, export.kernels)
            environment = ENVIRONMENT.get(export.engine, {})
        if any("\0" in word for word in words):
            raise ExportError("a shell script cannot hold the NUL character in this export; use --to json")
        command = " \\\n  ".join([f"exec {words[0]} {words[1]}", *_lines(words[2:])])
        lines = ["#!/bin/sh", *(f"# {line}" for line in comments(export)), "set -eu"]
        lines += [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
        return {"serve.sh": "\n".join(lines) + "\n" + command + ' "$@"\n'}


def vllm_command(export: Export) -> tuple[list[str], dict[str, str]]:
    """vLLM's own command, with the longest sequence that it was measured with."""
    platform = "cpu" if "cpu" in str(export.engine_build.get("vllm", "")) else "gpu"
    knobs = {knob.name: knob for knob in load("vllm", platform).knobs}
    words, environment = arguments(export.config, knobs)
    if "max_model_len" not in export.config and "max_model_len" in export.effective:
        words += ["--max-model-len", str(export.effective["max_model_len"])]
    return ["vllm", "serve", export.folder, *words], environment


def _sglang(export: Export) -> list[str]:
    """SGLang's own command, with the longest sequence that it was measured with."""
    longest = export.effective.get("context_length") or export.workload.get("longest")
    if longest is None:
        raise ExportError("the measured configuration does not say its context_length; measure it again")
    return ["sglang", "serve", "--model-path", export.folder, *sglang.arguments(export.config, int(longest))]


def _llamacpp(export: Export) -> tuple[list[str], dict[str, str]]:
    """llama.cpp's own command on the GGUF file that was measured, with the context that its slots had."""
    facts = export.effective
    missing = [name for name in ("file", "ctx_slot", "cores") if name not in facts]
    if missing:
        raise ExportError(f"the measured configuration does not say its {missing[0]}; measure it again")
    longest, cores = int(facts["ctx_slot"]), int(facts["cores"])
    command = llamacpp.WHEEL if export.engine_build.get("server") == "xllamacpp" else ("llama-server",)
    words = llamacpp.arguments(export.config, str(facts["file"]), longest, cores)
    return [*command, *words], dict(llamacpp.ENVIRONMENT)


def _lines(words: Sequence[str]) -> list[str]:
    """Quoted words, each flag together with its value."""
    lines: list[str] = []
    for before, word in zip(["", *words], words, strict=False):
        follows = before.startswith("--") and not word.startswith("--")
        lines[-1:] = [f"{lines[-1]} {shlex.quote(word)}"] if follows else [*lines[-1:], shlex.quote(word)]
    return lines


def comments(export: Export) -> list[str]:
    """Where it comes from and what was measured, in lines of printable ASCII."""
    evidence = export.evidence
    ratio = evidence.ratio
    lines = [
        f"Written by autotune {_safe(export.autotune)} for {_safe(export.model.get('name'))} "
        f"on {_safe(export.hardware.get('label'))} ({_safe(export.hardware.get('key'))}).",
        f"Verdict: {_safe(evidence.verdict)}. The best finalist has {_safe(evidence.metric)} ×{ratio.mean:.3f} of the "
        f"default's (interval {ratio.low:.3f} to {ratio.high:.3f}, {ratio.n} blocks).",
        *(["So the default stays, and is what this runs."] if evidence.verdict != "better" else []),
        f"Workload {_safe(export.workload.get('name'))}, measured {_safe(evidence.measured_at)}, "
        f"round {_safe(evidence.round)}.",
    ]
    for name, value in sorted(evidence.metrics.items()):
        base = evidence.default_metrics.get(name)
        lines.append(f"  {_safe(name)} {value:.6g}" + (f" (default {base:.6g})" if base is not None else ""))
    return lines


def _safe(text: Any) -> str:
    """``text`` on one line of printable ASCII."""
    shown = text if isinstance(text, str) else json.dumps(text)
    return "".join(c if " " <= c <= "~" else c.encode("unicode_escape").decode() for c in shown)
