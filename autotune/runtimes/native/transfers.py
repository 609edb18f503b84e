"""How a step's inputs get from the host to the device. Knows not what they mean."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Plain:
    """A copy from ordinary memory, for which the host waits; on the CPU nothing moves."""

    name = "plain"

    def __init__(self) -> None:
        self.device = torch.get_default_device()

    def __call__(self, host: Tensor) -> Tensor:
        return host.to(self.device)


class _Staged(Plain):
    """Inputs go through one page-locked buffer, grown to the largest seen.

    It may be overwritten only after the step before was read back, which every step's logits are.
    """

    def __init__(self) -> None:
        super().__init__()
        self._buffer = torch.empty(0, dtype=torch.int64)

    def _stage(self, host: Tensor) -> Tensor:
        if self._buffer.numel() < host.numel():
            self._buffer = self._locked(host.numel())
        staged = self._buffer[: host.numel()].view(host.shape)
        staged.copy_(host)
        return staged

    def _locked(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.int64, device="cpu", pin_memory=True)


class Pinned(_Staged):
    """A copy from page-locked memory, during which the host goes on."""

    name = "pinned"

    def __call__(self, host: Tensor) -> Tensor:
        return self._stage(host).to(self.device, non_blocking=True)


class ZeroCopy(_Staged):
    """No copy: kernels read the page-locked memory itself, over the bus.

    With unified addressing a page-locked buffer has the same address on host and device (CUDA C++ Programming Guide,
    "Unified Virtual Address Space"), so a device tensor can be laid over it.
    """

    name = "zero_copy"

    def __call__(self, host: Tensor) -> Tensor:
        return torch.as_tensor(_Mapped(self._stage(host)), device=self.device)


class _Mapped:
    """A page-locked tensor as the CUDA array interface describes device memory."""

    def __init__(self, staged: Tensor) -> None:
        self.staged = staged
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": tuple(staged.shape), "typestr": "<i8", "data": (staged.data_ptr(), False), "version": 2,
        }  # fmt: skip


TRANSFERS: dict[str, type[Plain]] = {kind.name: kind for kind in (Plain, Pinned, ZeroCopy)}
