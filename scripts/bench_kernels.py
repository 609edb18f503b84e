"""Times every Triton kernel on the GPU of this machine against torch, at the sizes of GLM-5.3-Flash.

python scripts/bench_kernels.py [--quick] [--out FILE]     a row a case, then one line of JSON. Exit 3 without a GPU.
python scripts/bench_kernels.py --check                    the same cases, small, once, in Triton's interpreter

Seconds are medians of replayed CUDA graphs; the L2 cache is overwritten before each, so that weights come from memory.
Shares are of the device's data sheet, and absent for a device that the table does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
if "--check" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

from kernel_cases import MODEL, SMALL, Case, Cases, every

PEAKS: Mapping[str, Mapping[str, float]] = {
    "NVIDIA A100-SXM4-80GB": {"memory": 2.039e12, "bf16": 312e12, "int8": 624e12, "fp32": 19.5e12},
    "NVIDIA A100 80GB PCIe": {"memory": 1.935e12, "bf16": 312e12, "int8": 624e12, "fp32": 19.5e12},
    "NVIDIA A100-SXM4-40GB": {"memory": 1.555e12, "bf16": 312e12, "int8": 624e12, "fp32": 19.5e12},
    "NVIDIA H200": {"memory": 4.8e12, "bf16": 989e12, "int8": 1979e12, "fp32": 67e12},
}
"""Bytes a second, and dense operations a second by type, by the name that the driver gives. From NVIDIA's data sheets
"A100 Tensor Core GPU" and "H200 Tensor Core GPU" (whose figures for matrix units are with sparsity, so halved here)."""
FLUSH_BYTES = 256 << 20
"""More than any L2 cache of the table."""


def cases(quick: bool) -> Iterator[Case]:
    """Decode and prefill at the model's sizes; ``quick`` leaves out what differs only in degree."""
    of = Cases(MODEL, torch.bfloat16, "cuda")
    for rows in (1, 16, 2048) if quick else (1, 4, 16, 64, 512, 2048):
        yield from of.products(rows, (128,) if quick else (32, 64, 128))
    few = replace(of, sizes=replace(MODEL, experts=64))  # a rank of more than four GPUs, and quicker to make
    tokens = (1, 16, 2048) if quick else (1, 4, 16, 64, 512, 2048)
    for bits, group in ((16, 0), (8, 0), (4, 128)):
        yield from few.experts(tokens, bits, group)
    yield from replace(few, dot=torch.int8).experts(tokens, 8)
    for rows in (1, 16):
        yield from of.attention(rows)
    yield of.expanded(2048)
    yield from of.linear(16, 2048, 64)
    for rows in (1, 2048):
        yield of.streams(rows)


def seconds(run: Callable[[], Any], repeats: int) -> float:
    """The median of ``repeats`` replays of ``run``, which is first run until everything is compiled."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    found = []
    for _ in range(repeats):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / 1e3)
    return statistics.median(found)


def measured(case: Case, peaks: Mapping[str, float] | None, repeats: int) -> dict[str, Any]:
    """One row: the rates at which what the case needs was done, and the seconds of the 16-bit product it replaces."""
    row: dict[str, Any] = {"op": case.op, "case": case.label}
    try:
        took = seconds(case.bound("triton"), repeats)
    except RuntimeError as error:
        return row | {"failed": str(error).splitlines()[0]}
    row |= {"seconds": took, "bytes_per_second": case.nbytes / took, "operations_per_second": case.operations / took}
    if peaks is not None:
        bound = max(case.nbytes / peaks["memory"], case.operations / peaks[case.unit])
        row["share_of_bound"] = bound / took
    if case.plain is not None:
        row["torch_seconds"] = seconds(case.plain, repeats)
    return row


def line(row: Mapping[str, Any]) -> str:
    head = f"{row['op']:<12} {row['case']:<28} "
    if "failed" in row:
        return f"{head}FAILED {row['failed']}"
    share = f"{row['share_of_bound']:6.1%}" if "share_of_bound" in row else "     -"
    against = f"{row['torch_seconds'] / row['seconds']:6.2f}×" if "torch_seconds" in row else "      -"
    rates = f"{row['bytes_per_second'] / 1e9:9.1f} {row['operations_per_second'] / 1e12:8.2f}"
    return f"{head}{row['seconds'] * 1e6:10.1f} {rates} {share} {against}"


def check() -> int:
    """Every case once, on the CPU: that the script would run, not how fast."""
    count = 0
    for case in every(SMALL, torch.float32, "cpu"):
        case.run("triton")
        count += 1
    print(f"{count} small cases ran in Triton's interpreter; no GPU was used and nothing was timed")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repeats, in about two minutes")
    parser.add_argument("--check", action="store_true", help="run small cases on the CPU and time nothing")
    parser.add_argument("--out", type=Path, help="write the rows there as JSON lines")
    asked = parser.parse_args()
    if asked.check:
        return check()
    if not torch.cuda.is_available():
        print("no GPU was found: torch.cuda.is_available() is false (try --check)", file=sys.stderr)
        return 3
    name = torch.cuda.get_device_name()
    peaks = PEAKS.get(name)
    print(f"{name}, torch {torch.__version__}" + ("" if peaks else ": not in the table of peaks, so no shares"))
    print(f"{'kernel':<12} {'case':<28} {'µs':>10} {'GB/s':>9} {'TOP/s':>8} {'bound':>6} {'torch':>7}")
    rows = []
    for case in cases(asked.quick):
        rows.append(measured(case, peaks, 20 if asked.quick else 100))
        print(line(rows[-1]), flush=True)
    if asked.out:
        asked.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(json.dumps({"device": name, "torch": torch.__version__, "peaks": peaks, "rows": rows}))
    return 1 if any("failed" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
