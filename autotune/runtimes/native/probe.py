"""What this machine and this build of torch cannot run, as ``{"knob=value": reason}``; decided by trying."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import torch

from autotune.runtimes.native.graphs import compiler
from autotune.runtimes.native.kernels.cpu import library as cpu
from autotune.runtimes.native.quant.linear import refusals


def probe() -> dict[str, Any]:
    """The facts that narrow the native space: device, cores, and ``refused`` values with their reasons."""
    cuda, cores = torch.cuda.is_available(), len(os.sched_getaffinity(0))
    if cuda:
        torch.set_default_device("cuda")
    devices = torch.cuda.device_count() if cuda else cores
    return {"devices": devices, "cuda": cuda, "cores": cores, "refused": refused()}


def refused() -> dict[str, str]:
    """The values that narrowing must remove here."""
    found: dict[str, str] = {}
    if find_spec("triton") is None:
        found["graphs=cuda"] = "a captured step needs the Triton expert kernel (pip install 'autotune[cuda]')"
    for name, reason in refusals().items():
        found[f"activations={name}"] = reason
    if compiler() is None:
        found["graphs=compiled"] = "torch.compile needs a C++ compiler (install g++)"
    if cpu.refusal():
        found["graphs=fused"] = cpu.refusal()
    return found
