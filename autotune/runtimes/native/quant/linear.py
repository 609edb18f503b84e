"""Products y = x Wᵀ with W stored at 32, 16, 8 or 4 bits. Inputs and outputs are fp32 [rows, size]. Plans no widths."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from autotune.runtimes.native.kernels import tuning
from autotune.runtimes.native.kernels.cpu import library as cpu
from autotune.runtimes.native.quant.codes import int4_codes, int8_codes

FEW_ROWS = {
    ("fp32", "fp32"): 12, ("bf16", "bf16"): 6,
    ("int8", "fp32"): 32, ("int8", "bf16"): 16, ("int4", "fp32"): 24, ("int4", "bf16"): 16,
}  # fmt: skip
"""By storage and compute type: up to here the C kernels win over torch's product, which must unpack first.
Measured with AVX-512 and AMX at 512 to 2048 inputs and outputs."""


class Linear(Protocol):
    """A stored weight [out, in]. ``kernel`` names what multiplies it; ``nbytes`` is what it holds in memory."""

    kernel: str
    nbytes: int

    def __call__(self, x: Tensor) -> Tensor: ...

    def dense(self) -> Tensor:
        """The weight that is really used, in fp32 [out, in]."""


class Stored:
    """A weight kept row by row as ``data``; what few rows multiply through our own kernels and many through torch.

    ``compute`` is the type of the product of many rows, fp32 or bf16; few rows always keep fp32 activations. How many
    are few, and how the kernel is built, is tuned.
    """

    def __init__(self, kernel: str, compute: str, shape: tuple[int, int], parts: tuple[Tensor, ...], group: int = 0):
        self.kernel, self.compute, self.shape, self.parts, self.group = kernel, compute, shape, parts, group
        self.data = parts[0]
        self.nbytes = sum(part.nbytes for part in parts)
        self._whole = shape[1] % cpu.LANES == 0 and not self.data.is_cuda
        self._threads = torch.get_num_threads()
        self.weight = cpu.Weight(cpu.KINDS[kernel], *shape, group, self.data.data_ptr(), parts[-1].data_ptr())
        self._at = ctypes.addressof(self.weight)
        self.tune()

    @property
    def dtype(self) -> str:
        """Its type in the words of `tuning.Operator`."""
        storage = f"{self.kernel}g{self.group}" if self.group else self.kernel
        return storage if storage == self.compute else f"{storage}-{self.compute}"

    @property
    def _usual(self) -> int:
        """Few rows where nothing is tuned."""
        return FEW_ROWS[self.kernel, self.compute] if self._whole and cpu.library() is not None else 0

    def tune(self) -> None:
        """Take the meta-parameters of this process's table, for every product from now on."""
        choices = tuning.current().by_rows("linear", self.dtype, *self.shape) if self._usual else {}
        builds = tuning.packed_rows(choices, self._usual) if self._usual else []
        self.few = max((last for last, _ in builds), default=0)
        self._library = cpu.library() if self._usual else None
        self._builds = [(last, self._built(choice)) for last, choice in builds]

    def _built(self, choice: tuning.Choice) -> ctypes.CDLL:
        """The kernels as ``choice`` wants them built; untuned settings keep their defaults."""
        settings = {name: int(choice[name]) for name in ("block", "ahead") if name in choice}
        found = cpu.library(**settings)
        if found is None:
            raise RuntimeError(f"{cpu.compiler()} cannot compile the kernels with {settings}")
        return found

    def tunable(self, rows: int) -> dict[str, Any]:
        """What `search_spaces.kernels.kernel_space` needs to know of products of ``rows`` rows."""
        if not self._usual:
            refused = {"path=packed": cpu.refusal() or f"the C kernels take multiples of {cpu.LANES} inputs"}
            return {"facts": {"compiled": False, "refused": refused}}
        return {"defaults": {"path": "packed" if rows <= self._usual else "dense"}}

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        for last, library in self._builds:
            if rows <= last:
                x, out = x.contiguous(), torch.empty(rows, self.shape[0])
                library.linear(self._at, x.data_ptr(), rows, out.data_ptr(), self._threads)
                return out
        return self._many(x)

    def _many(self, x: Tensor) -> Tensor:
        if self.compute == "fp32":
            return F.linear(x, self.dense())
        return F.linear(x.bfloat16(), self.dense().bfloat16()).float()

    def dense(self) -> Tensor:
        raise NotImplementedError


class Wide(Stored):
    """fp32 or bf16 weights, multiplied as stored."""

    def __init__(self, weight: Tensor, compute: str) -> None:
        kind = torch.bfloat16 if compute == "bf16" else torch.float32
        super().__init__(compute, compute, (weight.shape[0], weight.shape[1]), (weight.to(kind).contiguous(),))

    def _many(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.data.dtype), self.data).float()

    def dense(self) -> Tensor:
        return self.data.float()


class Int8(Stored):
    """Symmetric int8 with one fp32 scale an output channel.

    ``peak`` [out] are the largest magnitudes of whole rows, where ``weight`` holds only some of their inputs.
    """

    def __init__(self, weight: Tensor, compute: str, peak: Tensor | None = None) -> None:
        super().__init__("int8", compute, (weight.shape[0], weight.shape[1]), int8_codes(weight, peak))

    def _many(self, x: Tensor) -> Tensor:
        kind = torch.float32 if self.compute == "fp32" else torch.bfloat16  # int8 fits into bf16 exactly
        return F.linear(x.to(kind), self.data.to(kind)).float() * self.parts[1]

    def dense(self) -> Tensor:
        return self.data.float() * self.parts[1][:, None]


class Int8Both(Int8):
    """int8 weights and int8 activations with ONE scale for the whole activation tensor: the published "global INT8".

    Fast where there are integer matrix units, and wrong where activations have outliers; only a gate on trained
    weights tells.
    """

    def __init__(self, weight: Tensor, compute: str, peak: Tensor | None = None) -> None:
        super().__init__(weight, compute, peak)
        self.kernel = "int8_both"

    def tune(self) -> None:
        self.few, self._library, self._builds = 0, None, []

    def __call__(self, x: Tensor) -> Tensor:
        scale = x.abs().amax().clamp(min=1e-12) / 127
        quantized = (x / scale).round().to(torch.int8)
        return torch._int_mm(quantized, self.data.t()).float() * (self.parts[1] * scale)


class Int8Token(Int8):
    """int8 weights and int8 activations with one scale an activation row, so that no token bends another's."""

    def __init__(self, weight: Tensor, compute: str, peak: Tensor | None = None) -> None:
        super().__init__(weight, compute, peak)
        self.kernel = "int8_token"

    def tune(self) -> None:
        self.few, self._library, self._builds = 0, None, []

    def __call__(self, x: Tensor) -> Tensor:
        scale = x.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
        quantized = (x / scale).round().to(torch.int8)
        return torch._int_mm(quantized, self.data.t()).float() * (self.parts[1] * scale)


class Int4(Stored):
    """Asymmetric 4 bits with a bf16 scale and minimum for each ``group`` inputs, two weights a byte, low half first."""

    def __init__(self, weight: Tensor, group: int, compute: str) -> None:
        out, inputs = weight.shape
        codes, scale, low = int4_codes(weight, group)
        pad = -inputs % cpu.CHUNK
        codes = F.pad(codes, (0, pad))
        data = codes[:, ::2] | (codes[:, 1::2] << 4)
        both = F.pad(torch.stack([low, scale], -1), (0, 0, 0, pad // group))
        # One vector more, so that the kernel may load a whole one of any row's last groups.
        both = F.pad(both.flatten(), (0, 2 * cpu.LANES))
        super().__init__("int4", compute, (out, inputs), (data.contiguous(), both), group)

    def dense(self) -> Tensor:
        out, inputs = self.shape
        if self._library is not None:
            made = torch.empty(out, 2 * self.data.shape[1])
            self._library.dense(self._at, made.data_ptr())
            return made[:, :inputs]
        codes = torch.stack([self.data & 15, self.data >> 4], -1).view(out, -1, self.group).float()
        low, scale = self.parts[1][: 2 * out * codes.shape[1]].view(out, -1, 2, 1).float().unbind(2)
        return (codes * scale + low).view(out, -1)[:, :inputs]


@cache
def refusals() -> dict[str, str]:
    """Reasons by ``int8_tensor`` and ``int8_token`` for what this build of torch cannot multiply here."""
    found = {}
    for name in ("int8_tensor", "int8_token"):
        try:
            EIGHT[name](torch.randn(64, 64), "fp32")(torch.randn(2, 64))
        except (RuntimeError, AttributeError, NotImplementedError) as error:
            found[name] = f"torch {torch.__version__} refuses it here: {str(error).splitlines()[0]}"
    return found


EIGHT = {"weight_only": Int8, "int8_token": Int8Token, "int8_tensor": Int8Both}
"""What multiplies 8-bit weights, by the ``activations`` knob."""


def make_linear(
    weight: Tensor,
    bits: int,
    compute: str,
    group: int = 64,
    activations: str = "weight_only",
    columns: slice | None = None,
) -> Stored:
    """Store ``weight`` [out, in] at ``bits``; shapes that a packing does not take stay at the next width up.

    Of the whole ``weight`` only the inputs ``columns`` are kept, with the values that the whole one would be stored at.
    """
    peak = None
    if columns is not None:
        weight, peak = weight[:, columns].contiguous(), weight.abs().amax(1)
    inputs = weight.shape[1]
    if bits == 4 and inputs % group == 0:
        return Int4(weight, group, compute)
    if bits <= 8 and inputs % cpu.LANES == 0:
        return EIGHT[activations](weight, compute, peak)
    return Wide(weight, compute)


class Embedding:
    """Token vectors at 16, 8 or 4 bits (one scale a row; 4 bits packed two a byte), read row by row into fp32.

    With ``on_host`` the table stays in the host's memory and only the rows of a step's tokens go to the device.
    """

    def __init__(self, weight: Tensor, bits: int, compute: str, on_host: bool = False) -> None:
        self.device = weight.device
        weight = weight.cpu() if on_host else weight
        self.bits = bits
        self.size = weight.shape[1]
        if bits == 16:
            self.weight = weight.to(torch.bfloat16 if compute == "bf16" else torch.float32)
            self.scale = torch.ones(0, device=weight.device)
        else:
            top = 127 if bits == 8 else 7
            self.scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / top
            q = (weight / self.scale).round().clamp(-top, top).to(torch.int8)
            self.weight = q if bits == 8 else ((q[:, ::2] + 8) | ((q[:, 1::2] + 8) << 4)).to(torch.uint8)
        self.nbytes = self.weight.nbytes + self.scale.nbytes

    def __call__(self, ids: Tensor) -> Tensor:
        ids = ids.to(self.weight.device)
        rows = self.weight[ids]
        if self.bits == 4:
            rows = torch.stack([(rows & 15).to(torch.int8) - 8, (rows >> 4).to(torch.int8) - 8], -1).flatten(-2)
        found = rows.float() if self.bits == 16 else rows.float() * self.scale[ids]
        return found.to(self.device)
