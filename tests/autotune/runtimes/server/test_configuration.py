"""What was asked for is what runs: flags from the build's own help, settings read back, knobs that a build lacks."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.bench import Bench
from autotune.outcome import EngineError, Status
from autotune.runtimes.server import discover
from autotune.runtimes.server.vllm import VLLM, arguments, read_back
from autotune.workload import load_workload
from search_spaces import SpaceError, load

SPACE = load("vllm", "cpu")
HELP = """usage: vllm serve [model_tag] [options]

options:
  --api-server-count API_SERVER_COUNT, -asc API_SERVER_COUNT
                        How many; see --headless for none.
  --dtype {auto,bfloat16,float,float16,float32,half}
                        Data type. - "half" for FP16. --made-up is no flag.
  --enable-prefix-caching, --no-enable-prefix-caching
                        Whether to enable prefix caching. (default: None)
  --gpu-memory-utilization GPU_MEMORY_UTILIZATION, --device-memory-utilization GPU_MEMORY_UTILIZATION
                        Share.
  --max-num-seqs MAX_NUM_SEQS
  --block-size BLOCK_SIZE
  -h, --help            show this help message and exit
"""


@pytest.mark.parametrize(
    ("knob", "value", "told"),
    [("kv_cache_dtype", "fp8_e5m2", "auto"), ("prefix_caching", True, False), ("block_size", 128, 16)],
)
def test_a_setting_that_was_not_applied_is_told(serve, tmp_path: Path, knob: str, value, told) -> None:
    runtime = serve({"do": "lie", "knob": knob, "value": told})
    space = SPACE.narrow({"longest": 512})
    bench = Bench(runtime, space, load_workload("chat"), list(range(100)), tmp_path)
    outcome = bench.measure(space.complete({knob: value}), 0)
    assert outcome.status is Status.NOT_APPLIED
    assert f"the engine runs {knob}={told!r} instead of {value!r}" in outcome.reason
    assert not outcome.metrics and outcome.effective[knob] == told


def test_flags_and_choices_come_from_the_help() -> None:
    build = discover.parse("1.0", HELP)
    assert set(build.flags) == {
        "--api-server-count", "--dtype", "--enable-prefix-caching", "--no-enable-prefix-caching", "--help",
        "--gpu-memory-utilization", "--device-memory-utilization", "--max-num-seqs", "--block-size",
    }  # fmt: skip
    assert build.flags["--dtype"][:2] == ("auto", "bfloat16") and build.flags["--max-num-seqs"] == ()
    assert build.digest != discover.parse("1.0", HELP + " ").digest


def test_what_a_build_lacks_is_left_out_with_the_reason_and_never_passed(tmp_path: Path) -> None:
    engine = VLLM(("vllm",), tmp_path, 512)
    engine.__dict__["build"] = discover.parse("0.31.0+cpu", HELP.replace("float32", "other"))
    space = engine.offered(SPACE)
    reasons = {(r.knob, r.value): r.reason for r in space.removals}
    assert (
        reasons["chunked_prefill", False] == "this build (0.31.0+cpu) has no --enable-chunked-prefill; it is not passed"
    )
    assert "--dtype takes auto, bfloat16" in reasons["dtype", "float32"]
    assert {k.name for k in space.free()} == {"block_size", "prefix_caching", "max_num_seqs"}
    command = engine.command(space.default(), 8000, "")
    assert "--enable-chunked-prefill" not in command.argv and "--max-num-seqs" in command.argv


def test_the_real_help_of_a_fake_build_offers_its_choices(serve) -> None:
    runtime = serve()
    space = runtime.engine.offered(SPACE)
    assert not space.knob("kv_cache_dtype").domain.contains("fp8_e5m2")
    assert runtime.version() == {"vllm": "0.99.0+cpu", "help": runtime.engine.build.digest}


def test_an_unchanged_executable_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "help").write_text(HELP)
    script = tmp_path / "vllm"
    script.write_text(
        f"#!/bin/sh\necho $1 >> {tmp_path}/calls\n[ $1 = serve ] && cat {tmp_path}/help || echo 1.0+cpu\n"
    )
    script.chmod(0o755)
    first, again = (discover.ask([str(script)], ["--version"], ["serve", "--help=all"]) for _ in range(2))
    assert first == again and first.version == "1.0+cpu"
    assert (tmp_path / "calls").read_text() == "--version\nserve\n"
    script.write_text(script.read_text().replace("1.0", "1.1"))
    assert discover.ask([str(script)], ["--version"], ["serve", "--help=all"]).version == "1.1+cpu"


def test_an_engine_that_cannot_be_asked_is_named() -> None:
    with pytest.raises(EngineError, match="/no/such/vllm: No such file"):
        discover.ask(("/no/such/vllm",), ["--version"], ["serve", "--help=all"])


def pairs(words: list[str]) -> dict[str, object]:
    """What argparse would make of vLLM's flags."""
    found: dict[str, object] = {}
    rest = list(words)
    while rest:
        flag = rest.pop(0)
        if rest and not rest[0].startswith("--"):
            found[flag] = rest.pop(0)
        else:
            found[flag.replace("--no-", "--")] = not flag.startswith("--no-")
    return found


VALUES = {k.name: st.sampled_from(k.domain.values) for k in load("vllm").knobs}


@given(st.fixed_dictionaries(VALUES))
def test_every_value_survives_the_command_line(values) -> None:
    space = load("vllm")
    knobs = {k.name: k for k in space.knobs}
    config = dict(space.complete(values))
    if config["kv_cap"] or config.get("pp_last_fewer"):
        with pytest.raises(SpaceError, match="cannot be passed to vLLM"):
            arguments(config, knobs)
        return
    words, environment = arguments(config, knobs)
    given_ = pairs(shlex.split(shlex.join(words)))
    assert given_["--enable-prefix-caching"] is config["prefix_caching"]
    assert given_["--max-num-seqs"] == str(config["max_num_seqs"])
    assert float(str(given_["--gpu-memory-utilization"])) == config["gmu"]
    assert json.loads(str(given_["--compilation-config"])) == {"cudagraph_mode": config["cudagraph_mode"]}
    spec = json.loads(str(given_.get("--speculative-config", "{}")))
    assert spec.get("method", "none") == config["spec_method"]
    assert ("num_speculative_tokens_per_batch_size" in spec) is bool(config.get("spec_by_batch"))
    assert environment["VLLM_SPARSE_INDEXER_MAX_LOGITS_MB"] == str(config["indexer_logits_mb"])
    assert ("NCCL_ALGO" in environment) is config["nccl_ring"]


def test_the_published_eight_gpu_recipe_is_this_command() -> None:
    """Not run here: it needs eight A100 and a fork. Golden, by hand from the recipe's flags."""
    space = load("vllm")
    chosen = {"attention_backend": "TRITON_MLA_SPARSE", "checkpoint": "fp8", "tp": 8, "ep": True, "allreduce": "nccl",
              "max_capture_size": 128, "max_model_len": 262144, "max_num_seqs": 32, "max_num_batched_tokens": 8192,
              "spec_method": "mtp", "spec_k": 3, "spec_by_batch": True, "nccl_ring": True}  # fmt: skip
    words, environment = arguments(space.complete(chosen), {k.name: k for k in space.knobs})
    assert shlex.join(words) == (
        "--attention-backend TRITON_MLA_SPARSE --moe-backend marlin --tensor-parallel-size 8 "
        "--pipeline-parallel-size 1 --data-parallel-size 1 --enable-expert-parallel --decode-context-parallel-size 1 "
        "--disable-custom-all-reduce "
        "--max-cudagraph-capture-size 128 --kv-cache-dtype bfloat16 --mamba-ssm-cache-dtype float32 "
        "--enable-prefix-caching --gpu-memory-utilization 0.95 --max-model-len 262144 --max-num-seqs 32 "
        "--max-num-batched-tokens 8192 --async-scheduling "
        """--attention-config '{"sparse_mla_force_mqa": true, "sparse_mla_prefill_workspace_factor": 2}' """
        """--compilation-config '{"cudagraph_mode": "FULL_AND_PIECEWISE"}' """
        """--speculative-config '{"method": "mtp", "num_speculative_tokens": 3, """
        """"num_speculative_tokens_per_batch_size": [[1, 1, 3], [2, 32, 2]]}'"""
    )
    assert environment == {"VLLM_SPARSE_INDEXER_MAX_LOGITS_MB": "512", "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}


def test_gpu_facts_are_read_from_the_log() -> None:
    log = (
        "INFO 12-01 [cuda.py:1] Using TRITON_MLA_SPARSE attention backend out of potential backends: ['A', 'B'].\n"
        "INFO 12-01 [x] Model loading took 22.91 GiB memory and 40.123456 seconds\n"
        "INFO 12-01 [x] Available KV cache memory: 31.20 GiB\n"
        "INFO 12-01 [x] Setting attention block size to 1152 tokens\n"
        "INFO 12-01 [x] Padding mamba page size by 3.14%\n"
        "(EngineCore) INFO [x] GPU KV cache size: 1,180,000 tokens, Maximum concurrency for 262144 tokens: 4.50x\n"
        "INFO 12-01 [x] Using configuration from /fused_moe/E=64,N=1408,device_name=NVIDIA_A100.json for MoE layer.\n"
        "INFO 12-01 [x] Graph capturing finished in 12 secs, took 0.90 GiB\n"
    )
    found = read_back({"compilation_config": {"cudagraph_mode": [2, 1]}}, log)
    assert found == {
        "attention_backend": "TRITON_MLA_SPARSE", "weight_gib": 22.91, "kv_gib": 31.2, "aligned_block": 1152,
        "padded_pages": 3.14, "kv_tokens": 1_180_000, "graph_gib": 0.9, "cudagraph_mode": "FULL_AND_PIECEWISE",
        "kernel_table": "E=64,N=1408,device_name=NVIDIA_A100.json",
    }  # fmt: skip
