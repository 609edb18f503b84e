"""SGLang's arguments, streams and read-back, by the words of its documentation: no build of it runs without a GPU."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from contracts.exporter import an_export

from autotune.exporters import exporter
from autotune.runtimes.base import Generation
from autotune.runtimes.server import sglang
from autotune.runtimes.server.http import HttpEndpoint
from search_spaces import SpaceError, load

HOPPER = {"compute_capability": "9.0", "devices": 8, "experts": 288, "layers": 45, "mtp_layers": 1,
          "sizes": {"attention heads": 64}}  # fmt: skip
SPACE = load("sglang").narrow(HOPPER)
EXTREME = {
    "dsa_prefill_backend": "fa3", "dsa_decode_backend": "flashmla_kv", "linear_attn_backend": "flashkda",
    "quantization": "w8a8_int8", "moe_runner_backend": "marlin", "tp_size": 8, "dp_size": 4, "ep_size": 8,
    "cuda_graph": False, "torch_compile": True, "kv_cache_dtype": "fp8_e4m3", "mamba_ssm_dtype": "bfloat16",
    "radix_cache": False, "page_size": 1, "mem_fraction_static": 0.94, "max_running_requests": 256,
    "chunked_prefill_size": 16384, "schedule_policy": "lpm", "overlap_schedule": False,
    "speculative_algorithm": "NEXTN", "speculative_num_draft_tokens": 8,
}  # fmt: skip
DEFAULT_ARGV = (
    "--context-length 4096 --dsa-prefill-backend flashmla_sparse --dsa-decode-backend fa3 --linear-attn-backend triton "
    "--moe-runner-backend auto --tp-size 8 --pp-size 1 --dp-size 1 --ep-size 1 --cuda-graph-max-bs 32 "
    "--kv-cache-dtype bfloat16 --mamba-ssm-dtype float32 --page-size 64 --mem-fraction-static 0.88 "
    "--max-running-requests 32 --chunked-prefill-size 8192 --schedule-policy fcfs"
)
EXTREME_ARGV = (
    "--context-length 4096 --dsa-prefill-backend fa3 --dsa-decode-backend flashmla_kv --linear-attn-backend flashkda "
    "--quantization w8a8_int8 --moe-runner-backend marlin --tp-size 8 --pp-size 1 --dp-size 4 --ep-size 8 "
    "--disable-cuda-graph --enable-torch-compile --kv-cache-dtype fp8_e4m3 --mamba-ssm-dtype bfloat16 "
    "--disable-radix-cache --page-size 1 --mem-fraction-static 0.94 --max-running-requests 256 "
    "--chunked-prefill-size 16384 --schedule-policy lpm --disable-overlap-schedule --speculative-algorithm NEXTN "
    "--speculative-num-draft-tokens 8"
)


@pytest.mark.parametrize(("values", "argv"), [({"tp_size": 8}, DEFAULT_ARGV), (EXTREME, EXTREME_ARGV)])
def test_the_arguments_of_the_default_and_of_extremes(values: dict[str, Any], argv: str) -> None:
    config = SPACE.complete(values)
    assert not SPACE.broken(config)
    assert " ".join(sglang.arguments(config, 4096)) == argv


def test_this_release_refuses_an_a100_and_says_why() -> None:
    with pytest.raises(SpaceError, match=r"no sparse attention with kpool for compute capability 8\.0"):
        load("sglang").narrow({**HOPPER, "compute_capability": "8.0"})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"tp_size": 4}, "number of devices"),
        ({"tp_size": 8, "ep_size": 16}, "ep_size"),
        ({"tp_size": 8, "cuda_graph_max_bs": 8}, "cuda_graph_max_bs"),
    ],
)
def test_what_cannot_run_breaks_a_rule(values: dict[str, Any], words: str) -> None:
    space = load("sglang").narrow({**HOPPER, "devices": 8})
    wide = load("sglang").narrow({**HOPPER, "devices": 16}) if values.get("ep_size") == 16 else space
    assert any(words in sentence for sentence in wide.broken(wide.complete(values)))


@pytest.mark.parametrize("cumulative", [True, False])
def test_a_stream_is_read_whether_it_repeats_itself_or_not(cumulative: bool) -> None:
    got: list[int] = []
    for number in (1, 3, 4):
        ids = list(range(10, 10 + number))
        event = {
            "output_ids": ids if cumulative else ids[len(got) :],
            "meta_info": {"prompt_tokens": 5, "completion_tokens": number,
                          "finish_reason": {"type": "length", "length": 4} if number == 4 else None},
        }  # fmt: skip
        said = sglang.said(event, len(got))
        got += said["choices"][0]["token_ids"]
        assert said["choices"][0]["finish_reason"] == ("length" if number == 4 else None)
        assert said["usage"] == {"prompt_tokens": 5, "completion_tokens": number}
    assert got == [10, 11, 12, 13]
    assert sglang.said({"error": {"message": "no"}}, 0) == {"error": {"message": "no"}}


def test_a_request_and_a_score_use_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    body = sglang.requested(Generation((1, 2), 8), "name")
    assert body == {"input_ids": [1, 2], "stream": True,
                    "sampling_params": {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True}}  # fmt: skip
    answer = {"meta_info": {"input_token_logprobs": [[None, 1, None], [-0.5, 2, None], [-2.0, 7, None]],
                            "input_top_logprobs": [None, [[-0.5, 2, None], [-1.0, 3, None]],
                                                   [[-0.1, 4, None], [-3.0, 5, None]]]}}  # fmt: skip
    endpoint = object.__new__(sglang.SglangEndpoint)
    monkeypatch.setattr(HttpEndpoint, "_call", lambda self, path, body: answer)
    (score,) = endpoint.score([[1, 2, 7]], 2)
    assert score.logprobs.tolist() == [-0.5, -2.0] and score.ids.tolist() == [[2, 3], [4, 5]]


def test_what_runs_is_read_from_its_settings_and_its_log() -> None:
    info = {"tp_size": 8, "disable_cuda_graph": True, "disable_radix_cache": False, "quantization": None,
            "speculative_algorithm": "NEXTN", "page_size": 64, "max_total_num_tokens": 123456, "context_length": 4096,
            "mem_fraction_static": 0.88, "schedule_policy": "fcfs", "kv_cache_dtype": "bfloat16"}  # fmt: skip
    found = sglang.read_back(info, "[2026-12-01] Load weight end. type=Glm5Next, dtype=bfloat16, mem usage=40.10 GB.\n")
    assert (found["tp_size"], found["cuda_graph"], found["radix_cache"]) == (8, False, True)
    assert (found["quantization"], found["speculative_algorithm"]) == ("none", "NEXTN")
    assert (found["kv_tokens"], found["context_length"], found["weight_gib"]) == (123456, 4096, 40.1)
    assert sglang.read_back({}, "max_total_num_tokens=4096, chunked_prefill_size=8192")["kv_tokens"] == 4096


def test_the_export_is_its_own_command(tmp_path: Path) -> None:
    export = an_export(
        engine="sglang", config=dict(SPACE.complete(EXTREME)), folder="my model", effective={"context_length": 4096}
    )
    text = exporter("shell").render(export)["serve.sh"]
    (tmp_path / "sglang").write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n')
    (tmp_path / "sglang").chmod(0o755)
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(["sh", "-c", text], capture_output=True, env=path, check=True, text=True)
    assert done.stdout.split("\0")[:-1] == ["serve", "--model-path", "my model", *EXTREME_ARGV.split(" ")]
