"""Products y = x Wᵀ with W stored at 32, 16, 8 or 4 bits. Inputs and outputs are fp32 [rows, size]. Plans no widths."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

FEW_ROWS = {"int8": 16, "int4": 64}
"""Up to here the packed kernels read fewer bytes than they lose in arithmetic; beyond, unpacking once is faster.
Measured with AVX-512 and AMX at 128 to 768 inputs and outputs."""
NIBBLES = 0x0F0F0F0F0F0F0F0F


class Linear(Protocol):
    """A stored weight [out, in]. ``kernel`` names what multiplies it; ``nbytes`` is what it holds in memory."""

    kernel: str
    nbytes: int

    def __call__(self, x: Tensor) -> Tensor: ...

    def dense(self) -> Tensor:
        """The weight that is really used, in fp32 [out, in]."""


class Wide:
    """fp32 or bf16 weights, multiplied as stored."""

    def __init__(self, weight: Tensor, compute: str) -> None:
        self.weight = weight.to(torch.bfloat16 if compute == "bf16" else torch.float32).contiguous()
        self.kernel = compute
        self.nbytes = self.weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        if self.kernel == "fp32":
            return F.linear(x, self.weight)
        return F.linear(x.bfloat16(), self.weight).float()

    def dense(self) -> Tensor:
        return self.weight.float()


class Int8:
    """Symmetric int8 with one scale an output channel, activations kept in bf16."""

    kernel = "int8"

    def __init__(self, weight: Tensor) -> None:
        scale = (weight.abs().amax(1).clamp(min=1e-12) / 127).bfloat16()
        self.weight = (weight / scale.float()[:, None]).round().clamp(-127, 127).to(torch.int8)
        self.scale = scale
        self.nbytes = self.weight.nbytes + scale.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] <= FEW_ROWS[self.kernel] and not x.is_cuda:
            return torch._weight_int8pack_mm(x.bfloat16(), self.weight, self.scale).float()
        # int8 fits into bf16 exactly, so the scale can wait for the output.
        return F.linear(x.bfloat16(), self.weight.bfloat16()).float() * self.scale.float()

    def dense(self) -> Tensor:
        return self.weight.float() * self.scale.float()[:, None]


class Int8Both(Int8):
    """int8 weights and int8 activations with ONE scale for the whole activation tensor: the published "global INT8".

    Fast where there are integer matrix units, and wrong where activations have outliers; only a gate on trained
    weights tells.
    """

    kernel = "int8_both"

    def __call__(self, x: Tensor) -> Tensor:
        scale = x.abs().amax().clamp(min=1e-12) / 127
        quantized = (x / scale).round().to(torch.int8)
        return torch._int_mm(quantized, self.weight.t()).float() * (self.scale.float() * scale)


class Int8Token(Int8):
    """int8 weights and int8 activations with one scale an activation row, so that no token bends another's."""

    kernel = "int8_token"

    def __call__(self, x: Tensor) -> Tensor:
        scale = x.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
        quantized = (x / scale).round().to(torch.int8)
        return torch._int_mm(quantized, self.weight.t()).float() * (self.scale.float() * scale)


class Int4:
    """Asymmetric 4 bits with a scale and a zero point for each ``group`` inputs, packed two weights a byte."""

    kernel = "int4"

    def __init__(self, weight: Tensor, group: int) -> None:
        self.out = len(weight)
        weight = F.pad(weight, (0, 0, 0, -self.out % 64))  # rows that the packing takes
        out, inputs = weight.shape
        grouped = weight.view(out, inputs // group, group)
        low, high = grouped.amin(-1), grouped.amax(-1)
        # The kernel computes (q − 8)·scale + zero in bf16, so both are rounded before q is chosen.
        scale = ((high - low).clamp(min=1e-8) / 15).bfloat16()
        zero = (low + 8 * scale.float()).bfloat16()
        q = ((grouped - zero.float()[..., None]) / scale.float()[..., None] + 8).round().clamp(0, 15)
        self.group, self.shape = group, (out, inputs)
        self.packed = torch._convert_weight_to_int4pack_for_cpu(q.view(out, inputs).to(torch.int32), 1)
        self.scales = torch.stack([scale.t(), zero.t()], -1).contiguous()
        self.nbytes = self.packed.nbytes + self.scales.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        x = x.bfloat16()
        if x.shape[0] <= FEW_ROWS[self.kernel] or not layout_known():
            return torch._weight_int4pack_mm_for_cpu(x, self.packed, self.group, self.scales).float()[:, : self.out]
        # x W = x (q·scale) + (sums of x over a group)·(zero − 8·scale): one pass over the weight instead of two.
        blocks = torch.matmul(x, self._scaled()).permute(1, 0, 2).reshape(len(x), -1)
        sums = x.float().view(len(x), -1, self.group).sum(-1)
        return torch.addmm(blocks.float(), sums, self._offset())[:, : self.out]

    def _scaled(self) -> Tensor:
        """q·scale in bf16, in the packing's own order: [out / block, in, block]."""
        out, inputs = self.shape
        block = packed_block()
        codes = unpack(self.packed, out, inputs, block).view(out // block, inputs // self.group, self.group, block)
        scale = self.scales[..., 0].view(inputs // self.group, 1, out // block, block).permute(2, 0, 1, 3)
        return codes.mul_(scale).view(out // block, inputs, block)

    def _offset(self) -> Tensor:
        """zero − 8·scale, [in / group, out], fp32."""
        scales = self.scales.float()
        return scales[..., 1] - 8 * scales[..., 0]

    def dense(self) -> Tensor:
        out, inputs = self.shape
        if layout_known():
            scaled = self._scaled().permute(1, 0, 2).reshape(inputs, out).float()
            return (scaled + self._offset().repeat_interleave(self.group, 0)).t()[: self.out]
        eye = torch.eye(inputs, dtype=torch.bfloat16)
        return torch._weight_int4pack_mm_for_cpu(eye, self.packed, self.group, self.scales).float().t()[: self.out]


def unpack(packed: Tensor, out: int, inputs: int, block: int) -> Tensor:
    """The 4-bit codes [out / block, in, block] in bf16 of torch's CPU packing.

    Blocks of ``block`` output columns; byte d of an input row holds column d in its low and d + block/2 in its high
    half.
    """
    half = block // 2
    words = packed.view(out // block, inputs, half).view(torch.int64)  # eight bytes at a time
    codes = torch.empty(out // block, inputs, block, dtype=torch.bfloat16)
    codes[..., :half] = (words & NIBBLES).view(torch.uint8)
    codes[..., half:] = ((words >> 4) & NIBBLES).view(torch.uint8)
    return codes


@cache
def packed_block() -> int:
    """Columns a block of the packing on this processor: 64 with AVX-512, 32 with AVX2, 0 when it is neither."""
    source = torch.Generator("cpu").manual_seed(0)
    codes = torch.randint(0, 16, (64, 32), generator=source, dtype=torch.int32, device="cpu")
    packed = torch._convert_weight_to_int4pack_for_cpu(codes, 1)
    for width in (64, 32):
        found = unpack(packed, 64, 32, width).permute(0, 2, 1).reshape(64, 32)
        if torch.equal(found.to(torch.int32), codes):
            return width
    return 0


def layout_known() -> bool:
    return packed_block() > 0


@cache
def refusals() -> dict[str, str]:
    """Reasons by ``8``, ``4``, ``int8_both`` and ``int8_token`` for what this build of torch cannot multiply here."""
    found = {}
    weight, x = torch.randn(64, 64), torch.randn(2, 64)
    makers: dict[str, Callable[[], Linear]] = {
        "8": lambda: Int8(weight),
        "4": lambda: Int4(weight, 32),
        "int8_both": lambda: Int8Both(weight),
        "int8_token": lambda: Int8Token(weight),
    }
    for name, make in makers.items():
        try:
            make()(x)
        except (RuntimeError, AttributeError, NotImplementedError) as error:
            found[name] = f"torch {torch.__version__} refuses it here: {str(error).splitlines()[0]}"
    return found


EIGHT = {"weight_only": Int8, "int8_token": Int8Token, "int8_tensor": Int8Both}
"""What multiplies 8-bit weights, by the ``activations`` knob."""


def make_linear(weight: Tensor, bits: int, compute: str, group: int = 64, activations: str = "weight_only") -> Linear:
    """Store ``weight`` [out, in] at ``bits``; shapes that a packing does not take stay at the next width up."""
    inputs = weight.shape[1]
    if bits == 4 and inputs % group == 0:
        return Int4(weight, group)
    if bits <= 8 and inputs % 16 == 0:
        return EIGHT[activations](weight)
    return Wide(weight, compute)


class Embedding:
    """Token vectors at 16, 8 or 4 bits (one scale a row; 4 bits packed two a byte), read row by row into fp32."""

    def __init__(self, weight: Tensor, bits: int, compute: str) -> None:
        self.bits = bits
        self.size = weight.shape[1]
        if bits == 16:
            self.weight = weight.to(torch.bfloat16 if compute == "bf16" else torch.float32)
            self.scale = torch.ones(0)
        else:
            top = 127 if bits == 8 else 7
            self.scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / top
            q = (weight / self.scale).round().clamp(-top, top).to(torch.int8)
            self.weight = q if bits == 8 else ((q[:, ::2] + 8) | ((q[:, 1::2] + 8) << 4)).to(torch.uint8)
        self.nbytes = self.weight.nbytes + self.scale.nbytes

    def __call__(self, ids: Tensor) -> Tensor:
        rows = self.weight[ids]
        if self.bits == 16:
            return rows.float()
        if self.bits == 4:
            rows = torch.stack([(rows & 15).to(torch.int8) - 8, (rows >> 4).to(torch.int8) - 8], -1).flatten(-2)
        return rows.float() * self.scale[ids]
