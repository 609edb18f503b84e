"""The shell export: run by a real sh, it starts exactly the configuration, whatever the texts in it."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from contracts.exporter import HOSTILE, ExporterContract, an_export

from autotune.exporters import Export, Exporter, ExportError, exporter
from search_spaces import load

GOLDEN = Path(__file__).parents[2] / "golden" / "serve.sh"


class TestShell(ExporterContract):
    @pytest.fixture
    def exporter(self) -> Exporter:
        return exporter("shell")


def test_the_script_stays_as_it_was_released() -> None:
    assert exporter("shell").render(an_export())["serve.sh"] == GOLDEN.read_text()


def _run(export: Export, folder: Path) -> list[str]:
    """The arguments that the script gives to a stand-in for `autotune`."""
    stand_in = folder / "autotune"
    stand_in.write_text('#!/bin/sh\nfor a in "$OMP_WAIT_POLICY" "$@"; do printf "%s\\0" "$a"; done\n')
    stand_in.chmod(0o755)
    script = folder / "serve.sh"
    script.write_bytes(exporter("shell").render(export)["serve.sh"].encode("utf-8", "surrogateescape"))
    path = {"PATH": f"{folder}:/usr/bin:/bin"}
    done = subprocess.run(["sh", script, "--port", "1"], capture_output=True, env=path, cwd=folder, check=True)
    assert not done.stderr
    return done.stdout.decode("utf-8", "surrogateescape").split("\0")[:-1]


@pytest.mark.parametrize("text", ["/models/reference", HOSTILE, "'", "\n", "-x", ""])
def test_it_starts_exactly_the_configuration(text: str, tmp_path: Path) -> None:
    export = an_export(folder=text, model={"name": text}, hardware={"label": text})
    export = replace(export, evidence=replace(export.evidence, round=text, metrics={text: 1.0}))
    policy, *words = _run(export, tmp_path)
    assert policy == "PASSIVE"
    assert words[:5] == ["serve", "--engine", "native", "--model", text]
    assert words[-2:] == ["--port", "1"]
    assert "prefix_reuse=true" in words and "bits_experts=4" in words and "attention=sparse" in words
    assert words.count("--set") == len(export.config)
    assert not (tmp_path / "x").exists()


def test_a_server_of_another_project_is_started_by_its_own_command(tmp_path: Path) -> None:
    config = load("vllm", "cpu").complete({"max_num_seqs": 8, "prefix_caching": False})
    export = replace(an_export(folder="my model"), engine="vllm", engine_build={"vllm": "0.32.0+cpu"}, config=config,
                     effective={"max_model_len": 513})  # fmt: skip
    text = exporter("shell").render(export)["serve.sh"]
    (tmp_path / "vllm").write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n')
    (tmp_path / "vllm").chmod(0o755)
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(["sh", "-c", text, "sh", "--port", "1"], capture_output=True, env=path, check=True, text=True)
    words = done.stdout.split("\0")[:-1]
    assert words[:2] == ["serve", "my model"] and words[-4:] == ["--max-model-len", "513", "--port", "1"]
    assert "--no-enable-prefix-caching" in words and words[words.index("--max-num-seqs") + 1] == "8"
    assert "--enable-chunked-prefill" in words and "--no-enforce-eager" in words


def test_a_kept_default_is_said() -> None:
    export = an_export()
    kept = replace(export, evidence=replace(export.evidence, verdict="unclear"))
    assert "default stays" in exporter("shell").render(kept)["serve.sh"]
    assert "default stays" not in exporter("shell").render(export)["serve.sh"]


def test_nul_and_unknown_exporters_are_refused() -> None:
    with pytest.raises(ExportError, match="--to json"):
        exporter("shell").render(an_export(folder="a\0b"))
    with pytest.raises(ExportError, match="json, shell, vllm-yaml"):
        exporter("helm")
