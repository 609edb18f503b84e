"""Find, store and deploy the best serving configuration of a model on this hardware."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autotune.runtimes.native.llm import LLM as LLM

__version__ = "0.1.0"


def load(path: str) -> LLM:
    """The native engine in this process with exactly the configuration that `autotune export -o path` wrote.

    Raises `autotune.exporters.ExportError` when the file is not such an export or its model has changed.
    """
    from autotune.exporters.native import load_export

    return load_export(path)
