"""The export as vLLM's own configuration file, for `vllm serve --config`: settings, and the evidence as comments."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Any

import yaml

from autotune.exporters.base import Export, ExportError
from autotune.exporters.shell import comments, vllm_command


class VllmYaml:
    """One file, `vllm.yaml`. Variables of the environment have no place in it, so a comment names them."""

    name = "vllm-yaml"

    def render(self, export: Export) -> dict[str, str]:
        """See `Exporter`. Raises ExportError for another engine's export."""
        if export.engine != "vllm":
            raise ExportError(f"this export is for engine {export.engine}, whose file vLLM cannot read; use --to shell")
        (_, _, folder, *words), environment = vllm_command(export)
        variables = "".join(f"{name}={shlex.quote(value)} " for name, value in environment.items())
        lines = [*comments(export), f"Start it with: {variables}vllm serve --config vllm.yaml"]
        table = {"model": folder, **settings(words)}
        text = yaml.safe_dump(table, sort_keys=False, allow_unicode=True, width=1 << 20)
        return {"vllm.yaml": "".join(f"# {line}\n" for line in lines) + text}


def settings(words: Sequence[str]) -> dict[str, Any]:
    """The arguments as settings: a switch is true or false, JSON is a table, and numbers are numbers."""
    found: dict[str, Any] = {}
    for number, word in enumerate(words):
        if not word.startswith("--"):
            continue
        value = words[number + 1] if number + 1 < len(words) and not words[number + 1].startswith("--") else None
        if value is None:
            found[word.removeprefix("--").removeprefix("no-")] = not word.startswith("--no-")
        else:
            found[word.removeprefix("--")] = _plain(value)
    return found


def _plain(text: str) -> Any:
    """A number or a table where ``text`` is one that is written back as the same text; else the text."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, dict) or (not isinstance(value, bool) and str(value) == text) else text
