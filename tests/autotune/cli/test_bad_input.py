"""Whatever is wrong with the input: one clear line, exit code 2 or 3, and nothing overwritten."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from autotune.setting import reference_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(reference_model(), tmp_path / "model"))


def refused(done, code: int, *words: str) -> None:
    assert done.returncode == code, (done.returncode, done.stderr)
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert "Traceback" not in done.stderr
    assert len([line for line in lines if line.startswith(("autotune:", "Error:"))]) == 1, done.stderr
    for word in words:
        assert word in done.stderr, done.stderr


def edited(model: Path, **values: object) -> str:
    config = json.loads((model / "config.json").read_text())
    config["text_config"].update(values)
    (model / "config.json").write_text(json.dumps(config))
    return str(model)


def test_missing_model_folder(autotune) -> None:
    refused(autotune("search", "--model", "nowhere"), 2, "nowhere")


def test_missing_weights(autotune, model: Path) -> None:
    (model / "model.safetensors").unlink()
    refused(autotune("search", "--model", str(model)), 2, "safetensors")


@pytest.mark.parametrize("keep", [4, 500, 100_000])
def test_truncated_weights(autotune, model: Path, keep: int) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refused(autotune("search", "--model", str(model)), 2, "model.safetensors")


def test_another_architecture(autotune, model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    config["model_type"] = config["text_config"]["model_type"] = "llama"
    config["architectures"] = ["LlamaForCausalLM"]
    (model / "config.json").write_text(json.dumps(config))
    refused(autotune("search", "--model", str(model)), 2, "glm5_next")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_size", -5),
        ("hidden_size", "many"),
        ("num_hidden_layers", 10**12),
        ("n_routed_experts", 0),
        ("index_kpool", None),
    ],
)
def test_absurd_config_values(autotune, model: Path, name: str, value: object) -> None:
    refused(autotune("search", "--model", edited(model, **{name: value})), 2, name)


def test_config_that_is_not_json(autotune, model: Path) -> None:
    (model / "config.json").write_text("{oh no")
    refused(autotune("search", "--model", str(model)), 2, "config.json")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("budget = = 3", "TOML"),
        ("budgets = 3", "did you mean budget"),
        ("[knobs]\nkv_dtyp = 'int8'", "did you mean kv_dtype"),
        ("[knobs]\nkv_dtype = 'int9'", "kv_dtype cannot be"),
        ("[knobs]\ntp = 8", "8 ranks need 8 devices"),
    ],
)
def test_broken_plans(autotune, home: Path, text: str, word: str) -> None:
    (home / "broken.toml").write_text(text)
    refused(autotune("search", "--plan", "broken.toml"), 2, word)


@pytest.mark.parametrize(
    "words",
    [
        ("--budget", "0"), ("--budget", "-3"), ("--max-kl", "nan"), ("--objective", "taks_per_min"),
        ("--engine", "natve"), ("--workload", "chats"),
    ],
)  # fmt: skip
def test_wrong_options(autotune, words: tuple[str, ...]) -> None:
    refused(autotune("search", *words), 2)


def test_a_corrupt_database_is_never_overwritten(autotune, home: Path) -> None:
    file = home / "corrupt.db"
    file.write_bytes(b"SQLite format 3\0" + b"\xff" * 5000)
    before = file.read_bytes()
    refused(autotune("search", "--db", str(file)), 2, "corrupt.db")
    refused(autotune("query", "--db", str(file)), 2, "corrupt.db")
    assert file.read_bytes() == before


def test_a_file_that_is_something_else(autotune, home: Path) -> None:
    file = home / "letter.txt"
    file.write_text("Dear database,\n" * 100)
    refused(autotune("search", "--db", str(file)), 2, "letter.txt")
    assert file.read_text().startswith("Dear")


def test_an_unwritable_place(autotune) -> None:
    refused(autotune("search", "--db", "/proc/nowhere/t.db"), 2, "/proc/nowhere")


def test_a_full_disk(autotune, home: Path, environment) -> None:
    """A limit on file sizes stands in for the full disk: the same failure of write(), without a disk to fill."""
    import subprocess
    import sys

    done = subprocess.run(
        ["bash", "-c", f"ulimit -f 60; {sys.executable} -m autotune search --budget 2 --plan plan.toml --db full.db"],
        capture_output=True,
        text=True,
        env=environment,
        cwd=home,
        timeout=120,
    )
    assert done.returncode in (1, 2, 3), (done.returncode, done.stderr)
    assert "Traceback" not in done.stderr
    assert "full.db" in done.stderr


def test_questions_without_an_answer(searched, autotune) -> None:
    refused(autotune("show", "ffffffff"), 2)
    refused(autotune("query", "tasks_per_mn>3"), 2)
    refused(autotune("export", "-o", "-", "--db", "empty.db"), 2, "run `autotune search` first")
