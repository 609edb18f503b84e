"""vLLM's settings from the lines of its log, where a build has no `/server_info`. The lines are of 0.32.0."""

from __future__ import annotations

from pathlib import Path

from contracts.runtime import PROMPT, STEPS, collect, run

from autotune.runtimes.base import Generation
from autotune.runtimes.server.vllm import logged_config, read_back
from search_spaces import load

LOG = """\
(APIServer pid=22382) INFO 12-01 16:51:03 [api_utils.py:286] non-default args: {'model_tag': 'glm4', 'port': 18777, \
'dtype': 'float32', 'max_model_len': 1024, 'enforce_eager': True, 'served_model_name': ['x'], 'block_size': 64, \
'kv_cache_memory_bytes': 268435456, 'enable_prefix_caching': False, 'max_num_seqs': 16}
(EngineCore pid=22427) INFO 12-01 16:51:16 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: \
model='glm4', speculative_config=None, dtype=torch.float32, max_seq_len=1024, tensor_parallel_size=1, \
pipeline_parallel_size=1, data_parallel_size=1, quantization=None, enforce_eager=True, kv_cache_dtype=auto, \
device_config=cpu, enable_prefix_caching=False, enable_chunked_prefill=True, compilation_config={'mode': 0}
(EngineCore pid=22427) INFO 12-01 16:51:25 [kv_cache_utils.py:2327] CPU KV cache size: 43,648 tokens, Maximum
"""


def test_the_first_lines_hold_what_was_asked_and_what_was_made_of_it() -> None:
    found = read_back(logged_config(LOG), LOG)
    assert {name: found[name] for name in ("dtype", "block_size", "kv_cache_mib", "max_num_seqs", "max_model_len")} == {
        "dtype": "float32", "block_size": 64, "kv_cache_mib": 256, "max_num_seqs": 16, "max_model_len": 1024,
    }  # fmt: skip
    assert found["prefix_caching"] is False and found["chunked_prefill"] is True and found["enforce_eager"] is True
    assert (found["tp"], found["pp"], found["kv_tokens"]) == (1, 1, 43648)


def test_what_the_engine_made_of_it_counts_more_than_what_was_asked() -> None:
    forced = LOG.replace("enable_prefix_caching=False", "enable_prefix_caching=True")
    assert read_back(logged_config(forced), forced)["prefix_caching"] is True


def test_lines_that_are_no_literal_are_left_alone() -> None:
    odd = LOG.replace("'port': 18777", "'attention_config': AttentionConfig(backend=None)")
    assert read_back(logged_config(odd), odd)["dtype"] == "float32" and logged_config("") == {}


def test_a_server_without_the_page_still_serves(serve, tmp_path: Path) -> None:
    runtime = serve({"do": "no_info"}, {"do": "say", "text": LOG})
    with runtime.launch(load("vllm", "cpu").default(), tmp_path / "a.log") as endpoint:
        assert endpoint.told("/server_info?config_format=json", "/nothing") is None
        assert endpoint.effective()["max_num_seqs"] == 16
        assert len(run(endpoint, collect(endpoint, Generation(PROMPT, STEPS)))) >= 1
