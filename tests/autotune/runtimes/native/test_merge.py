"""What several ranks report reads as if one engine had reported it."""

from __future__ import annotations

from typing import Any

from autotune.runtimes.native.merge import merge


def test_bytes_add_up_times_are_the_slowest_ranks_and_counts_are_each_replicas() -> None:
    def rank(tokens: float, seconds: float, waited: float) -> dict[str, float]:
        return {"decode_tokens": tokens, "weight_bytes": 10.0, "cpu_seconds": 1.0, "load_seconds": seconds,
                "working_seconds": 4.0, "communication_seconds": waited, "communication_bytes": 6.0}  # fmt: skip

    found = merge("counters", [[rank(5, 1, 1), rank(5, 2, 3)], [rank(7, 1, 2), rank(7, 1, 2)]], {})
    assert found["decode_tokens"] == 12
    assert found["weight_bytes"] == 40 and found["cpu_seconds"] == 4 and found["communication_bytes"] == 24
    assert found["load_seconds"] == 2 and found["communication_seconds"] == 3
    assert found["communication_share"] == 3 / 4
    assert "communication_share" not in merge("counters", [[{"working_seconds": 4.0}]], {})


def test_the_rank_that_did_not_obey_is_the_one_that_shows() -> None:
    def rank(stage: int, kv: str, kernel: str) -> dict[str, Any]:
        return {"kv_dtype": kv, "kernels": kernel, "bits_stored": {f"{stage}.dense": 8}, "stage": (stage, 2)}

    found = merge("effective", [[rank(0, "int8", "int8"), rank(1, "bf16", "fp32,int8")]], {"kv_dtype": "int8"})
    assert found == {"kv_dtype": "bf16", "kernels": "fp32,int8", "bits_stored": {"0.dense": 8, "1.dense": 8},
                     "dp": 1, "stages": [2, 2]}  # fmt: skip


def test_scores_come_back_in_the_order_of_the_sequences() -> None:
    for replicas in (1, 2, 3):
        for count in range(6):
            parts = [[list(range(count))[r::replicas]] for r in range(replicas)]
            assert merge("score", parts, {}) == list(range(count))


def test_a_call_without_a_rule_is_answered_by_the_first_rank() -> None:
    assert merge("reset", [[None, None]], {}) is None
