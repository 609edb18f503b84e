"""The case of the slow Flash: the published slow configuration, in native-engine terms, against the tuned winner.

`python scripts/case_slow_flash.py best.json` measures both on the task workload in interleaved blocks, each run a fresh
launch, and prints the published figures beside ours with 95 % intervals. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np

from autotune import stats
from autotune.bench import Bench
from autotune.exporters.json_file import read
from autotune.ladder import PIECE
from autotune.outcome import Status
from autotune.plan import Plan
from autotune.quality import kl_divergence
from autotune.runtimes.base import Endpoint, Generation
from autotune.setting import Setting, make_bench, prepare
from search_spaces import Config
from search_spaces.presets import preset
from tuning_db import Store, open_store

PUBLISHED = {
    "task_seconds": ("latency of a task", "14.4 → 7.2 min, ×0.50"),
    "tasks_per_min": ("tasks a minute", "4.17 → 7.14, ×1.71"),
    "repeated_seconds": ("repeated request", "×0.42 (−58 %)"),
}
REPEATED = (1000, 16)
"""Prompt and output tokens of the request that is sent again."""


def repeated_seconds(endpoint: Endpoint, prompt: tuple[int, ...]) -> float:
    """Seconds of a request that the engine has answered before: the median of three."""

    async def once() -> float:
        start = time.monotonic()
        async for _ in endpoint.stream(Generation(prompt, REPEATED[1])):
            pass
        return time.monotonic() - start

    asyncio.run(once())
    return statistics.median(asyncio.run(once()) for _ in range(3))


def quality(bench: Bench, setting: Setting, config: Config) -> dict[str, tuple[float, float, float]]:
    """Mean KL and perplexity against full width, each with its 95 % interval over pieces of the text."""
    assert bench.quality is not None
    pairs = list(zip(bench.quality.reference(), bench.score(config, setting.heldout), strict=True))
    kl = np.concatenate([kl_divergence(reference, score) for reference, score in pairs])
    lost = np.concatenate([reference.logprobs - score.logprobs for reference, score in pairs])
    pieces = [[float(piece.mean()) for piece in np.array_split(values, len(values) // PIECE)] for values in (kl, lost)]
    worse, ratio = map(stats.interval, pieces)
    return {
        "KL": (worse.mean, worse.low, worse.high),
        "perplexity ratio": (math.exp(ratio.mean), math.exp(ratio.low), math.exp(ratio.high)),
    }


def measure(bench: Bench, config: Config, block: int, source: Any) -> dict[str, float]:
    """One block of one side. Raises RuntimeError when it does not run."""
    outcome = replace(bench, quality=None).measure(config, block, "case")
    if outcome.status is not Status.OK:
        raise RuntimeError(f"{outcome.status}: {outcome.reason}")
    with bench.runtime.launch(config, bench.logs / "repeated.log") as endpoint:
        start = block * 37
        again = repeated_seconds(endpoint, tuple(source[start : start + REPEATED[0]]))
    spans: dict[int, list[float]] = {}
    for timeline in outcome.timelines:
        ends = spans.setdefault(timeline.conversation, [])
        ends += [timeline.sent, timeline.token_times[-1]]
    return {
        "task_seconds": statistics.mean(max(ends) - min(ends) for ends in spans.values()),
        "tasks_per_min": outcome.metrics["tasks_per_min"],
        "repeated_seconds": again,
    }


def compare(setting: Setting, store: Store, sides: dict[str, Config], blocks: int) -> dict[str, Any]:
    """Run the blocks and print the table."""
    with tempfile.TemporaryDirectory() as logs:
        bench = make_bench(setting, store, Path(logs))
        rows: dict[str, dict[str, dict[int, float]]] = {side: {} for side in sides}
        for block in range(1, blocks + 1):
            for side in sorted(sides, reverse=block % 2 == 0):
                for name, value in measure(bench, sides[side], block, setting.source).items():
                    rows[side].setdefault(name, {})[block] = value
        judged = {side: quality(bench, setting, config) for side, config in sides.items()}
    found: dict[str, Any] = {}
    print(f"{'':<20}{'published':<26}{'as shipped':>12}{'tuned':>12}   ratio (95 %)")
    for name, (title, published) in PUBLISHED.items():
        slow, fast = rows["as shipped"][name], rows["tuned"][name]
        ratio = stats.ratio(fast, slow, higher=True)
        assert ratio is not None
        medians = statistics.median(slow.values()), statistics.median(fast.values())
        print(f"{title:<20}{published:<26}{medians[0]:>12.3g}{medians[1]:>12.3g}   ×{ratio.mean:.3f}", end="")
        print(f" [{ratio.low:.3f}, {ratio.high:.3f}]")
        found[name] = {"ratio": ratio.mean, "low": ratio.low, "high": ratio.high}
    print(f"{'quality kept':<20}{'59.5 of 60 points':<26}inside the gate: KL ≤ {bench.gate.kl}, ", end="")
    print(f"perplexity ≤ ×{bench.gate.perplexity}")
    for side, figures in judged.items():
        print(f"  {side:<18}" + ", ".join(f"{n} {v[0]:.5f} [{v[1]:.5f}, {v[2]:.5f}]" for n, v in figures.items()))
        found[f"quality {side}"] = figures
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("export", type=Path, help="best.json of `autotune export`")
    parser.add_argument("--blocks", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, open_store(str(Path(folder) / "case.db")) as store:
        setting = prepare(Plan(workload="task"))
        slow, left = preset("flash-as-shipped").config(setting.whole)
        for name, reason in left.items():
            print(f"left out here: {name}: {reason}")
        tuned = setting.whole.complete(dict(read(options.export).config))
        found = compare(setting, store, {"as shipped": slow, "tuned": tuned}, options.blocks)
    print(json.dumps(found))


if __name__ == "__main__":
    sys.exit(main())
