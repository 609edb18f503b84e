"""How a step's inputs get from the host to the device: by pageable copies. Knows not what they mean."""

from __future__ import annotations

import torch
from torch import Tensor


class Plain:
    """A copy from ordinary memory, for which the host waits; on the CPU nothing moves."""

    name = "plain"

    def __init__(self) -> None:
        self.device = torch.get_default_device()

    def __call__(self, host: Tensor) -> Tensor:
        return host.to(self.device)
