"""Reads the header of a safetensors file and checks it against the file's length. Never reads or maps the data.

Format: 8 bytes little-endian header length, a JSON object {name: {dtype, shape, data_offsets}}, then the data.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LONGEST = 100_000_000
"""Bytes of header that the safetensors library accepts."""
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "F4": 4,
}  # fmt: skip


class HeaderError(ValueError):
    """A file that is no whole safetensors file; the message names it and what is wrong."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One header entry; ``start`` and ``end`` are byte offsets into the data."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def bytes(self) -> int:
        return self.end - self.start


def read_header(file: Path) -> dict[str, Tensor]:
    """{tensor name: entry} of a safetensors file. Raises HeaderError."""
    try:
        with file.open("rb") as stream:
            size = file.stat().st_size
            start = stream.read(8)
            if len(start) < 8:
                raise HeaderError(f"{file} has {size} bytes, too few for a safetensors file; download it again")
            length = struct.unpack("<Q", start)[0]
            if length > min(size - 8, LONGEST):
                raise HeaderError(
                    f"{file} is truncated or no safetensors file: its header claims {length:,} bytes, "
                    f"{size - 8:,} are there; download it again"
                )
            raw = stream.read(length)
    except OSError as error:
        raise HeaderError(f"cannot read {file}: {error.strerror}") from None
    return _checked(raw, size - 8 - length, file)


def _checked(raw: bytes, data: int, file: Path) -> dict[str, Tensor]:
    try:
        table = json.loads(raw)
    except (ValueError, RecursionError):
        raise HeaderError(f"{file}: its header is not JSON; this is no safetensors file, or a damaged one") from None
    if not isinstance(table, dict):
        raise HeaderError(f"{file}: its header is no JSON object; this is no safetensors file, or a damaged one")
    tensors = {name: _tensor(name, entry, file) for name, entry in table.items() if name != "__metadata__"}
    needed = max((t.end for t in tensors.values()), default=0)
    if needed != data:
        what = "is truncated" if data < needed else "has bytes that no tensor owns"
        raise HeaderError(f"{file} {what}: its tensors take {needed:,} bytes, {data:,} are there; download it again")
    return tensors


def _tensor(name: str, entry: Any, file: Path) -> Tensor:
    try:
        dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        numbers = [*shape, start, end]
    except (KeyError, TypeError, ValueError):
        raise HeaderError(f"{file}: tensor {name} has a broken header entry; download the file again") from None
    if not isinstance(dtype, str) or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in numbers):
        raise HeaderError(f"{file}: tensor {name} has a broken header entry; download the file again")
    bits = BITS.get(dtype)
    if end < start or (bits is not None and (end - start) * 8 != math.prod(shape) * bits):
        raise HeaderError(f"{file}: tensor {name} ({dtype} {list(shape)}) cannot fill bytes {start} to {end}")
    return Tensor(dtype, shape, start, end)
