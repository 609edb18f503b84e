"""One product as an engine makes it: fresh weights in memory of their own, and the answer that is right.

Knows nothing of time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autotune.runtimes.native.kernels.tuning import Operator
from autotune.runtimes.native.quant.linear import Stored, make_linear

TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2, "int8": 1e-4}
"""Largest error, relative to the answer's norm, by the type of the product; bf16 keeps eight bits."""


class Product:
    """``x`` [rows, inputs] by a random weight. Raises NotImplementedError where an engine here does not make it."""

    def __init__(self, operator: Operator) -> None:
        source = torch.Generator().manual_seed(operator.outputs * 1_000_003 + operator.inputs)
        weight = torch.randn(operator.outputs, operator.inputs, generator=source, device="cpu") * operator.inputs**-0.5
        self.x = torch.randn(operator.rows, operator.inputs, generator=source, device="cpu")
        if torch.cuda.is_available():
            weight, self.x = weight.cuda(), self.x.cuda()
        storage, _, compute = operator.dtype.partition("-")
        kind, _, group = storage.partition("g")
        self.operator, self.limit = operator, TOLERANCE[compute or storage]
        self._weight, self._bits = weight, {"int8": 8, "int4": 4}.get(kind, 16)
        self._compute, self._group = (compute or storage), int(group or 64)
        self.first = self.copy()
        if operator.op == "linear" and self.first.dtype != operator.dtype:
            raise NotImplementedError(f"an engine stores {operator.key} as {self.first.dtype}")

    def copy(self) -> Stored:
        """The same weight again."""
        if self.operator.backend == "cpu":
            return make_linear(self._weight, self._bits, self._compute, self._group)
        try:
            from autotune.runtimes.native.quant import cuda

            if self._integers:
                return cuda.make_linear(self._weight, 8, "fp32", activations="int8_token")
            return cuda.make_linear(self._weight, self._bits, self._compute, self._group)
        except ImportError as error:
            raise NotImplementedError(f"{self.operator.op} needs Triton: {error}") from None

    @property
    def _integers(self) -> bool:
        return self._compute == "int8"

    def reference(self) -> Tensor:
        """The answer in fp64 [rows, outputs]: dequantized and multiplied, with the codes of int8 activations."""
        x = self.x.double()
        if self._integers:
            from autotune.runtimes.native.kernels.w8a8 import reference

            codes, scale = reference.quantize(self.x)
            x = codes.double() * scale.double()[:, None]
        return x @ self.first.dense().double().t()
