"""From a file to answers on the real engine: load, serve, and the same tokens as the engine itself gives."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from contracts.exporter import an_export

import autotune
from autotune.exporters import Export, ExportError, exporter
from autotune.exporters.native import load_export
from autotune.model import facts
from autotune.runtimes.native.engine import Engine
from autotune.setting import reference_model
from search_spaces import Config, load

ROOT = Path(__file__).parents[2]
PROMPTS = ["def main():\n", "class Reader", "import os, sys", "The quick brown fox", "é€"]
CONFIG = load("native").complete(
    {
        "attention": "sparse",
        "bits_experts": 8,
        "kv_dtype": "fp32",
        "prefix_reuse": True,
        "max_seqs": 4,
        "kv_tokens": 1024,
    }
)


def direct(config: Config, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Greedy tokens by the engine's own loop."""
    engine = Engine(reference_model(), config)
    found: dict[int, list[int]] = {}
    for number, prompt in enumerate(prompts):
        engine.add(number, prompt, max_tokens, ignore_eos=True)
    left = set(range(len(prompts)))
    while left:
        for number, tokens, finish in engine.step():
            found.setdefault(number, []).extend(tokens)
            left -= {number} if finish else set()
    return [found[number] for number in range(len(prompts))]


@pytest.fixture(scope="module")
def export() -> Export:
    """A hand-written export of the reference model with what the engine itself says it runs."""
    folder = reference_model()
    effective = dict(Engine(folder, CONFIG).effective())
    whole = an_export(config=dict(CONFIG), effective=effective, folder=str(folder))
    return replace(whole, model=facts(folder).identity())


@pytest.fixture(scope="module")
def file(export: Export, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("export") / "best.json"
    path.write_text(exporter("json").render(export)["best.json"])
    return path


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return direct(CONFIG, [list(prompt.encode()) for prompt in PROMPTS], 24)


def test_load_gives_the_engines_own_tokens(file: Path, export: Export, expected: list[list[int]]) -> None:
    with autotune.load(str(file)) as llm:
        assert json.loads(json.dumps(llm.effective())) == json.loads(json.dumps(export.effective))
        answers = llm.generate(PROMPTS, max_tokens=24, ignore_eos=True)
        assert [list(answer.tokens) for answer in answers] == expected
        assert all(answer.finish == "length" for answer in answers)
        assert llm.text.decode(expected[0]) == answers[0].text


def test_a_changed_configuration_or_model_does_not_run(file: Path, export: Export, tmp_path: Path) -> None:
    changed = tmp_path / "changed.json"
    config = {**export.config, "attention": "absorbed"}
    changed.write_text(exporter("json").render(replace(export, config=config))["best.json"])
    with pytest.raises(ExportError, match="attention is 'absorbed' instead of 'sparse'"):
        load_export(changed)
    copy = tmp_path / "model"
    copy.mkdir()
    for part in reference_model().iterdir():
        (copy / part.name).write_bytes(part.read_bytes())
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(ExportError, match="not the measured one"):
        load_export(file, copy)


@contextmanager
def served(*words: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    command = [sys.executable, "-c", "from autotune.cli import main; main()", "serve", *words, "--port", "0"]
    path = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=path, start_new_session=True
    ) as started:
        try:
            assert started.stdout is not None and started.stderr is not None
            line = started.stdout.readline()
            assert "http://127.0.0.1:" in line, started.stderr.read()
            yield started, int(line.rsplit(":", 1)[1].split("/")[0])
        finally:
            if started.poll() is None:
                os.killpg(started.pid, signal.SIGKILL)


def ask(port: int, method: str, path: str, body: Any = None) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    data = None if body is None else json.dumps(body).encode()
    connection.request(method, path, data, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    text = answer.read()
    assert answer.status == 200, text
    connection.close()
    return text


def test_the_served_engine_runs_exactly_the_export(file: Path, export: Export, expected: list[list[int]]) -> None:
    with served(str(file)) as (server, port):
        config = json.loads(ask(port, "GET", "/v1/config"))
        assert config["effective"] == json.loads(json.dumps(export.effective))
        assert config["config"] == dict(export.config)

        def complete(prompt: str) -> Any:
            body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
            return json.loads(ask(port, "POST", "/v1/completions", body))["choices"][0]

        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            answers = list(pool.map(complete, PROMPTS))
        assert [answer["token_ids"] for answer in answers] == expected
        body = {"prompt": PROMPTS, "max_tokens": 24, "temperature": 0, "ignore_eos": True, "stream": True}
        events = ask(port, "POST", "/v1/completions", body).decode().split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        parts = [json.loads(event[6:])["choices"][0] for event in events[:-2]]
        for index, answer in enumerate(answers):
            assert "".join(part["text"] for part in parts if part["index"] == index) == answer["text"]
        scored = {"prompt": "def", "max_tokens": 3, "temperature": 0, "logprobs": 1, "ignore_eos": True}
        found = json.loads(ask(port, "POST", "/v1/completions", scored))["choices"][0]["logprobs"]
        assert found["token_logprobs"] == pytest.approx([max(top.values()) for top in found["top_logprobs"]])
        assert "autotune_engine_" in ask(port, "GET", "/metrics").decode()
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 0
        with pytest.raises(ProcessLookupError):
            os.killpg(server.pid, 0)


def test_the_shell_script_serves_the_same(export: Export, tmp_path: Path) -> None:
    text = exporter("shell").render(export)["serve.sh"]
    words = [line.strip(" \\\n") for line in text.splitlines() if line.startswith("  --")]
    flags = [word for line in words for word in line.removesuffix('"$@"').split()]
    with served(*flags) as (_, port):
        config = json.loads(ask(port, "GET", "/v1/config"))
        assert config["effective"] == json.loads(json.dumps(export.effective))
