"""What this machine and this build of torch cannot run, as ``{"knob=value": reason}``; decided by trying."""

from __future__ import annotations

import os
from typing import Any

import torch

from autotune.runtimes.native.graphs import compiler
from autotune.runtimes.native.quant.linear import refusals
from search_spaces.bits import LAYER_GROUPS, MODEL_GROUPS


def probe() -> dict[str, Any]:
    """The facts that narrow the native space: device, cores, and ``refused`` values with their reasons."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.set_default_device("cuda")
    return {"devices": 1, "cuda": cuda, "cores": len(os.sched_getaffinity(0)), "refused": refused()}


def refused() -> dict[str, str]:
    """The values that narrowing must remove here."""
    found: dict[str, str] = {"graphs=cuda": "the engine does not capture CUDA graphs yet"}
    for name, reason in refusals().items():
        if name in ("int8_both", "int8_token"):
            found[f"activations={name.replace('both', 'tensor')}"] = reason
        else:
            groups = [g for g in (*LAYER_GROUPS, *MODEL_GROUPS) if g != "embedding"]
            found |= {f"bits_{group}={name}": reason for group in groups}
    if compiler() is None:
        found["graphs=compiled"] = "torch.compile needs a C++ compiler (install g++)"
    return found
