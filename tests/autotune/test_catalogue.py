"""Named hardware: counts, kinds, and one clear line for names that are none."""

from __future__ import annotations

import pytest

from autotune.catalogue import DEVICES, GIB, HardwareError, named


def test_names_of_the_issue():
    four = named("4xA100-80GB")
    assert (four.count, four.capability, four.link) == (4, "8.0", "NVLink")
    assert four.memory_bytes == pytest.approx(79.15 * GIB, abs=1)
    assert named("8xA100-40GB").memory_bytes == pytest.approx(39.39 * GIB, abs=1)
    assert named("4xa100-80gb-pcie").link == "PCIe"
    assert named("H100-80GB").count == 1 and named("H100-80GB").link == "none"


@pytest.mark.parametrize("name", DEVICES)
def test_every_device_is_found_by_its_name(name):
    assert named(f"2x{name}").name == f"2x{name}"
    assert DEVICES[name].bandwidth > DEVICES[name].link_bandwidth / 2 > 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("4xA100-90GB", "did you mean 4xA100-80GB"),
        ("8xa100_40gb", "did you mean 8xA100-40GB"),
        ("toaster", "known are A100-80GB"),
        ("0xA100-80GB", "1 to 1024 devices"),
        ("4x A100 80GB", "COUNTxDEVICE"),
        ("", "COUNTxDEVICE"),
    ],
)
def test_other_names_are_refused_with_the_nearest(text, said):
    with pytest.raises(HardwareError, match=said):
        named(text)
