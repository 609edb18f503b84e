"""Turns a decided configuration into deployment files, and reads them back. Measures and decides nothing."""

from __future__ import annotations

from autotune.exporters.base import Evidence, Export, Exporter, ExportError

__all__ = ["Evidence", "Export", "ExportError", "Exporter", "exporter"]

NAMES = ("json", "shell", "vllm-yaml")


def exporter(name: str) -> Exporter:
    """The exporter of a name. Raises ExportError for an unknown one."""
    from autotune.exporters.json_file import JsonFile
    from autotune.exporters.shell import Shell
    from autotune.exporters.vllm_yaml import VllmYaml

    found: dict[str, Exporter] = {"json": JsonFile(), "shell": Shell(), "vllm-yaml": VllmYaml()}
    if name not in found:
        raise ExportError(f"there is no exporter {name!r}; --to takes {', '.join(NAMES)}")
    return found[name]
