"""One rank's exchanges with the other ranks of its replica, timed and counted. Knows no model."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autotune.runtimes.native.layout import Place

PATIENCE = timedelta(hours=1)
"""A rank that dies is noticed by whoever started it, long before this."""


class PeerError(RuntimeError):
    """An exchange failed, most likely because another rank has ended."""


class Mesh:
    """Sums and gathers over the tensor group, passes along the pipeline. Starts threads: make it after any fork."""

    def __init__(self, place: Place, store: str) -> None:
        """Meet the replica's other ranks at the file ``store``; one device a rank with CUDA, else CPU over gloo."""
        self.place = place
        self.seconds, self.bytes = 0.0, 0
        count = place.layout.replica
        self.cuda = torch.cuda.is_available()
        if self.cuda:
            devices, device = torch.cuda.device_count(), place.replica * count + place.rank
            if place.layout.world > devices:
                raise NotImplementedError(f"{place.layout.world} ranks need a CUDA device each; there are {devices}")
            torch.cuda.set_device(device)
        else:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # every rank is a process of this machine
        meeting = torch._C._distributed_c10d.FileStore(store, count)
        kind = "nccl" if self.cuda else "gloo"
        dist.init_process_group(kind, store=meeting, rank=place.rank, world_size=count, timeout=PATIENCE)
        layout = place.layout
        # Every rank has to take part in making every group, its own or not.
        starts = [layout.place(rank) for rank in range(count)]
        tensor = [dist.new_group(p.tensor_group) for p in starts if p.part == 0]
        pipe = [dist.new_group(p.pipe_group) for p in starts if p.stage == 0]
        self._tensor, self._pipe = tensor[place.stage], pipe[place.part]
        self._events: list[tuple[Any, Any]] = []

    def sum(self, x: Tensor) -> Tensor:
        """``x`` summed over the tensor group, in place."""
        self._timed(x, lambda: dist.all_reduce(x, group=self._tensor))
        return x

    def gather(self, x: Tensor) -> Tensor:
        """The parts [T, n] of the tensor group side by side: [T, tp · n]."""
        count = self.place.layout.tp
        x = x.contiguous()
        parts = x.new_empty(count, *x.shape)
        self._timed(parts, lambda: dist.all_gather(list(parts), x, group=self._tensor))
        return parts.transpose(0, 1).reshape(len(x), -1)

    def forward(self, x: Tensor) -> None:
        """Hand ``x`` to the next stage."""
        x = x.contiguous()
        self._timed(x, lambda: dist.send(x, self.place.rank + self.place.layout.tp))

    def receive(self, *shape: int) -> Tensor:
        """What the previous stage hands over, fp32 of a shape known to both."""
        x = torch.empty(*shape)
        self._timed(x, lambda: dist.recv(x, self.place.rank - self.place.layout.tp))
        return x

    def from_last(self, x: Tensor) -> Tensor:
        """The last stage's ``x``, written into everybody else's."""
        self._timed(x, lambda: dist.broadcast(x, self.place.pipe_group[-1], group=self._pipe))
        return x

    def sizes(self) -> dict[str, Any]:
        """The groups as they came about."""
        return {
            "tp": dist.get_world_size(self._tensor),
            "pp": dist.get_world_size(self._pipe),
            "backend": dist.get_backend(),
        }

    def counters(self) -> dict[str, float]:
        """Seconds spent in exchanges, waiting for slower ranks included, and bytes of the tensors exchanged."""
        self._settle()
        return {"communication_seconds": self.seconds, "communication_bytes": float(self.bytes)}

    def reset(self) -> None:
        self._settle()
        self.seconds, self.bytes = 0.0, 0

    def _timed(self, x: Tensor, exchange: Callable[[], Any]) -> None:
        self.bytes += x.nbytes
        try:
            if self.cuda:
                self._on_device(exchange)
                return
            start = time.perf_counter()
            exchange()
            self.seconds += time.perf_counter() - start
        except RuntimeError as error:
            raise PeerError(f"an exchange with other ranks failed: {str(error).splitlines()[0]}") from error

    def _on_device(self, exchange: Callable[[], Any]) -> None:
        """There an exchange is only queued; events before and after it tell its time later, without waiting now."""
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        exchange()
        stop.record()
        self._events.append((start, stop))
        if len(self._events) > 10_000:
            self._settle()

    def _settle(self) -> None:
        for start, stop in self._events:
            stop.synchronize()
            self.seconds += start.elapsed_time(stop) / 1000
        self._events.clear()
