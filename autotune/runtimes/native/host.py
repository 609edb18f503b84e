"""The host's side of memory: which allocator policy this process runs, and what allocating costs. Moves no tensors."""

from __future__ import annotations

import ctypes
import os
import resource

import torch

CUDA_POLICIES = {
    "default": "",
    "expandable_segments": "expandable_segments:True",
    "async": "backend:cudaMallocAsync",
}
"""What each allocator policy says in PYTORCH_CUDA_ALLOC_CONF."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST, GLIBC = 1 << 30, 128 << 10
"""Bytes from which glibc maps an allocation of its own: as large as it may be, and the value it starts with."""


class _Applied:
    """The policy of this process; torch reads it once, before its first CUDA allocation."""

    policy = "default"


def apply(policy: str) -> None:
    """Set the allocator policy of this whole process, before anything large is allocated.

    ``keep`` (CPU): glibc serves large tensors from its heap and never gives them back, instead of mapping and faulting
    in fresh pages for each. Raises NotImplementedError for a policy that this machine lacks.
    """
    if policy == "keep" or _Applied.policy == "keep":
        limit = LARGEST if policy == "keep" else GLIBC
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is None or not (mallopt(M_MMAP_THRESHOLD, limit) and mallopt(M_TRIM_THRESHOLD, limit)):
            raise NotImplementedError("allocator=keep needs glibc's malloc")
    elif policy not in CUDA_POLICIES:
        raise NotImplementedError(f"there is no allocator policy {policy}")
    elif policy != "default":
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = CUDA_POLICIES[policy]
    _Applied.policy = policy


def applied() -> str:
    """The policy that this process runs."""
    return _Applied.policy


def allocations() -> dict[str, float]:
    """Running totals: page faults that needed no disk (CPU), or the device allocator's counts and bytes (CUDA)."""
    if not torch.cuda.is_available():
        return {"page_faults": float(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)}
    stats = torch.cuda.memory_stats()
    return {
        "device_allocations": float(stats.get("allocation.all.allocated", 0)),
        "device_segments": float(stats.get("segment.all.allocated", 0)),
        "device_retries": float(stats.get("num_alloc_retries", 0)),
    }


def held() -> dict[str, float]:
    """Device bytes that the allocator reserved at its peak, and those that no tensor ever held; nothing on a CPU."""
    if not torch.cuda.is_available():
        return {}
    stats = torch.cuda.memory_stats()
    reserved, used = (float(stats.get(f"{kind}_bytes.all.peak", 0)) for kind in ("reserved", "allocated"))
    return {"device_reserved_bytes": reserved, "device_unallocated_bytes": max(reserved - used, 0.0)}
