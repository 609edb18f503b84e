"""The built distribution holds everything that a user of an installed `autotune` needs."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
NEEDED = (
    "autotune/data/reference/model.safetensors",
    "autotune/data/reference/config.json",
    "autotune/data/reference/tokenizer.json",
    "autotune/data/reference/LICENSE",
    "autotune/data/heldout.txt",
    "autotune/workloads/task.toml",
    "search_spaces/native.py",
    "tuning_db/migrations/env.py",
)


def test_the_wheel_is_complete(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        tmp_path,
        ROOT,
    ]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert not [name for name in NEEDED if name not in names]
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert tops == {"autotune", "search_spaces", "tuning_db"}


def test_the_reference_stays_small() -> None:
    assert (ROOT / "autotune/data/reference/model.safetensors").stat().st_size <= 20_000_000
