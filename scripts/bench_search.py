"""How near to a measured table's optimum each searcher is after 10 to 100 evaluations, in one run, with the same seeds.

`python scripts/bench_search.py --quick` takes under a minute; without it every table, every searcher and 20 seeds.
Tables: scripts/data/*.jsonl.gz and ../shared/data/*.csv.gz. Curves are kept in --raw and not computed again. Then the
tuner's confirmation rule is replayed on the same tables. The last line is one JSON object. Tools of other people come
with `pip install '.[bench]'`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import replay_bits
import replay_confirm as confirm
from replay import Replay
from replay_peers import SEARCHERS, missing, play
from tables import DATA, Table, read

from autotune import stats

AT = (10, 20, 30, 50, 75, 100)
NEAR = 0.95
HOME = "autotune"
SHARED = Path(__file__).parents[2] / "shared" / "data"

Key = tuple[str, str, int, int]
"""Table, searcher, seed, budget."""


def curves(tables: Mapping[str, Path], keys: Sequence[Key], raw: Path, jobs: int) -> dict[Key, list[float]]:
    """The curve of each key, from ``raw`` or played now and appended to it."""
    found: dict[Key, list[float]] = {}
    if raw.is_file():
        for line in raw.read_text(encoding="utf-8").splitlines():
            *key, curve = json.loads(line)
            found[tuple(key)] = curve
    todo = [(tables[key[0]], key) for key in keys if key not in found]
    raw.parent.mkdir(parents=True, exist_ok=True)
    with raw.open("a", encoding="utf-8") as file, ProcessPoolExecutor(jobs) as pool:
        for key, curve in pool.map(_played, todo):
            found[key] = curve
            file.write(json.dumps([*key, [round(v, 5) for v in curve]]) + "\n")
            file.flush()
    return {key: found[key] for key in keys}


def _played(job: tuple[Path, Key]) -> tuple[Key, list[float]]:
    path, key = job
    _, searcher, seed, budget = key
    return key, play(searcher, Replay(read(path), seed, budget))


def summary(by_seed: Sequence[Sequence[float]], budget: int) -> dict[str, Any]:
    """Median and quartiles at each of AT, a bootstrap interval of the median at 50, and trials to NEAR (None: more)."""
    scores = np.array(by_seed)
    found: dict[str, Any] = {"seeds": len(scores)}
    for n in AT:
        if n <= scores.shape[1]:
            found[f"@{n}"] = [round(float(q), 3) for q in np.quantile(scores[:, n - 1], (0.25, 0.5, 0.75))]
    last = min(50, scores.shape[1])
    draws = np.random.default_rng(0).integers(0, len(scores), (2000, len(scores)))
    medians = np.median(scores[draws, last - 1], axis=1)
    found["ci50"] = [round(float(q), 3) for q in np.quantile(medians, (0.025, 0.975))]
    reached = [next((i + 1 for i, v in enumerate(row) if v >= NEAR), budget + 1) for row in by_seed]
    median = statistics.median(reached)
    found["to95"] = median if median <= budget else None
    return found


def compare(mine: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> float:
    """One-sided paired Wilcoxon p that ``mine`` is ahead after 50 evaluations (or all, below that)."""
    last = min(50, len(mine[0])) - 1
    return stats.signed_rank([round(a[last] - b[last], 5) for a, b in zip(mine, other, strict=True)])


def holm(ps: Mapping[str, float]) -> dict[str, float]:
    """Holm's step-down correction."""
    found, most = {}, 0.0
    for rank, (name, p) in enumerate(sorted(ps.items(), key=lambda item: item[1])):
        most = max(most, min(1.0, p * (len(ps) - rank)))
        found[name] = round(most, 4)
    return found


def report(table: Table, found: Mapping[str, Sequence[Sequence[float]]], budget: int) -> dict[str, Any]:
    """Print one table's lines and return them."""
    failed = sum(not blocks for blocks in table.blocks.values())
    print(
        f"\n{table.name}: {len(table.blocks)} valid configurations, {failed} fail; {table.metric}, "
        f"{max(map(len, table.blocks.values()))} blocks; median [quartiles] of the fraction of the optimum"
    )
    rows = {name: summary(by_seed, budget) for name, by_seed in found.items()}
    ps = {name: compare(found[HOME], by_seed) for name, by_seed in found.items() if HOME in found and name != HOME}
    corrected = holm(ps)
    shown = [n for n in AT if n <= budget]
    print(f"{'':14}" + "".join(f"{'@' + str(n):>19}" for n in shown) + f"{'95% CI at 50':>17}{'to 95%':>8}{'p':>8}")
    for name, row in rows.items():
        cells = [row.get(f"@{n}") for n in shown]
        text = "".join(f"{f'{c[1]:.3f} [{c[0]:.2f},{c[2]:.2f}]' if c else '':>19}" for c in cells)
        reached = f">{budget}" if row["to95"] is None else f"{row['to95']:g}"
        ci = "{:.2f}–{:.2f}".format(*row["ci50"])
        print(f"{name:14}{text}{ci:>17}{reached:>8}{corrected.get(name, ''):>8}")
        if name in corrected:
            row["p"] = corrected[name]
    return rows


def confirmations(table: Table, problems: int, replays: int) -> dict[str, Any]:
    """T4 on one table: the race, then equal twins and +10 %."""
    real = max(map(len, table.blocks.values())) > 1
    kind = "recorded blocks" if real else "SIMULATED noise"
    found: dict[str, Any] = {"noise": kind}
    found |= confirm.rule(table, problems, confirm.recorded if real else confirm.simulated)
    found["simulated"] = confirm.rule(table, problems, confirm.simulated) if real else {}
    print(
        f"\n{table.name}, {kind}: race of {confirm.FINALISTS}, {problems} problems: regret {found['regret']:.2f} %, "
        f"claim {found['claim_bias']:+.2f} % (absolute {found['claim_error']:.2f} %), worse than the default "
        f"{found['worse_than_default']} times, {found['runs']:.0f} runs"
    )
    if real:
        other = found["simulated"]
        print(
            f"  with SIMULATED noise of {confirm.NOISE:.0%} a block instead: regret {other['regret']:.2f} %, claim "
            f"{other['claim_bias']:+.2f} % (absolute {other['claim_error']:.2f} %)"
        )
    for name, factor in (("aa", 1.0), ("plus10", 1.1)):
        found[name] = confirm.pair(table, replays, factor)
        print(f"  {name}: " + ", ".join(f"{verdict} {count}" for verdict, count in found[name].items()))
    return found


def available(folders: Iterable[Path]) -> dict[str, Path]:
    paths = [path for folder in folders for kind in ("*.jsonl.gz", "*.csv.gz") for path in sorted(folder.glob(kind))]
    return {read(path).name: path for path in paths if path.name != replay_bits.TABLE.name}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="4 seeds, 50 evaluations, the quick searchers")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=0, help="seeds the method was not tuned on prove more")
    parser.add_argument("--budget", type=int, default=100)
    parser.add_argument("--searchers", default=",".join(SEARCHERS))
    parser.add_argument("--data", type=Path, action="append", help="folder of tables (repeatable)")
    parser.add_argument("--raw", type=Path, default=Path("bench-search.jsonl"))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.budget, options.searchers = 4, 50, "autotune,random,optuna-tpe,kernel_tuner"
        options.raw = Path(os.devnull)
    tables = available(options.data or [DATA, SHARED])
    if not tables:
        sys.exit("no table was found; record one with scripts/record_table.py, or name a folder with --data")
    absent = missing()
    names = [name for name in options.searchers.split(",") if name not in absent]
    for name in absent:
        print(f"{name} is not installed and left out; pip install '.[bench]'")
    start = time.monotonic()
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    keys = [(t, name, seed, options.budget) for t in tables for name in names for seed in seeds]
    found = curves(tables, keys, options.raw, options.jobs)
    result: dict[str, Any] = {"search": {}, "confirm": {}, "missing": absent}
    for t, path in tables.items():
        table = read(path)
        rows = {name: [found[t, name, seed, options.budget] for seed in seeds] for name in names}
        result["search"][t] = report(table, rows, options.budget)
    for t, path in tables.items():
        result["confirm"][t] = confirmations(read(path), *((30, 30) if options.quick else (300, 100)))
    if replay_bits.TABLE.is_file():
        print("\nbits: an allocation for each budget, beside the best of all")
        result["bits"] = replay_bits.report(replay_bits.TABLE)
    result["seconds"] = round(time.monotonic() - start, 1)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
