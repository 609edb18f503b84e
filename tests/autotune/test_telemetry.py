"""Throttling, from what the system and the driver say."""

from __future__ import annotations

from pathlib import Path

from autotune.telemetry import Watch, slow_gpu, stopped_seconds


def test_a_cpu_quota_that_stopped_the_run_is_named(tmp_path: Path) -> None:
    stat = tmp_path / "cpu.stat"
    stat.write_text("usage_usec 5\nnr_throttled 1\nthrottled_usec 1000000\n")
    watch = Watch(stat)
    assert stopped_seconds(stat) == 1.0 and watch.fault() == ""
    stat.write_text("usage_usec 5\nnr_throttled 9\nthrottled_usec 900000000\n")
    assert "the CPU quota stopped the run" in watch.fault()
    assert Watch(tmp_path / "none").fault() == ""


def test_a_gpu_below_its_clock_or_slowed_down_is_named() -> None:
    assert slow_gpu("1410, 1410, Not Active\n1400, 1410, Not Active\n") == ""
    assert "GPU 1 runs at 900 of 1410 MHz" in slow_gpu("1410, 1410, Not Active\n900, 1410, Not Active\n")
    assert "GPU 0 reports a hardware slow-down" in slow_gpu("1410, 1410, Active\n")
    assert slow_gpu("") == slow_gpu("[N/A], [N/A], [N/A]\n") == ""
    assert "throttled" in Watch(Path("none"), lambda query: "1, 1410, Not Active\n").fault()
