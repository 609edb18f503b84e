"""Times the tuning database as it grows: writes, lookups, filters, bulk insertion and the space that samples take.

The last line is JSON. Records are made up; the times are of the real store on a real file.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from sqlalchemy import select

from tuning_db import Hardware, Sample, Scenario, Store, Trial, new_id, open_store, rows
from tuning_db.exchange import exported, take
from tuning_db.schema import scenarios, trials

KNOBS = {
    "attention": ("absorbed", "expanded"), "kv_dtype": ("bf16", "int8"), "bits_experts": (16, 8, 4),
    "bits_dense": (16, 8), "block_size": (16, 32, 64), "max_seqs": (8, 16, 32, 64), "graphs": (True, False),
    "token_budget": (256, 512, 1024, 2048),
    "prefix_reuse": (True, False), "threads": (1, 2, 4), "state_dtype": ("fp32", "bf16"), "kv_splits": (1, 2, 4, 8),
}  # fmt: skip
METRICS = (
    "ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99", "itl_p99", "e2e_p50", "e2e_p99", "output_tok_s", "requests_s",
    "goodput", "kl_mean", "perplexity_ratio", "weight_bytes", "cache_bytes", "power_w",
)  # fmt: skip
PER_SCENARIO, BLOCKS, FINALISTS = 200, 15, 8
"""Trials of one scenario, of which BLOCKS × FINALISTS are of its confirmation at most."""
BATCH = 2000
IMPORTED = 10_000
LIMITS = {"best_s": 0.05, "near_s": 0.05, "filter_s": 0.05, "write_s": 0.005}
LEAST = {"import_per_s": 20_000}


def scenario(number: int) -> Scenario:
    """One of many: 40 machines, 5 engine builds, 10 workloads, 4 models."""
    machine, build, workload, model = number % 40, number // 40 % 5, number // 200 % 10, number // 2000 % 4
    facts = {
        "product": ("NVIDIA A100-SXM4-80GB", "NVIDIA H100", "NVIDIA L40S", "NVIDIA H200")[machine % 4],
        "memory_bytes": 80 << 30, "count": (1, 2, 4, 8, 16)[machine // 4 % 5], "compute_capability": "8.0",
        "mig_profile": "off", "links": ("none", "NVSwitch")[machine // 20], "power_limit_w": 400,
        "driver": "570.86.10", "cuda": "12.8",
    }  # fmt: skip
    return Scenario(
        hardware=Hardware("gpu", facts, host="bench"),
        engine="native",
        engine_build={"source": f"{build:016x}", "torch": f"2.{build + 5}.0"},
        model={"name": f"glm5_next-{model}", "config": "c" * 16, "weights": "w" * 16},
        workload={"name": f"w{workload}", "kind": "task", "requests": 32, "rates": [1, 2, 4], "more": number // 8000},
        objective={"metric": "output_tok_s", "better": "higher"},
    )


def trial(key: str, number: int, dice: random.Random) -> Trial:
    """The ``number``-th trial of a scenario: the last ones confirm."""
    config = {name: dice.choice(values) for name, values in KNOBS.items()}
    at = number - (PER_SCENARIO - BLOCKS * (FINALISTS // 2))
    finalist = at % (FINALISTS // 2) if at >= 0 else None
    return Trial(
        id=new_id(), scenario_key=key, stage="search" if at < 0 else "confirm", config=config,
        config_key=f"c1:{dice.getrandbits(128):032x}" if finalist is None else f"c1:{key[3:]}{finalist}",
        status="ok" if at >= 0 or dice.random() < 0.9 else dice.choice(("oom", "crash", "quality")),
        metrics={name: dice.random() for name in METRICS}, seconds={"launch": 2.5, "measure": 10.0},
        effective=config, counters={"tokens": 1000}, block=max(at, 0) // (FINALISTS // 2), seed=number,
        started_at=1.7e9 + number * 4, ended_at=1.7e9 + number * 4 + dice.random(),
        provenance={"autotune": "0", "pid": 1},
    )  # fmt: skip


def samples(ident: str, dice: random.Random, requests: int = 100, tokens: int = 32) -> list[Sample]:
    """Requests of a run: a token every 20 ms or so."""
    found = []
    for index in range(requests):
        at = index * 0.1
        times = [at := at + 0.02 + dice.gauss(0, 0.001) for _ in range(tokens)]
        found.append(Sample(ident, index, {"conversation": index, "turn": 0}, index * 0.1, tuple(times), 512, tokens))
    return found


def fill(store: Store, first: int, last: int, dice: random.Random) -> dict[str, int]:
    """Add scenarios ``first`` to ``last`` with all their trials in bulk; trials a second, and a second of CPU time."""
    spent, worked, count = 0.0, 0.0, 0
    for batch in _batches(store, first, last, dice):
        start, working = time.perf_counter(), time.process_time()
        values = [rows.trial_row(one) for one in batch]
        with store.unit(write=True) as connection:
            connection.execute(trials.insert(), values)
        spent, worked = spent + time.perf_counter() - start, worked + time.process_time() - working
        count += len(batch)
    return {"insert_per_s": round(count / spent), "insert_per_cpu_s": round(count / worked)}


def _batches(store: Store, first: int, last: int, dice: random.Random) -> Iterator[list[Trial]]:
    batch: list[Trial] = []
    for number in range(first, last):
        key = store.ensure(scenario(number))
        batch += [trial(key, each, dice) for each in range(PER_SCENARIO)]
        if len(batch) >= BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def imported(store: Store, folder: Path, number: int, dice: random.Random) -> dict[str, int]:
    """Import 10,000 more trials, exported from another database; trials a second, and a second of CPU time."""
    first = 1_000_000 + 50 * number
    with open_store(folder / f"other{number}.db") as other:
        fill(other, first, first + IMPORTED // PER_SCENARIO, dice)
        lines = list(exported(other))
    start, working = time.perf_counter(), time.process_time()
    assert take(store, lines, "bench").new_trials == IMPORTED
    spent, worked = time.perf_counter() - start, time.process_time() - working
    return {"import_per_s": round(IMPORTED / spent), "import_per_cpu_s": round(IMPORTED / worked)}


def timed(name: str, repeats: int, run: Callable[[int], Any]) -> dict[str, float]:
    """The median seconds of a call, and of its CPU time, which a busy machine stretches less."""
    spent, worked = [], []
    for number in range(repeats):
        start, working = time.perf_counter(), time.process_time()
        run(number)
        spent.append(time.perf_counter() - start)
        worked.append(time.process_time() - working)
    return {f"{name}_s": statistics.median(spent), f"{name}_cpu_s": statistics.median(worked)}


def goodness(metrics: Any) -> float | None:
    """The objective of the lookups."""
    return metrics.get("output_tok_s")


def measure(store: Store, count: int, dice: random.Random) -> dict[str, float]:
    """Every question at this size."""
    known = [scenario(dice.randrange(count)) for _ in range(20)]
    absent = [
        replace(one, hardware=Hardware("gpu", {**one.hardware.facts, "power_limit_w": 350}, host="bench"))
        for one in known
    ]
    keys = [one.key for one in known]
    newest = select(trials.c.id).order_by(trials.c.ended_at.desc()).limit(20)
    label = select(trials).join(scenarios).where(scenarios.c.hardware_key == known[0].hardware.key)
    made = [trial(keys[0], 0, dice) for _ in range(50)]
    packed = [samples(one.id, dice) for one in made]
    questions: dict[str, Callable[[int], Any]] = {
        "best": lambda n: _found(store.best(known[n], goodness), "exact"),
        "near": lambda n: _found(store.best(absent[n], goodness), "near"),
        "hardware": lambda n: _found(store.best(known[n].hardware, goodness, engine="native"), "exact"),
        "filter": lambda n: store.rows(newest.where(trials.c.status == "oom")),
        "stage": lambda n: store.trials(keys[n], stage="confirm"),
        "machine": lambda n: store.rows(label.where(trials.c.stage == "confirm").limit(20)),
        "write": lambda n: store.add(made[n], packed[n]),
    }
    found: dict[str, float] = {}
    for name, ask in questions.items():
        found |= timed(name, 50 if name == "write" else 20, ask)
    return found


def _found(best: Any, tier: str) -> None:
    assert best is not None and best.match.tier == tier, (tier, best and best.match.tier)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="10,000 and 30,000 trials instead of up to 1,000,000")
    parser.add_argument(
        "--db", help="an address of an empty database, such as a postgresql:// URL; else a temporary file"
    )
    options = parser.parse_args()
    sizes = [10_000, 30_000] if options.quick else [10_000, 100_000, 1_000_000]
    dice = random.Random(1)
    with tempfile.TemporaryDirectory() as folder, open_store(options.db or Path(folder) / "tuning.db") as store:
        first, table = 0, []
        for number, size in enumerate(sizes):
            rates = fill(store, first, size // PER_SCENARIO, dice)
            first = size // PER_SCENARIO
            row = {"trials": size, **rates, **measure(store, first, dice)}
            row |= imported(store, Path(folder), number, dice)
            if store.engine.dialect.name == "sqlite":
                row["bytes_per_trial"] = round(Path(store.where).stat().st_size / size)
            table.append(row)
            shown = {name: f"{1000 * value:.2f} ms" if isinstance(value, float) else value
                     for name, value in row.items()}  # fmt: skip
            print("  ".join(f"{name} {value}" for name, value in shown.items()), file=sys.stderr, flush=True)
        ident = new_id()
        one = rows.samples_row(ident, samples(ident, dice))
    blob = {
        "requests": 100,
        "tokens": 32,
        "bytes": len(one["blob"]),
        "bytes_per_time": round(len(one["blob"]) / 3300, 2),
    }
    missed = [name for name, limit in LIMITS.items() if table[-1][name] > limit]
    missed += [name for name, least in LEAST.items() if table[-1][name] < least]
    slow = min(timed("loop", 5, lambda n: sum(i * i for i in range(1_000_000)))["loop_cpu_s"], 9.0)
    print(
        json.dumps(
            {
                "sizes": table,
                "samples": blob,
                "limits": LIMITS | LEAST,
                "missed": missed,
                "ns_of_a_python_loop": round(1e3 * slow),
            }
        )
    )


if __name__ == "__main__":
    main()
