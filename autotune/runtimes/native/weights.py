"""Tensors of a checkpoint by their names, from safetensors only. Knows nothing of what they are for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from autotune.runtimes.native.config import CheckpointError

PREFIXES = ("model.language_model.", "model.", "language_model.model.", "")


class Checkpoint:
    """The safetensors files of one folder, mapped into memory. A context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, Any] = {}
        self._where: dict[str, str] = {}
        for name in self._names(folder):
            path = folder / name
            try:
                self._files[name] = safe_open(str(path), framework="pt")
                self._where |= dict.fromkeys(self._files[name].keys(), name)
            except FileNotFoundError:
                raise CheckpointError(f"{path} is missing, though the index names it; download it again") from None
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} is damaged or cut off ({error}); download it again") from None
        self._prefix = next((p for p in PREFIXES if f"{p}embed_tokens.weight" in self._where), None)
        if self._prefix is None:
            raise CheckpointError(f"{folder}: no tensor is called embed_tokens.weight; is this a glm5_next checkpoint?")

    @staticmethod
    def _names(folder: Path) -> list[str]:
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            try:
                names = sorted({str(name) for name in json.loads(index.read_text())["weight_map"].values()})
            except (OSError, ValueError, KeyError, AttributeError, TypeError):
                raise CheckpointError(f"{index} is no safetensors index; download it again") from None
            wrong = next((n for n in names if Path(n).name != n or not n.endswith(".safetensors")), None)
            if wrong is not None:
                raise CheckpointError(f"{index} names {wrong!r}, which is no .safetensors file of this folder")
            return names
        names = sorted(path.name for path in folder.glob("*.safetensors"))
        if not names:
            raise CheckpointError(f"{folder} holds no .safetensors file; pickled weights are never loaded")
        return names

    def tensor(self, name: str, shape: tuple[int, ...], rows: slice | None = None) -> Tensor:
        """The tensor ``name`` (without the model's prefix), or only ``rows`` of it, in fp32.

        Raises CheckpointError unless the whole has ``shape``.
        """
        full = name if name == "lm_head.weight" else f"{self._prefix}{name}"
        if full not in self._where:
            raise CheckpointError(f"{self.folder}: tensor {full} is missing; the checkpoint is incomplete")
        try:
            stored = self._files[self._where[full]].get_slice(full)
            has = list(stored.get_shape())
            if has != list(shape):
                raise CheckpointError(f"{self.folder}: tensor {full} has shape {has}, config.json says {list(shape)}")
            found: Tensor = stored[rows if rows is not None and shape else ...]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.folder / self._where[full]}: cannot read {full} ({error})") from None
        if not found.dtype.is_floating_point:
            raise CheckpointError(f"{self.folder}: tensor {full} is {found.dtype}; only plain checkpoints are loaded")
        return found.to(torch.get_default_device(), torch.float32)
