"""What the device checks and the timings call is right: every case of every operator in the interpreter, ragged."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.runtimes.native import kernels

ROOT = Path(__file__).parents[5]


@pytest.fixture(scope="module")
def module() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        yield importlib.import_module("kernel_cases")
    sys.modules.pop("kernel_cases")


@pytest.mark.usefixtures("interpreted")
def test_every_case_of_every_operator_agrees_with_its_reference(module: Any) -> None:
    ops = set()
    for case in module.every(module.SMALL, torch.float32, "cpu"):
        ops.add(case.op)
        found, wanted = case.run("triton"), case.run("reference")
        for one, other in zip(found, wanted, strict=True):
            assert (one - other).abs().max() <= case.close * other.abs().max(), f"{case.op} {case.label}"
        assert case.nbytes > 0
    assert ops == {path.parent.name for path in Path(kernels.__path__[0]).glob("*/triton.py")}
