"""llama.cpp's own HTTP server from the `xllamacpp` wheel, as a program that takes the arguments of `llama-server`.

In a process of its own, for a failed assertion of ggml aborts the interpreter. Only what the space uses is there.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import signal
import sys

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin starve the other processes of the machine
os.environ.setdefault("GGML_NO_BACKTRACE", "1")

CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
FLASH = {"auto": "AUTO", "on": "ENABLED", "off": "DISABLED"}


def parser() -> argparse.ArgumentParser:
    """The options, in `llama-server`'s spelling."""
    found = argparse.ArgumentParser(prog="llama-server", description=__doc__)
    found.add_argument("--version", action="version", version=importlib.metadata.version("xllamacpp"))
    found.add_argument("-m", "--model", required=True)
    found.add_argument("-a", "--alias", default="")
    found.add_argument("--host", default="127.0.0.1")
    found.add_argument("--port", type=int, default=8080)
    found.add_argument("-c", "--ctx-size", type=int, default=0)
    found.add_argument("-np", "--parallel", type=int, default=1)
    found.add_argument("-b", "--batch-size", type=int, default=2048)
    found.add_argument("-ub", "--ubatch-size", type=int, default=512)
    found.add_argument("-t", "--threads", type=int, default=-1)
    found.add_argument("-fa", "--flash-attn", choices=tuple(FLASH), default="auto")
    found.add_argument("-ctk", "--cache-type-k", choices=CACHE_TYPES, default="f16")
    found.add_argument("-ctv", "--cache-type-v", choices=CACHE_TYPES, default="f16")
    found.add_argument("--cache-prompt", action=argparse.BooleanOptionalAction, default=True)
    found.add_argument("-cram", "--cache-ram", type=int, default=8192)
    found.add_argument("--repack", action=argparse.BooleanOptionalAction, default=True)
    found.add_argument("--mmap", action=argparse.BooleanOptionalAction, default=True)
    found.add_argument("--metrics", action="store_true")
    found.add_argument("--slot-save-path", default="")
    found.add_argument("-lv", "--verbosity", type=int, default=3)
    found.add_argument("-fit", "--fit", choices=["on", "off"], default="on")
    found.add_argument("--warmup", action=argparse.BooleanOptionalAction, default=True)
    return found


def main(argv: list[str] | None = None) -> None:
    """Serve until SIGTERM or SIGINT."""
    options = parser().parse_args(argv)
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.model_alias = options.model, {options.alias} if options.alias else set()
    params.hostnames, params.port = [options.host], options.port
    params.n_ctx, params.n_parallel = options.ctx_size, options.parallel
    params.n_batch, params.n_ubatch = options.batch_size, options.ubatch_size
    threads = options.threads if options.threads > 0 else os.cpu_count() or 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.flash_attn_type = xllamacpp.llama_flash_attn_type[f"LLAMA_FLASH_ATTN_TYPE_{FLASH[options.flash_attn]}"]
    params.cache_type_k = xllamacpp.ggml_type[f"GGML_TYPE_{options.cache_type_k.upper()}"]
    params.cache_type_v = xllamacpp.ggml_type[f"GGML_TYPE_{options.cache_type_v.upper()}"]
    params.cache_prompt, params.cache_ram_mib = options.cache_prompt, options.cache_ram
    params.no_extra_bufts = not options.repack
    params.load_mode = xllamacpp.llama_load_mode[f"LLAMA_LOAD_MODE_{'MMAP' if options.mmap else 'NONE'}"]
    params.endpoint_metrics, params.slot_save_path = options.metrics, options.slot_save_path
    params.verbosity, params.fit_params, params.warmup = options.verbosity, options.fit == "on", options.warmup
    stop = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, stop)  # its threads inherit this, so that only this one hears them
    server = xllamacpp.Server(params)
    signal.sigwait(stop)
    del server
    sys.stderr.flush()
    os._exit(0)  # what the library does at exit may wait for a client


if __name__ == "__main__":
    main()
