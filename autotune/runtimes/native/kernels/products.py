"""Products that can be tuned, each as its engine makes it: fresh weights, a reference, and what may be chosen.

Knows nothing of time.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from autotune.runtimes.native.kernels.tuning import Operator
from autotune.runtimes.native.quant.linear import Stored, make_linear

TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2, "int8": 1e-4}
"""Largest error, relative to the answer's norm, by the type of the product; bf16 keeps eight bits."""
DOT = {"fp32": torch.float32, "bf16": torch.bfloat16}

Call = Callable[[Tensor], Tensor]


class Product(Protocol):
    """``x`` [rows, inputs] by weights of ``nbytes`` each; answers may be ``limit`` off."""

    x: Tensor
    nbytes: int
    limit: float

    def reference(self) -> Tensor:
        """The answer in fp64 [rows, outputs]."""

    def describe(self) -> dict[str, Any]:
        """Facts and defaults of `search_spaces.kernels.kernel_space`."""

    def copy(self) -> Call:
        """The product with the same weight in memory of its own."""

    def tune(self, copies: Sequence[Call]) -> None:
        """Let ``copies`` take the process's table as it is now."""


def product(operator: Operator) -> Product:
    """The product of an operator. Raises NotImplementedError where an engine here does not make it."""
    source = torch.Generator().manual_seed(operator.outputs * 1_000_003 + operator.inputs)
    weight = torch.randn(operator.outputs, operator.inputs, generator=source, device="cpu") * operator.inputs**-0.5
    x = torch.randn(operator.rows, operator.inputs, generator=source, device="cpu")
    if operator.backend == "triton":
        return TritonProduct(operator, weight, x)
    return StoredProduct(operator, weight, x)


class StoredProduct:
    """A weight of `quant.linear`."""

    def __init__(self, operator: Operator, weight: Tensor, x: Tensor) -> None:
        storage, _, compute = operator.dtype.partition("-")
        kind, _, group = storage.partition("g")
        bits = {"int8": 8, "int4": 4}.get(kind, 16)
        self._arguments = (weight, bits, compute or storage, int(group or 64))
        self._first = make_linear(*self._arguments)
        if self._first.dtype != operator.dtype:
            raise NotImplementedError(f"an engine stores {operator.key} as {self._first.dtype}")
        self.x, self.rows, self.nbytes, self.limit = x, operator.rows, self._first.nbytes, TOLERANCE[compute or storage]

    def reference(self) -> Tensor:
        return self.x.double() @ self._first.dense().double().t()

    def describe(self) -> dict[str, Any]:
        return self._first.tunable(self.rows)

    def copy(self) -> Stored:
        return make_linear(*self._arguments)

    def tune(self, copies: Sequence[Call]) -> None:
        for copy in copies:
            assert isinstance(copy, Stored)
            copy.tune()


class TritonProduct:
    """A Triton kernel of one of the ops w8a16, w4a16 and w8a8, which looks its blocks up at each call."""

    def __init__(self, operator: Operator, weight: Tensor, x: Tensor) -> None:
        from autotune.runtimes.native.kernels import blocks

        package = f"autotune.runtimes.native.kernels.{operator.op}"
        try:
            self._kernel = importlib.import_module(f"{package}.triton")
        except ImportError as error:
            raise NotImplementedError(f"{operator.op} needs Triton: {error}") from None
        if torch.cuda.is_available():
            weight, x = weight.cuda(), x.cuda()
        self.x, self.operator, self._weight = x, operator, weight
        self._reference = importlib.import_module(f"{package}.reference")
        storage, _, compute = operator.dtype.partition("-")
        self._group = int(storage.partition("g")[2] or 0)
        self._dot, self.limit = DOT.get(compute), TOLERANCE[compute]
        self.nbytes = sum(part.nbytes for part in self._parts())
        self._default = blocks.default(operator.rows, operator.outputs, operator.inputs, self._step)

    @property
    def _step(self) -> int:
        """What a tile's inputs must be a multiple of."""
        return self._group or (16 if self._dot is not None else 32)

    def _parts(self) -> tuple[Tensor, ...]:
        from autotune.runtimes.native.quant import codes

        if not self._group:
            return codes.int8_codes(self._weight)
        made, scale, low = codes.int4_codes(self._weight, self._group)
        packed: Tensor = self._reference.pack(made, scale.shape[1])
        return packed, scale, low

    def _call(self, backend: Any, x: Tensor, parts: tuple[Tensor, ...]) -> Tensor:
        if self._dot is None:
            found: Tensor = backend.matmul(*backend.quantize(x), *parts)
        else:
            found = backend.matmul(x, *parts, self._dot)
        return found

    def reference(self) -> Tensor:
        return self._call(self._reference, self.x, self._parts()).double()

    def describe(self) -> dict[str, Any]:
        default = self._default
        facts: dict[str, Any] = {
            "rows": self.operator.rows,
            "inputs": self.operator.inputs,
            "group": max(self._group, 1),
            "weight_bytes": 0.5 + 4 / self._group if self._group else 1,  # with the 16-bit scale and minimum of a group
            "activation_bytes": 4 if self._dot is not None else 1,
            "least_k": 16 if self._dot is not None else 32,
        }
        if self.x.is_cuda:
            from triton.runtime import driver

            facts["shared_bytes"] = driver.active.utils.get_device_properties(self.x.device.index or 0)[
                "max_shared_mem"
            ]
        names = ("m", "n", "k", "split", "warps", "stages")
        return {"facts": facts, "defaults": {name: getattr(default, name) for name in names}}

    def copy(self) -> Call:
        parts = self._parts()
        return lambda x: self._call(self._kernel, x, parts)

    def tune(self, copies: Sequence[Call]) -> None:
        """Nothing to do: they ask the table themselves."""
