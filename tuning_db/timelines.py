"""Packs the samples of one trial into one compressed blob and back, losing nothing. Knows no database."""

from __future__ import annotations

import json
import math
import sys
import zlib
from array import array
from collections.abc import Sequence

from tuning_db.canonical import plain, quick
from tuning_db.records import Sample

FORMAT = 1
LARGEST = 1 << 30
"""Bytes after decompression that no real trial reaches: a blob that claims more is damaged or hostile."""


def pack(samples: Sequence[Sample]) -> bytes:
    """One byte of format, then zlib over a JSON line and the times as float64 with their bytes grouped by place.

    Grouping by place makes neighbouring times compress to about a half. Raises ValueError for a time that is not
    finite or facts that JSON lacks.
    """
    times = array("d")
    rows = []
    for sample in samples:
        times.append(sample.sent)
        times.extend(sample.token_times)
        facts = sample.facts if quick(sample.facts) else plain(sample.facts, f"facts of sample {sample.index}")
        sizes = [len(sample.token_times), sample.prompt_tokens, sample.output_tokens]
        rows.append([sample.index, facts, *sizes, sample.error])
    if not all(map(math.isfinite, times)):
        raise ValueError("a sample holds a time that is not finite")
    # ASCII escapes keep every character of an engine's error text, even halves of surrogate pairs.
    head = json.dumps(rows, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode("ascii")
    raw = _little(times).tobytes()
    body = b"".join(raw[place::8] for place in range(8))
    return bytes([FORMAT]) + zlib.compress(head + b"\n" + body, 6)


def unpack(trial_id: str, blob: bytes) -> list[Sample]:
    """The samples that `pack` was given. Raises ValueError for a blob that is damaged or of a newer format."""
    if blob[:1] != bytes([FORMAT]):
        raise ValueError(f"samples of trial {trial_id} have the unknown format {blob[:1]!r}")
    try:
        inflate = zlib.decompressobj()
        data = inflate.decompress(blob[1:], LARGEST)
        if not inflate.eof:
            raise ValueError("cut short, or too large")
        head, _, body = data.partition(b"\n")
        times = _times(body)
        samples, at = [], 0
        for index, facts, count, prompt, output, error in json.loads(head):
            ends = at + 1 + count
            row = times[at:ends]
            samples.append(Sample(trial_id, index, facts, row[0], tuple(row[1:]), prompt, output, error))
            at = ends
        if at != len(times):
            raise ValueError("more times than samples")
    except (ValueError, TypeError, IndexError, zlib.error) as error:
        raise ValueError(f"samples of trial {trial_id} are damaged: {error}") from error
    return samples


def _times(body: bytes) -> array[float]:
    size = len(body) // 8
    raw = bytearray(len(body))
    for place in range(8):
        raw[place::8] = body[place * size : (place + 1) * size]
    times = array("d")
    times.frombytes(bytes(raw))
    return _little(times)


def _little(times: array[float]) -> array[float]:
    if sys.byteorder == "big":
        times.byteswap()
    return times
