"""Runs the Triton kernels in Triton's interpreter: on CPU tensors, in fp32 and fp16 (its bf16 products are garbage)."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

import autotune.runtimes.native.kernels as package

SWITCH = "TRITON_INTERPRET"


def _interpreted() -> None:
    """Triton looks at the variable when it decorates a function, those of its own library included."""
    assert "triton" not in sys.modules, "triton was imported before its interpreter was asked for"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SWITCH, "1")
        for path in sorted(Path(package.__path__[0]).glob("*/triton.py")):
            importlib.import_module(f"{package.__name__}.{path.parent.name}.triton")


_interpreted()


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """And again at some calls; between tests it is unset, so that no engine that another test starts inherits it."""
    monkeypatch.setenv(SWITCH, "1")


@pytest.fixture(autouse=True)
def _interpreted_where_kernels_are_called(request: pytest.FixtureRequest) -> None:
    """In the test modules that import one."""
    names = [str(getattr(value, "__name__", "")) for value in vars(request.module).values()]
    if any(name.startswith(package.__name__) and name.endswith(".triton") for name in names):
        request.getfixturevalue("interpreted")
