"""Records a table for `bench_search.py`: every configuration of a small native space, measured in interleaved blocks.

`python scripts/record_table.py scripts/data/native_task.jsonl.gz` measures each configuration once a block, in an order
drawn anew for each, with a fresh launch; blocks run at the same time on cores of their own. Killed, it goes on where it
stopped. The first line of the table says what and where; then one line a configuration: codes, values, status.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from autotune.bench import Bench
from autotune.corpus import read_tokens
from autotune.hardware import probe
from autotune.model import facts
from autotune.outcome import Status
from autotune.runtimes.native import NativeRuntime
from autotune.setting import reference_model
from autotune.workload import Workload, load_workload
from search_spaces import Config, Space, Value, load

KNOBS: dict[str, tuple[Value, ...]] = {
    "attention": ("absorbed", "expanded", "sparse"),
    "bits_attention": (8, 16),
    "bits_experts": (4, 8, 16),
    "compute": ("bf16", "fp32"),
    "graphs": ("eager", "compiled", "fused"),
    "prefix_reuse": (False, True),
    "max_seqs": (1, 4),
    "token_budget": (64, 512),
}
METRIC = "tasks_per_min"


def configurations() -> list[tuple[int, ...]]:
    """The codes of all combinations, in a fixed order."""
    return list(itertools.product(*(range(len(values)) for values in KNOBS.values())))


def decode(space: Space, codes: tuple[int, ...]) -> Config:
    return space.complete({name: KNOBS[name][code] for name, code in zip(KNOBS, codes, strict=True)})


def make_bench(logs: Path) -> Bench:
    """The native engine on the reference model; no quality, which a table of speeds has no use for."""
    folder = reference_model()
    runtime, model = NativeRuntime(folder), facts(folder)
    workload = load_workload(str(Path(__file__).parent / "data" / "table.toml"))
    space = load("native").narrow(
        {**runtime.capabilities(), "layers": model.layers, "experts": model.experts, "longest": workload.longest}
    )
    return Bench(runtime, space, workload, read_tokens(folder, model.vocab), logs)


def measure(raw: Path, blocks: list[int], core: int) -> None:
    """Append {block, codes, value, status, reason} to ``raw`` for what is not there yet, on one core."""
    parent = os.getppid()
    os.sched_setaffinity(0, {core})
    bench = make_bench(raw.parent / "logs")
    done = {(row["block"], tuple(row["c"])) for row in rows(raw)}
    with raw.open("a") as file:
        for block in blocks:
            order = configurations()
            random.Random(block).shuffle(order)
            for codes in order:
                if (block, codes) in done:
                    continue
                if os.getppid() != parent:
                    return  # whoever asked for the table is gone
                outcome = bench.measure(decode(bench.space, codes), block, f"core-{core}")
                value = outcome.metrics.get(METRIC) if outcome.status == Status.OK else None
                row = {"block": block, "c": codes, "v": value}
                row |= {"s": str(outcome.status), "r": outcome.reason.splitlines()[0] if outcome.reason else ""}
                file.write(json.dumps({**row, "at": round(time.time(), 1)}) + "\n")
                file.flush()


def rows(raw: Path) -> Iterator[dict[str, Any]]:
    if raw.is_file():
        with raw.open() as file:
            yield from map(json.loads, file)


def collect(raws: list[Path], blocks: int, target: Path) -> None:
    """Write the table from the raw rows."""
    values: dict[tuple[int, ...], list[float | None]] = {codes: [None] * blocks for codes in configurations()}
    ends: dict[tuple[int, ...], tuple[str, str]] = {}
    for row in itertools.chain.from_iterable(map(rows, raws)):
        codes = tuple(row["c"])
        values[codes][row["block"] - 1] = row["v"]
        if row["s"] != "ok":
            ends[codes] = (row["s"], row["r"])
    bench = make_bench(target.parent)
    machine = probe()
    default = {name: bench.space.knob(name).default for name in KNOBS}
    head = {
        "schema": 1, "name": "native-task", "metric": METRIC, "higher": True, "unit": "tasks/min", "knobs": KNOBS,
        "default": default, "machine": {"kind": machine.kind, **machine.facts}, "build": bench.runtime.version(),
        "workload": described(bench.workload), "recorded": time.strftime("%Y-%m-%d"), "blocks": blocks,
    }  # fmt: skip
    target.parent.mkdir(parents=True, exist_ok=True)
    with gzip.GzipFile(target, "wb", mtime=0) as file:
        file.write((json.dumps(head) + "\n").encode())
        for codes, found in values.items():
            status, reason = ends.get(codes, ("ok", ""))
            short = [None if v is None else float(f"{v:.5g}") for v in found]
            file.write((json.dumps({"c": codes, "v": short, "s": status, "r": reason}) + "\n").encode())


def described(workload: Workload) -> dict[str, Any]:
    return {
        name: value for name, value in asdict(workload).items() if isinstance(value, (str, int, float, list, tuple))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", type=Path)
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--raw", type=Path, default=Path("table-raw"), help="folder of the rows as they are measured")
    options = parser.parse_args()
    options.raw.mkdir(parents=True, exist_ok=True)
    cores = sorted(os.sched_getaffinity(0))
    blocks = list(range(1, options.blocks + 1))
    raws = [options.raw / f"core-{core}.jsonl" for core in cores]
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(target=measure, args=(raw, blocks[i :: len(cores)], core))
        for i, (raw, core) in enumerate(zip(raws, cores, strict=True))
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        if worker.exitcode:
            sys.exit(f"a worker ended with code {worker.exitcode}; run the same command again to go on")
    collect(raws, options.blocks, options.table)
    print(f"{options.table}: {len(configurations())} configurations x {options.blocks} blocks")


if __name__ == "__main__":
    main()
