"""`autotune capacity` on the real engine: loads in order, one launch, and an exit code where none will do."""

from __future__ import annotations

import json


def test_the_load_grows_while_the_slo_is_kept(autotune) -> None:
    done = autotune("capacity", "--slo", "e2e_p90<60s", "--start", "2", "--steps", "3", "--workload", "tiny.toml",
                    "--format", "json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["capacity"]
    assert [row["load"] for row in rows] == [2, 4, 8] and {row["verdict"] for row in rows} == {"unproven"}
    assert "highest rate: 8, unproven" in done.stderr


def test_an_slo_that_no_load_keeps_is_exit_3(autotune) -> None:
    done = autotune("capacity", "--slo", "ttft_p90<1us", "--by", "concurrency", "--start", "2", "--workload",
                    "tiny.toml")  # fmt: skip
    assert done.returncode == 3 and "no concurrency from 1 on keeps every SLO" in done.stderr
    assert "not met" in done.stdout


def test_an_unknown_metric_is_wrong_usage(autotune) -> None:
    done = autotune("capacity", "--slo", "ttff_p90<1s")
    assert done.returncode == 2 and "ttff_p90" in done.stderr
