"""Packed weights as Triton's products read them, alone or all experts of a layer in one tensor. Plans no widths."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from autotune.runtimes.native.kernels import tuning
from autotune.runtimes.native.kernels.blocks import default
from autotune.runtimes.native.kernels.experts.reference import Stack
from autotune.runtimes.native.kernels.w4a16 import reference as w4a16
from autotune.runtimes.native.kernels.w8a16 import reference as w8a16
from autotune.runtimes.native.quant import linear
from autotune.runtimes.native.quant.codes import int4_codes, int8_codes
from autotune.runtimes.native.quant.linear import Stored, Wide

DOT = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""The type of a product by the knob ``compute``."""
PACKAGE = "autotune.runtimes.native.kernels"


class Cuda(Stored):
    """A weight whose products of any number of rows are a Triton kernel's. ``op`` names its folder."""

    op = ""

    def __init__(self, kernel: str, compute: str, shape: tuple[int, int], parts: tuple[Tensor, ...], group: int = 0):
        super().__init__(kernel, compute, shape, parts, group)
        self.dot = DOT[compute]
        self._backend: Any = importlib.import_module(f"{PACKAGE}.{self.op}.triton")

    @property
    def _step(self) -> int:
        """What the inputs of a tile must be a multiple of."""
        return self.group or (32 if self.op == "w8a8" else 16)

    def tune(self) -> None:
        """The kernels look their blocks up at each call; asked for here, it is said before the first."""
        self.few, self._library, self._builds = 0, None, []
        tuning.current().by_rows(self.op, "int8-int8" if self.op == "w8a8" else self.dtype, *self.shape)

    def tunable(self, rows: int) -> dict[str, Any]:
        integers = self.op == "w8a8"
        facts: dict[str, Any] = {
            "rows": rows,
            "inputs": self.shape[1],
            "group": max(self.group, 1),
            "weight_bytes": 0.5 + 4 / self.group if self.group else 1,  # with the group's 16-bit scale and minimum
            "activation_bytes": 1 if integers else 4,
            "least_k": 32 if integers else 16,
        }
        if self.data.is_cuda:
            from triton.runtime import driver

            device = driver.active.utils.get_device_properties(self.data.device.index or 0)
            facts["shared_bytes"] = device["max_shared_mem"]
        return {"facts": facts, "defaults": asdict(default(rows, *self.shape, self._step))}


class Cuda8(Cuda):
    """Symmetric int8 with one fp32 scale an output channel, as `quant.linear.Int8`."""

    op = "w8a16"

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = self._backend.matmul(x, *self.parts, self.dot)
        return out

    def dense(self) -> Tensor:
        return w8a16.dense(*self.parts)


class Cuda8Both(Cuda8):
    """int8 weights and int8 activations on integer matrix units; the scale is a token's, or one for all of them."""

    op = "w8a8"

    def __init__(self, kernel: str, compute: str, shape: tuple[int, int], parts: tuple[Tensor, ...], group: int = 0):
        super().__init__("int8", compute, shape, parts, group)
        self.kernel = kernel
        if kernel == "int8_token":
            self.dot = torch.int8

    def __call__(self, x: Tensor) -> Tensor:
        if self.kernel == "int8_token":
            codes, scales = self._backend.quantize(x)
        else:
            scales = (x.abs().amax().clamp(min=1e-12) / 127).expand(len(x)).contiguous()
            codes = (x / scales[:, None]).round().to(torch.int8)
        out: Tensor = self._backend.matmul(codes, scales, *self.parts)
        return out


class Cuda4(Cuda):
    """Asymmetric 4 bits with a bf16 scale and minimum a group, packed as `kernels.w4a16.reference` says."""

    op = "w4a16"

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = self._backend.matmul(x, *self.parts, self.dot)
        return out

    def dense(self) -> Tensor:
        return w4a16.dense(*self.parts)


def make_linear(
    weight: Tensor,
    bits: int,
    compute: str,
    group: int = 64,
    activations: str = "weight_only",
    columns: slice | None = None,
) -> Stored:
    """`quant.linear.make_linear` for Triton's products: the same codes at the same widths in another packing."""
    peak, part = None, weight
    if columns is not None:
        part, peak = weight[:, columns].contiguous(), weight.abs().amax(1)
    shape = (part.shape[0], part.shape[1])
    if bits == 4 and shape[1] % group == 0:
        codes, scale, low = int4_codes(part, group)
        return Cuda4("int4", compute, shape, (w4a16.pack(codes, scale.shape[1]), scale, low), group)
    if bits > 8:
        return linear.make_linear(weight, bits, compute, group, activations, columns)
    parts = int8_codes(part, peak)
    if activations == "weight_only":
        return Cuda8("int8", compute, shape, parts)
    return Cuda8Both({"int8_token": "int8_token", "int8_tensor": "int8_both"}[activations], compute, shape, parts)


def dot(weight: Stored) -> torch.dtype:
    """The type in which activations enter the products of ``weight``."""
    return weight.dot if isinstance(weight, Cuda) else DOT[weight.compute]


def stacked(weights: Sequence[Any]) -> tuple[Stack, list[Stored]] | None:
    """The same matrix of several experts in one tensor, and each of them as a view of it.

    None where they are stored differently, or as the grouped kernels do not read them: with a correction of their
    bias, or with one scale for all activations.
    """
    first = weights[0]
    kind = type(first)
    if kind not in (Wide, Cuda8, Cuda8Both, Cuda4) or first.kernel == "int8_both":
        return None
    if any(type(one) is not kind or (one.kernel, one.dtype) != (first.kernel, first.dtype) for one in weights):
        return None
    parts = [torch.stack([one.parts[i] for one in weights]) for i in range(len(first.parts))]
    each = zip(*(part.unbind() for part in parts), strict=True)
    if kind is Wide:
        return Stack(parts[0]), [Wide(view, first.compute) for (view,) in each]
    return Stack(*parts), [kind(first.kernel, first.compute, first.shape, views, first.group) for views in each]
