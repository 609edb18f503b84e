"""What this machine and this build of torch cannot run, as ``{"knob=value": reason}``; decided by trying."""

from __future__ import annotations

from autotune.runtimes.native.graphs import compiler
from autotune.runtimes.native.quant.linear import refusals
from search_spaces.bits import LAYER_GROUPS, MODEL_GROUPS


def refused() -> dict[str, str]:
    """The values that narrowing must remove here."""
    found: dict[str, str] = {}
    for name, reason in refusals().items():
        if name == "int8_both":
            found["activations=int8_tensor"] = reason
        else:
            groups = [g for g in (*LAYER_GROUPS, *MODEL_GROUPS) if g != "embedding"]
            found |= {f"bits_{group}={name}": reason for group in groups}
    if compiler() is None:
        found["graphs=compiled"] = "torch.compile needs a C++ compiler (install g++)"
    return found
