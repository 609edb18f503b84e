"""Which backend runs each operator here, and why others do not. Knows what a backend needs, not what it computes."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from autotune.runtimes.native.config import ModelConfig

PACKAGE = "autotune.runtimes.native.kernels"
LATENT = ("absorbed", "sparse", "split_kv")
STORED = ("fp32", "bf16", "int8")
OPS = ("expanded", *LATENT, "choose", "kda_prefill", "kda_decode", "hyper")
TRITON = tuple(op for op in OPS if op != "choose")


@dataclass(frozen=True, slots=True)
class Capability:
    """What a choice of kernels depends on.

    ``sm`` is the CUDA compute capability, (0, 0) elsewhere; ``dtype`` the latent cache's; the widest head of the
    latent, expanded and linear attention are sizes in elements; ``triton``: it can be imported; ``interpreter``: it
    runs kernels on the CPU, element by element, for tests.
    """

    device: str
    sm: tuple[int, int]
    dtype: str
    latent: int
    head: int
    linear: int
    triton: bool
    interpreter: bool


def here(model: ModelConfig, dtype: str) -> Capability:
    """The capability of this process for a model and a cache type."""
    cuda = torch.cuda.is_available()
    return Capability(
        device="cuda" if cuda else "cpu",
        sm=torch.cuda.get_device_capability() if cuda else (0, 0),
        dtype=dtype,
        latent=model.kv_lora_rank,
        head=max(model.qk_nope_head_dim, model.v_head_dim),
        linear=model.linear_head_dim,
        triton=find_spec("triton") is not None,
        interpreter=os.environ.get("TRITON_INTERPRET") == "1",
    )


@dataclass(frozen=True, slots=True)
class Backend:
    """Implementations ``<package>.<op>.<name>``; ``refuse`` says why an op cannot run, or nothing."""

    name: str
    ops: tuple[str, ...]
    refuse: Callable[[str, Capability], str]

    def load(self, op: str) -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(importlib.import_module(f"{PACKAGE}.{op}.{self.name}"), op)
        return found


def _runs(at: Capability) -> str:
    """Why Triton runs nothing at all, or nothing."""
    if not at.triton:
        return "triton is not installed (pip install 'autotune[cuda]')"
    if at.device == "cpu" and not at.interpreter:
        return "Triton compiles for GPUs, and there is none here (TRITON_INTERPRET=1 interprets kernels, slowly)"
    if at.device == "cuda" and at.sm < (8, 0):
        return f"Triton needs compute capability 8.0, and this device has {at.sm[0]}.{at.sm[1]}"
    return ""


def products(at: Capability, compute: str) -> str:
    """Why packed weights and experts are not multiplied by Triton kernels, or nothing; ``compute`` is their type."""
    if at.interpreter and compute == "bf16":
        return "Triton's interpreter multiplies bf16 wrongly (use compute fp32)"
    return _runs(at)


def _triton(op: str, at: Capability) -> str:
    """Sizes are those at which a tile still fits the 163 KB of shared memory of compute capability 8.0."""
    if reason := _runs(at):
        return reason
    if op in LATENT and at.dtype not in STORED:
        return f"its kernels read latents of {', '.join(STORED)}, not of {at.dtype}"
    size, most = {"expanded": (at.head, 256), "hyper": (0, 0)}.get(op, (at.linear, 128))
    if op in LATENT:
        size, most = at.latent, 512
    return f"heads of {size} do not fit its tiles, which end at {most}" if size > most else ""


BACKENDS = (
    Backend("triton", TRITON, _triton),
    Backend("reference", OPS, lambda op, at: ""),
)
"""In order of preference."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """A function for each op, the name of its backend, and ``<op>=<backend>`` → why that backend was not taken."""

    functions: Mapping[str, Callable[..., Any]]
    backends: Mapping[str, str]
    refusals: Mapping[str, str]

    def replaced(self, functions: Mapping[str, Callable[..., Any]], name: str) -> Chosen:
        """With ``functions`` under the backend ``name`` for those of their ops that the reference would run."""
        taken = [op for op in functions if self.backends[op] == "reference"]
        return Chosen(
            {**self.functions, **{op: functions[op] for op in taken}},
            {**self.backends, **dict.fromkeys(taken, name)},
            {**self.refusals, **{f"{op}=reference": f"graphs={name} runs it" for op in taken}},
        )


def choose(at: Capability, backends: tuple[Backend, ...] = BACKENDS) -> Chosen:
    """The first backend of each op that does not refuse."""
    functions: dict[str, Callable[..., Any]] = {}
    names: dict[str, str] = {}
    refusals: dict[str, str] = {}
    for op in dict.fromkeys(op for backend in backends for op in backend.ops):
        for backend in backends:
            reason = f"{names[op]} comes first" if op in names else backend.refuse(op, at)
            if op not in backend.ops:
                reason = f"{backend.name} has no kernel of it"
            if reason:
                refusals[f"{op}={backend.name}"] = reason
            else:
                functions[op], names[op] = backend.load(op), backend.name
    return Chosen(functions, names, refusals)
