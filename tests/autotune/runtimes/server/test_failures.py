"""Each class of failure is recognised from lines that real engines printed; what nobody knows is a crash."""

from __future__ import annotations

import pytest

from autotune.outcome import Status
from autotune.runtimes.server.failures import BY_NAME, FAILURES, blamed, error, recognise

LOADED = (
    "(Worker pid=9) INFO 12-01 12:24:54 [gpu_model_runner.py:5] Model loading took 22.9 GiB memory and 40.1 seconds\n"
)
PROFILED = LOADED + "INFO 12-01 12:24:55 [gpu_worker.py:7] Available KV cache memory: 31.2 GiB\n"
SIZED = PROFILED + "INFO 12-01 12:24:55 [kv.py:7] GPU KV cache size: 65,536 tokens, Maximum concurrency: 64.00x\n"
CAPTURING = SIZED + "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  12%|█ | 4/35\n"
READY = SIZED + "INFO:     Application startup complete.\n"
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB"

LLAMA = "0.00.014.605 I load_tensors:   CPU_Mapped model buffer size =    11.38 MiB\n"
LLAMA_CACHE = LLAMA + "0.00.015.961 I llama_kv_cache: size =    0.53 MiB ( 2048 cells, 1 layers, 2/2 seqs), K (f16)\n"

RECORDED = [
    ("unsupported", "ValueError: No valid attention backend found for cuda with AttentionSelectorConfig(head_size=512, "
     "kv_cache_dtype=auto, use_mla=True, use_sparse=True). Reasons: {FLASH_ATTN_MLA: [sparse not supported]}"),
    ("unsupported", "ValueError: Selected backend AttentionBackendEnum.FLASHMLA_SPARSE is not valid for this "
     "configuration. Reason: ['compute capability not supported']"),
    ("unsupported", "(EngineCore pid=3) ERROR 12-01 12:24:11 [core.py:9] ValueError: Sparse Attention is not supported "
     "on CPU."),
    ("unsupported", "pydantic_core._pydantic_core.ValidationError: The model type 'glm4' does not support float16. "
     "Reason: Numerical instability."),
    ("unsupported", "ValueError: fp8 KV cache on CPU requires x86 with AVX-512 or AMX support."),
    ("unsupported", "AttributeError: '_OpNamespace' '_C' object has no attribute 'cpu_gemm_wna16'"),
    ("unsupported", "ValueError: No int8 MoE backend supports the deployment configuration."),
    ("unsupported", "AttributeError: '_OpNamespace' '_C' object has no attribute 'static_scaled_fp8_quant'"),
    ("unsupported", "RuntimeError: Sparse Attention Indexer CUDA op requires DeepGEMM to be installed"),
    ("unsupported", "ValueError: type fp8e4nv not supported in this architecture. The supported fp8 dtypes are fp8e5"),
    ("unsupported", "ValueError: Total number of attention heads (64) must be divisible by tensor parallel size (6)."),
    ("unsupported", "RuntimeError: size_n = 2736 is not divisible by tile_n_size = 64"),
    ("unsupported", "NotImplementedError: The page size of the layer is not divisible by the maximum page size."),
    ("unsupported", "ValueError: All MoE projections need to have same quantization scheme but found multiple"),
    ("unsupported", "RuntimeError: Worker failed: 'No common block size for 16 (CPU_ATTN: [MultipleOf(32)]).'"),
    ("unsupported", "llama_model_load: error loading model: unknown model architecture: 'glm5next'"),
    ("unsupported", "error: LLAMA_SPLIT_MODE_TENSOR not implemented for architecture 'glm5-next'"),
    ("unsupported", "0.00.007.337 E llama_init_from_model: quantized V cache requires flash_attn to be enabled"),
    ("unsupported", "0.00.009.335 E llama_init_from_model: model does not support different K (f32) and V (f16) cache "
     "types\n0.00.009.350 E cmn  common_init_: failed to create context with model 'm.gguf'"),
    ("port", "0.00.004.358 E srv         start: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 18555"),
    ("oom_load", "0.00.027.037 E ggml_aligned_malloc: insufficient memory (attempted to allocate 1579.28 MB)"),
    ("oom_kv", LLAMA + "0.00.007.580 E llama_init_from_model: failed to initialize the context: std::bad_alloc"),
    ("oom_profile", LLAMA_CACHE + "0.00.02.037 E ggml_aligned_malloc: insufficient memory (attempted to allocate"),
    ("crash", "0.00.004.594 E llama_model_load: error loading model: tensor 'blk.1.attn_v.weight' data is not within "
     "the file bounds, model is corrupted or incomplete\n0.00.004.614 E llama_model_load_from_file_impl: failed"),
    ("bad_flag", "usage: vllm serve [model_tag] [options]\nvllm serve: error: argument --block-size: expected one"),
    ("bad_flag", "vllm: error: unrecognized arguments: --page-size 16"),
    ("bad_flag", "vllm serve: error: argument --kv-cache-dtype: invalid choice: 'fp4' (choose from auto, fp8)"),
    ("port", "OSError: [Errno 98] Address already in use"),
    ("port", "ERROR:    [Errno 98] error while attempting to bind on address: address already in use"),
    ("busy_device", "ValueError: Free memory on device cuda:0 (1.2/79.15 GiB) on startup is less than desired GPU "
     "memory utilization (0.95, 75.19 GiB). Decrease GPU memory utilization."),
    ("oom_load", OOM),
    ("oom_profile", LOADED + OOM),
    ("oom_kv", PROFILED + OOM),
    ("oom_kv", LOADED + "ValueError: No available memory for the cache blocks."),
    ("oom_kv", LOADED + "ValueError: To serve at least one request with the model's max seq len (131072), (9.0 GiB KV "
     "cache is needed, which is larger than the available KV cache memory (4.1 GiB). Based on the available memory, "
     "the estimated maximum model length is 59712."),
    ("oom_kv", "ValueError: Cannot auto-fit max_model_len: not enough GPU memory available for a single token."),
    ("oom_graph", CAPTURING + OOM),
    ("oom_graph", SIZED + "INFO Profiling CUDA graph memory: PIECEWISE=3\n" + OOM),
    ("oom_request", READY + OOM),
    ("oom_request", SIZED + "INFO 12-01 12:24:56 Graph capturing finished in 12 secs, took 0.90 GiB\n" + OOM),
    ("oom_load", "RuntimeError: [enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"),
    ("graph_capture", CAPTURING + "RuntimeError: CUDA error: operation not permitted when stream is capturing"),
    ("device_fault", READY + "RuntimeError: CUDA error: an illegal memory access was encountered"),
    ("device_fault", "NVRM: Xid (PCI:0000:3b:00): 31, pid=77, name=VLLM::Worker, Ch 00000010, MMU Fault"),
    ("device_lost", "NVRM: Xid (PCI:0000:3b:00): 79, pid=77, GPU has fallen off the bus."),
    ("device_lost", "RuntimeError: CUDA error: uncorrectable ECC error encountered"),
    ("crash", "Traceback (most recent call last):\nKeyError: 'first_k_dense_replace'"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text"), RECORDED)
def test_recorded_lines_have_their_class(name: str, text: str) -> None:
    found = recognise(text, 1)
    assert found.failure.name == name
    assert found.line.split(" (estimated")[0] in text


def test_every_class_has_a_next_step_and_a_status() -> None:
    assert {f.name for f in FAILURES if f.environment} == {"port", "busy_device", "device_lost"}
    assert all(f.next for f in FAILURES) and len(BY_NAME) == len(FAILURES)
    seen = {name for name, _ in RECORDED}
    assert set(BY_NAME) - seen == {"startup_timeout", "hang"}  # no line shows these; see test_processes, test_measuring


def test_the_engines_own_proposal_is_kept() -> None:
    text = next(t for n, t in RECORDED if "estimated maximum model length" in t)
    found = recognise(text, 1)
    assert "estimated maximum model length is 59712" in found.sentence()
    assert found.sentence().endswith("(gmu, kv_cache_mib, max_model_len, max_num_seqs)")


def test_unknown_words_are_a_crash_with_the_last_error_or_the_code() -> None:
    assert recognise("all quiet", 3).line == "the engine ended with code 3"
    assert recognise("all quiet", -11).line == "the engine died of signal 11"
    assert recognise("FooError: a\nBarError: b\nsomething", 1).line == "BarError: b"
    core = "ValueError: the cause\nRuntimeError: Engine core initialization failed. See root cause above."
    assert recognise(core, 1).line == "ValueError: the cause"


def test_a_kill_is_the_kernels_for_memory() -> None:
    assert recognise(LOADED, -9).failure.name == "oom_profile"
    assert recognise(READY, -9, serving=True).failure.name == "oom_request"


def test_a_remark_is_no_reason() -> None:
    """A healthy engine warns of much; none of that explains its death."""
    text = (
        "WARNING 12-01 12:24:26 [x.py:1] FlashInfer is not supported on CPU, falling back\n"
        "INFO 12-01 12:24:26 [x.py:1] Retrying: CUDA out of memory in a probe\nKeyError: 'x'"
    )
    assert recognise(text, 1).failure.name == "crash"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("ValueError: fp8_e4m3 KV cache is not supported on CPU", "kv_cache_dtype=fp8_e4m3"),
        ("vllm serve: error: argument --kv-cache-dtype: invalid choice: 'fp8' (choose from auto)", "kv_cache_dtype"),
    ],
)
def test_the_settings_that_a_refusal_names_are_told(line: str, said: str) -> None:
    found = blamed(error(recognise(line, 1), "launch", ""), {"kv_cache_dtype": "fp8_e4m3", "dtype": "bfloat16"})
    assert said in found.reason and "dtype=bfloat16" not in found.reason.replace("kv_cache_dtype", "")
    assert found.status is Status.UNSUPPORTED
