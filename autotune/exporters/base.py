"""What an export says, and what an exporter is. Knows no file format and no engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from autotune.stats import Interval
from search_spaces import Value


class ExportError(ValueError):
    """An export that cannot be made, read or obeyed; the message says what, where, and the next thing to type."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """The confirmation behind a configuration.

    ``verdict`` and ``ratio`` compare the best finalist with the default: how many times better its ``metric`` is, with
    the interval over ``ratio.n`` paired blocks. Unless the verdict is ``better``, the exported configuration is the
    default itself. ``metrics`` and ``default_metrics`` are means over the confirming ``trials``; ``measured_at`` is
    when the last of them ended, ISO 8601 in UTC.
    """

    verdict: str
    metric: str
    better: str
    ratio: Interval
    metrics: Mapping[str, float]
    default_metrics: Mapping[str, float]
    blocks: int
    trials: tuple[str, ...]
    round: str
    measured_at: str


@dataclass(frozen=True, slots=True)
class Export:
    """One configuration to deploy, for which model and machine it was chosen, and why.

    ``model`` is the checkpoint's identity as the database knows it (name, shape, digests) and ``folder`` is where it
    lay; ``hardware`` has ``key``, ``label``, ``kind`` and ``facts``; ``effective`` is what the engine said it ran;
    ``kernels`` are the tuned kernels that it ran with, by operator.
    """

    engine: str
    engine_build: Mapping[str, Any]
    model: Mapping[str, Any]
    folder: str
    hardware: Mapping[str, Any]
    workload: Mapping[str, Any]
    objective: Mapping[str, Any]
    config: Mapping[str, Value]
    effective: Mapping[str, Any]
    evidence: Evidence
    autotune: str
    kernels: Mapping[str, Any] = field(default_factory=dict)

    def at(self, folder: Path) -> Export:
        """The same export for a checkpoint that lies in another folder."""
        return replace(self, folder=str(folder))


class Exporter(Protocol):
    """Renders an export as files. Pure: it reads and writes nothing, and the same export gives the same text."""

    name: str

    def render(self, export: Export) -> dict[str, str]:
        """File name to text, the main file first. Raises ExportError for what its format cannot say."""
