"""A real llama.cpp on the reference model: the contract, what it runs, and answers like the native engine's."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from contracts.runtime import PROMPT, STEPS, RuntimeContract, collect, run

from autotune.corpus import read_tokens
from autotune.quality import kl_divergence
from autotune.runtimes.base import Generation
from autotune.runtimes.native import NativeRuntime
from autotune.runtimes.server import llama_serve, llamacpp
from autotune.runtimes.server.runtime import Limits, ServerRuntime
from autotune.setting import reference_model
from search_spaces import Config, load

pytest.importorskip("xllamacpp", reason="pip install '.[llamacpp]' brings llama.cpp")
gguf_file = pytest.importorskip("autotune.runtimes.server.gguf_file", reason="pip install '.[llamacpp]' brings gguf")
SPACE = load("llamacpp").narrow({"cores": 2, "layers": 4})
WIDE = {**SPACE.reference, "threads": 1}
MIXED = {
    "type_experts": "q4_0", "type_attention": "q8_0", "type_lm_head": "q5_1", "wide_first": 1, "parallel": 2,
    "batch_size": 256, "ubatch_size": 64, "flash_attn": "off", "cache_ram": 0, "cache_prompt": False, "mmap": False,
    "threads": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf")


@pytest.fixture
def runtime(files: Path) -> ServerRuntime:
    prefix = llamacpp.usual_command()
    return ServerRuntime(llamacpp.LlamaCpp(prefix, reference_model(), 600, files), prefix, Limits(launch=60, grace=2))


class TestLlamaCpp(RuntimeContract):
    @pytest.fixture
    def runtime(self, files: Path) -> Iterator[ServerRuntime]:
        prefix = llamacpp.usual_command()
        engine = llamacpp.LlamaCpp(prefix, reference_model(), 600, files)
        yield ServerRuntime(engine, prefix, Limits(launch=60, grace=2))

    @pytest.fixture
    def config(self) -> Config:
        return SPACE.complete({"parallel": 2, "threads": 1})

    @pytest.fixture
    def bad_config(self) -> Config:
        return Config({**SPACE.default(), "cache_type": "q9_9"})


def test_it_answers_like_the_native_engine(runtime: ServerRuntime, tmp_path: Path) -> None:
    folder = reference_model()
    text = [list(read_tokens(folder, 288)[-400:])]  # beyond index_topk, so that the indexer's choice is judged too
    native = NativeRuntime(folder)
    config = load("native").narrow(native.capabilities()).complete({"kv_tokens": 1024})
    with native.launch(config, tmp_path / "native.log") as endpoint:
        ours = endpoint.score(text, 288)
    with runtime.launch(SPACE.complete(WIDE), tmp_path / "llama.log") as endpoint:
        theirs = endpoint.score(text, 288)
    found = kl_divergence(ours[0], theirs[0])
    assert found.mean() < 1e-3 and found.max() < 1e-2
    assert np.abs(ours[0].logprobs - theirs[0].logprobs).max() < 0.01


def test_every_knob_is_read_back(runtime: ServerRuntime, tmp_path: Path) -> None:
    config = SPACE.complete(MIXED)
    with runtime.launch(config, tmp_path / "a.log") as endpoint:
        effective = endpoint.effective()
        assert len(run(endpoint, collect(endpoint, Generation(PROMPT, STEPS)))) > STEPS
        assert endpoint.counters()["generated"] == STEPS
    unread = {"repack", "cache_prompt", "wide_first", "wide_last", "type_experts", "type_attention"}
    assert {k: effective.get(k) for k in config if k not in unread} == {k: config[k] for k in config if k not in unread}
    types = gguf_file.types(runtime.engine.file(config))  # type: ignore[attr-defined]
    found = {gguf_file.place(name): kind for name, kind in types.items() if gguf_file.place(name)[1]}
    assert found[1, "experts"] == "q4_0" and found[2, "attention"] == "q8_0" and found[-1, "lm_head"] == "q5_1"
    assert found[0, "attention"] == "f16"
    assert {kind for name, kind in types.items() if re.search("norm|hc_|inp|indexer|ssm", name)} == {"f32"}


def test_a_prefix_is_reused_until_a_reset(runtime: ServerRuntime, tmp_path: Path) -> None:
    config = SPACE.complete({"parallel": 1, "cache_ram": 0, "threads": 1})
    with runtime.launch(config, tmp_path / "a.log") as endpoint:
        for _ in range(2):
            run(endpoint, collect(endpoint, Generation(PROMPT, STEPS)))
        assert endpoint.counters()["prefix_hits"] > 0
        endpoint.reset()
        run(endpoint, collect(endpoint, Generation(PROMPT, STEPS)))
        assert endpoint.counters()["prefix_hits"] == 0
        port = int(endpoint.base.rsplit(":", 1)[1])
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
        assert probe.getsockname()[1] == port


def test_the_arguments_of_extremes(files: Path) -> None:
    engine = llamacpp.LlamaCpp(llamacpp.usual_command(), reference_model(), 600, files)
    found = engine.command(SPACE.complete(MIXED), 1234, "name").argv
    options = llama_serve.parser().parse_args(found)
    assert options.model == str(engine.file(SPACE.complete(MIXED))) and Path(options.model).is_file()
    assert (options.host, options.port, options.alias, options.ctx_size) == ("127.0.0.1", 1234, "name", 1536)
    assert (options.flash_attn, options.cache_type_k, options.cache_type_v) == ("off", "f16", "f16")
    assert not options.cache_prompt and not options.mmap and options.repack and options.cache_ram == 0
    assert (options.parallel, options.batch_size, options.ubatch_size, options.threads) == (2, 256, 64, 1)


def test_old_files_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llamacpp, "KEPT", 2)
    engine = llamacpp.LlamaCpp(llamacpp.usual_command(), reference_model(), 600, tmp_path)
    first, second, third = (SPACE.complete({"type_experts": kind}) for kind in ("q8_0", "q4_0", "q5_1"))
    files = [engine.file(first), engine.file(second)]
    os.utime(files[1], (1, 1))
    assert engine.file(first) == files[0] and engine.file(third).is_file()
    assert [file.exists() for file in files] == [True, False]


def test_a_command_of_its_own_need_not_have_every_flag(tmp_path: Path, files: Path) -> None:
    old = tmp_path / "llama-server"
    flags = "--model M\n  --port N\n  --parallel N\n  --batch-size N\n  --threads N\n  --flash-attn {on,off}"
    old.write_text(f"#!/bin/sh\ncase $1 in --version) echo version: 9.1 ;; *) printf '  {flags}\\n' ;; esac\n")
    old.chmod(0o755)
    engine = llamacpp.LlamaCpp((str(old),), reference_model(), 600, files)
    offered = engine.offered(SPACE)
    assert offered.knob("repack").domain.values == (True,) and offered.knob("parallel").domain.size > 1
    assert any(r.knob == "repack" and "has no --repack" in r.reason for r in offered.removals)
    assert "--repack" not in engine.command(offered.default(), 1, "").argv
    assert engine.version()["server"] == "llama-server"
