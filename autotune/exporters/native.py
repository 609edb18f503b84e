"""Runs an export on the native engine in this process, and vouches that it runs exactly what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune import model as models
from autotune.exporters import json_file
from autotune.exporters.base import Export, ExportError
from autotune.exporters.gather import plain

if TYPE_CHECKING:
    from autotune.runtimes.native.llm import LLM


def load_export(path: str | Path, model: str | Path | None = None) -> LLM:
    """The engine with the configuration of the export in ``path``.

    ``model`` is where the checkpoint lies now, when it has moved. Raises ExportError when the file is no such export,
    the checkpoint is not the measured one, or the engine here would run something else.
    """
    return launch(json_file.read(Path(path)), model)


def launch(export: Export, model: str | Path | None = None) -> LLM:
    """Start an export; see `load_export`."""
    if export.engine != "native":
        raise ExportError(
            f"this export is for engine {export.engine}, and only native ones run in Python; "
            "start its own server with `autotune export --to shell`"
        )
    folder = check_model(export, Path(model) if model is not None else Path(export.folder))
    from autotune.runtimes.native.llm import LLM

    llm = LLM(folder, export.config, export.kernels)
    try:
        check_effective(export, llm.effective())
    except BaseException:
        llm.close()
        raise
    return llm


def check_model(export: Export, folder: Path) -> Path:
    """``folder`` if the checkpoint in it is the one that was measured. Raises ExportError, or ModelError."""
    if not folder.is_dir():
        raise ExportError(f"the model of this export is not in {folder}; give its folder with --model")
    wanted, found = plain(export.model), plain(models.facts(folder).identity())
    differing = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    if differing:
        raise ExportError(
            f"the model in {folder} is not the measured one ({', '.join(differing)} differ); give the right folder "
            "with --model, or tune this one with `autotune search --model`"
        )
    return folder


def check_effective(export: Export, effective: Mapping[str, Any]) -> None:
    """Raise ExportError unless the engine runs the configuration, and all else that it reported when measured."""
    found, measured = plain(effective), plain(export.effective)
    asked = {name: value for name, value in plain(export.config).items() if name in found}
    wrong = {name: value for name, value in asked.items() if found[name] != value}
    if measured:
        names = measured.keys() | found.keys()
        wrong |= {name: measured.get(name) for name in names if found.get(name) != measured.get(name)}
    if wrong:
        parts = [f"{name} is {found.get(name)!r} instead of {wrong[name]!r}" for name in sorted(wrong)[:5]]
        raise ExportError(
            f"the engine here does not run what was measured on {export.hardware.get('label')}: {'; '.join(parts)}"
            "; find what is best here with `autotune search`"
        )
