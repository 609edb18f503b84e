"""vLLM's own configuration file: what it says is what the command line says, to YAML and to vLLM's own parser."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from contracts import vllm_parser
from contracts.exporter import HOSTILE, an_export
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from autotune.exporters import Export, ExportError, exporter
from autotune.exporters.shell import vllm_command
from search_spaces import Config, load

COMMAND = os.environ.get("TEST_VLLM_COMMAND", "")
NOT_KNOBS = {"config", "model", "model_tag"}


def of(config: Config, platform: str, folder: str = "model") -> Export:
    effective = {} if "max_model_len" in config else {"max_model_len": 512}
    build = {"vllm": f"0.32.0+{platform}"}
    return an_export(engine="vllm", engine_build=build, config=dict(config), folder=folder, effective=effective)


def configs(platform: str) -> st.SearchStrategy[Config]:
    space = load("vllm", platform)
    fixed = {"kv_cap": 0, "pp_last_fewer": 0} if platform == "gpu" else {}
    values = {k.name: st.sampled_from(k.domain.values) for k in space.knobs if k.name not in fixed}
    return st.fixed_dictionaries(values).map(lambda found: space.complete({**found, **fixed}))


def spoken(table: dict[str, Any]) -> list[str]:
    """The words that vLLM makes of a file, by the words of its documentation."""
    words: list[str] = []
    for key, value in table.items():
        if isinstance(value, bool):
            words.append(f"--{'' if value else 'no-'}{key}")
        else:
            words += [f"--{key}", json.dumps(value, sort_keys=True) if isinstance(value, dict) else str(value)]
    return words


@settings(max_examples=80, deadline=None)
@given(data=st.data(), platform=st.sampled_from(["cpu", "gpu"]), folder=st.sampled_from(["a b", "007", "yes", HOSTILE]))
def test_the_file_says_the_words_of_the_command(data: st.DataObject, platform: str, folder: str) -> None:
    export = of(data.draw(configs(platform)), platform, folder)
    assume("\udcff" not in folder)
    text = exporter("vllm-yaml").render(export)["vllm.yaml"]
    table = yaml.safe_load(text)
    (_, _, model, *words), _ = vllm_command(export)
    assert table.pop("model") == model == folder
    assert spoken(table) == words


def test_evidence_and_variables_stand_in_comments() -> None:
    config = load("vllm", "gpu").complete({"nccl_ring": True})
    export = of(config, "gpu")
    export = replace(export, hardware={"label": HOSTILE, "key": "h1:0"})
    lines = exporter("vllm-yaml").render(export)["vllm.yaml"].splitlines()
    comments = [line for line in lines if line.startswith("#")]
    assert any("Verdict: better" in line for line in comments)
    assert any("NCCL_ALGO=Ring" in line and "vllm serve --config vllm.yaml" in line for line in comments)
    assert len(exporter("vllm-yaml").render(of(config, "gpu"))["vllm.yaml"].splitlines()) == len(lines)


def test_only_vllm_reads_it() -> None:
    with pytest.raises(ExportError, match="--to shell"):
        exporter("vllm-yaml").render(an_export())


@pytest.fixture(scope="module")
def parse() -> Iterator[Callable[[list[str]], dict[str, Any]]]:
    """vLLM's own parser, in its own environment."""
    python = Path(COMMAND).parent / "python"
    words = [str(python), vllm_parser.__file__]
    quiet = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "PYTHONPATH": ""}
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=quiet) as child:
        assert child.stdin is not None and child.stdout is not None
        stdin, stdout = child.stdin, child.stdout
        while stdout.readline().strip() != "ready":
            assert child.poll() is None

        def ask(argv: list[str]) -> dict[str, Any]:
            stdin.write(json.dumps(argv) + "\n")
            stdin.flush()
            found: dict[str, Any] = json.loads(stdout.readline())
            return found

        yield ask
        stdin.close()


@pytest.mark.vllm
@pytest.mark.skipif(not COMMAND, reason="TEST_VLLM_COMMAND names no vLLM")
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(config=configs("cpu"))
def test_vllm_itself_reads_the_file_as_the_command(config: Config, parse: Any, tmp_path: Path) -> None:
    export = of(config, "cpu")
    file = tmp_path / "vllm.yaml"
    file.write_text(exporter("vllm-yaml").render(export)["vllm.yaml"])
    (_, _, model, *words), _ = vllm_command(export)
    by_file, by_words = parse(["--config", str(file)]), parse(["--model", model, *words])
    assert "refused" not in by_words and by_words["model"] == "model" == by_file["model"]
    assert {k: v for k, v in by_file.items() if k not in NOT_KNOBS} == {
        k: v for k, v in by_words.items() if k not in NOT_KNOBS
    }
    read = {"max_num_seqs": by_file["max_num_seqs"], "prefix_caching": by_file["enable_prefix_caching"],
            "enforce_eager": by_file["enforce_eager"], "dtype": by_file["dtype"], "block_size": by_file["block_size"],
            "kv_cache_mib": by_file["kv_cache_memory_bytes"] >> 20, "kv_cache_dtype": by_file["kv_cache_dtype"],
            "chunked_prefill": by_file["enable_chunked_prefill"]}  # fmt: skip
    assert read == {name: config[name] for name in read}
