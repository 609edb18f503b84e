"""Records for tests of the tuning database, and text that has broken databases before."""

from __future__ import annotations

from typing import Any

from tuning_db import Hardware, Sample, Scenario, Trial, new_id

HOSTILE = "'; DROP TABLE trials; --\"%_\\ \x01\x7f\u202e é é 😀 \n\t"


def make_scenario(**changes: Any) -> Scenario:
    """A scenario on a small CPU machine."""
    hardware = Hardware("cpu", {"cpu_model": "Intel(R) Xeon(R) CPU @ 2.20GHz", "cores": 2, "memory_bytes": 8 << 30})
    parts: dict[str, Any] = {
        "hardware": hardware,
        "engine": "native",
        "engine_build": {"version": "1.0", "torch": "2.9"},
        "model": {"name": "small", "digest": "abc"},
        "workload": {"name": "chat", "requests": 8},
        "objective": {"name": "throughput"},
    }
    return Scenario(**(parts | changes))


def make_trial(scenario_key: str, **changes: Any) -> Trial:
    """A good trial whose configuration no other trial has."""
    ident = changes.get("id", new_id())
    parts: dict[str, Any] = {
        "id": ident,
        "scenario_key": scenario_key,
        "stage": "search",
        "config": {"kv_dtype": "int8", "max_seqs": 8, "share": 0.5, "graphs": True},
        "config_key": f"c1:{ident}",
        "status": "ok",
        "metrics": {"ttft_p99": 0.25, "tokens_per_s": 100.0},
        "seconds": {"launch": 1.5},
        "effective": {"kv_dtype": "int8", "layers": [1, 2]},
        "counters": {"tokens": 12},
        "seed": 7,
        "started_at": 1000.0,
        "ended_at": 1002.5,
        "provenance": {"pid": 1},
    }
    return Trial(**(parts | changes))


def make_samples(trial_id: str, count: int = 3) -> list[Sample]:
    """Samples with times that no short decimal has."""
    times = [0.1 + 0.01 / 3 * step for step in range(4)]
    return [Sample(trial_id, i, {"turn": i}, i / 7, tuple(t + i for t in times), 5, 4) for i in range(count)]
