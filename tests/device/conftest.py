"""Skips what needs a GPU where there is none, and says so."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch


def _missing() -> str:
    if not torch.cuda.is_available():
        return "no CUDA device: torch.cuda.is_available() is false"
    if torch.cuda.get_device_capability() < (8, 0):
        return f"compute capability {torch.cuda.get_device_capability()} is below 8.0"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _missing()
    for item in items:
        if "device" in item.path.parts:
            item.add_marker(pytest.mark.device)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def cases() -> Iterator[Any]:
    """The module `scripts/kernel_cases.py`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
        yield importlib.import_module("kernel_cases")
    sys.modules.pop("kernel_cases")


@pytest.fixture(autouse=True)
def _on_device() -> Iterator[None]:
    """Products of fp32 references in fp32, and tensors made on the device, as an engine makes them."""
    torch.set_default_device("cuda")
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.set_default_device(None)
    torch.cuda.empty_cache()
