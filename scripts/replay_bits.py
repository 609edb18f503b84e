"""Replays the choice of bits on a table of every allocation: the knapsack and its level switches beside the optimum.

`python scripts/replay_bits.py` prints, for each byte budget, KL as a multiple of the exhaustive optimum's. The last
line is one JSON object.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from autotune.allocation import Costs, allocate, refine, size

TABLE = Path(__file__).parent / "data" / "native_bits.jsonl.gz"
BUDGETS = 40
LIMIT = 40
"""Whole-model KL measurements that one budget may take."""


def read(path: Path) -> tuple[dict[str, Any], dict[tuple[int, ...], float], Costs]:
    """The header, {widths in the order of the groups: KL}, and bytes with predicted KL by group and width."""
    with gzip.open(path, "rt") as file:
        head, *rows = map(json.loads, file)
    levels = list(head["knobs"].values())
    table = {tuple(values[c] for values, c in zip(levels, row["c"], strict=True)): row["v"][0] for row in rows}
    costs = {
        group: {w: (head["bytes"][group][str(w)], head["fisher"][group][str(w)]) for w in values}
        for group, values in head["knobs"].items()
    }
    return head, table, costs


def report(path: Path) -> dict[str, Any]:
    """Print the table and give its figures: ratios to the optimum over all budgets, and measurements spent."""
    _, table, costs = read(path)
    groups = list(costs)

    def measured(widths: Mapping[str, int]) -> float:
        return table[tuple(widths[g] for g in groups)]

    sizes = np.array([size(costs, dict(zip(groups, key, strict=True))) for key in table])
    kls = np.array(list(table.values()))
    uniform = {w: dict.fromkeys(groups, w) for w in next(iter(costs.values()))}
    budgets = np.geomspace(sizes.min() * 1.001, sizes.max(), BUDGETS)
    rows = []
    for budget in budgets:
        best = float(kls[sizes <= budget].min())
        plain = allocate(costs, budget)
        found = refine(costs, budget, lambda widths: np.array([measured(widths)]), LIMIT)
        assert plain is not None and found is not None
        flat = min(measured(w) for w in uniform.values() if size(costs, w) <= budget)
        rows.append((budget, best, measured(plain) / best, float(found.kl[0]) / best, flat / best, found.evaluations))
    print(f"{'bytes':>10}{'best KL':>12}{'knapsack':>10}{'switched':>10}{'uniform':>9}{'measured':>10}")
    for budget, best, plain, switched, flat, count in rows:
        print(
            f"{budget:>10,.0f}{best:>12.6f}{f'×{plain:.3f}':>10}{f'×{switched:.3f}':>10}{f'×{flat:.2f}':>9}{count:>10}"
        )
    plain, switched, flat, spent = (list(column) for column in list(zip(*rows, strict=True))[2:])
    return {
        "budgets": len(rows), "allocations": len(table), "knapsack_worst": round(max(plain), 4),
        "switched_worst": round(max(switched), 4), "switched_median": round(statistics.median(switched), 4),
        "within_2_percent": sum(x <= 1.02 for x in switched),
        "above_uniform": sum(x > y for x, y in zip(switched, flat, strict=True)),
        "measurements_median": statistics.median(spent), "measurements_most": max(spent),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", type=Path, nargs="?", default=TABLE)
    print(json.dumps(report(parser.parse_args().table)))


if __name__ == "__main__":
    main()
