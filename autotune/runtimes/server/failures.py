"""What an engine's last words mean: a class of failure, its status, and what to change next. Reads text, does nothing.

Lines are of vLLM 0.32–0.33, its forks, llama.cpp b11549, torch, CUDA and the kernel; a text that none
of them knows is a crash.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from autotune.outcome import EngineError, Status
from search_spaces import Value

REASON = 300
"""Characters of a log line that become the reason."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One class. ``status`` is how such a trial ends; ``next`` what to change, ``knobs`` the first ones to move."""

    name: str
    status: Status
    next: str
    knobs: tuple[str, ...] = ()

    @property
    def environment(self) -> bool:
        """Whether it is the machine's fault: tried once more, and never counted against a configuration."""
        return self.status is Status.BUSY


FAILURES: tuple[Failure, ...] = (
    Failure("unsupported", Status.UNSUPPORTED, "choose another value; this build, model or device cannot do it",
            ("attention_backend", "kv_cache_dtype", "dtype", "moe_backend")),
    Failure("bad_flag", Status.UNSUPPORTED, "this build has no such option or value; see the engine's own --help"),
    Failure("port", Status.BUSY, "another program has the port; free it or let one be chosen"),
    Failure("oom_load", Status.OOM, "fewer bits a weight, or more ranks", ("checkpoint", "tp", "pp", "dtype")),
    Failure("oom_profile", Status.OOM, "fewer tokens a step", ("max_num_batched_tokens", "max_num_seqs")),
    Failure("oom_kv", Status.OOM, "more memory for the cache, or a shorter longest sequence",
            ("gmu", "kv_cache_mib", "max_model_len", "max_num_seqs")),
    Failure("oom_graph", Status.OOM, "fewer captured sizes, a smaller memory share, or no graphs",
            ("max_capture_size", "gmu", "cudagraph_mode", "enforce_eager")),
    Failure("oom_request", Status.OOM, "a smaller memory share leaves more for requests",
            ("gmu", "max_num_batched_tokens", "max_num_seqs")),
    Failure("graph_capture", Status.CRASH, "piecewise graphs, or none", ("cudagraph_mode", "enforce_eager")),
    Failure("startup_timeout", Status.TIMEOUT, "a longer launch_seconds in the plan, if the log still moved",
            ("cudagraph_mode", "enforce_eager")),
    Failure("hang", Status.TIMEOUT, "read the log; the engine answers /health but generates nothing", ("pp",)),
    Failure("device_fault", Status.CRASH, "run it alone, with CUDA_LAUNCH_BLOCKING=1, and look at the driver's log",
            ("cudagraph_mode", "attention_backend")),
    Failure("device_lost", Status.BUSY, "the device is gone until it is reset; see the driver's log"),
    Failure("busy_device", Status.BUSY, "another process holds the device's memory; end it or wait"),
    Failure("crash", Status.CRASH, "read the end of the log"),
)  # fmt: skip
STEPS = {"oom_load": "load", "oom_profile": "profile", "oom_kv": "kv", "oom_graph": "graphs", "graph_capture": "graphs"}
BY_NAME = {failure.name: failure for failure in FAILURES}

_FIRST: tuple[tuple[str, str], ...] = (
    ("device_lost", r"fallen off the bus|uncorrectable ECC|device is lost|\bXid\b.*\b(48|63|64|79|94|95)\b"),
    ("device_fault", r"illegal memory access|device-side assert|misaligned address|unspecified launch failure"
                     r"|\bXid\b.*\b31\b|CUDA_ERROR_ILLEGAL|hardware exception"),
    ("port", r"[Aa]ddress already in use|EADDRINUSE|[Pp]ort \d+ is (already )?in use"
             r"|couldn't bind HTTP server socket"),
    ("busy_device", r"Free memory on device .*is less than desired|[Aa]ll CUDA-capable devices are busy"
                    r"|already in use by another process"),
    ("graph_capture", r"operation not permitted when stream is capturing|cudaErrorStreamCapture"
                      r"|[Cc]apture (CUDA|cuda) ?graphs? failed|Graph capture failed"),
    ("unsupported", r"No valid attention backend found|is not valid for this configuration\. Reason"
                    r"|[Ss]parse Attention is not supported|not supported in this architecture|not supported on CPU"
                    r"|requires x86 with AVX-512|does not support (float16|bfloat16|fp8)"
                    r"|MoE backend supports the deployment configuration|requires DeepGEMM|Unsupported architecture"
                    r"|has no attribute 'cpu_\w+'|static_scaled_fp8_quant|unknown model architecture"
                    r"|Model architectures? .* (is|are) not supported|is not divisible by|must be divisible by"
                    r"|page size is not divisible|[Aa]ll MoE projections need to have same quantization"
                    r"|compute capability .*not supported|not implemented for architecture"
                    r"|is not supported (for|with|by)"
                    r"|No common block size for|not supported by the current|sparse not supported|only supported on"
                    r"|requires flash_attn to be enabled|model does not support different K"),
    ("bad_flag", r"error: unrecognized arguments|error: argument .*: (invalid|expected)|invalid choice"
                 r"|the following arguments are required|error: ambiguous option|error while handling argument"),
    ("oom_kv", r"No available memory for the cache blocks|KV cache is needed, which is larger than"
               r"|Cannot auto-fit max_model_len|to serve at least one request with the model's max seq len"
               r"|To serve at least one request with the model's max seq len"
               r"|KV cache memory .*(too small|not enough)|[Nn]ot enough memory for (the )?KV"),
)  # fmt: skip
_OOM = (
    r"CUDA out of memory|CUDA error: out of memory|OutOfMemoryError|torch\.cuda\.OutOfMemory|cudaErrorMemoryAllocation"
    r"|Cannot allocate memory|DefaultCPUAllocator: can't allocate|^MemoryError|std::bad_alloc|failed to allocate"
    r"|insufficient memory \(attempted to allocate"
)
_STEPS: tuple[tuple[str, str], ...] = (
    (r"Application startup complete|HTTP/1\.1\" 200", "oom_request"),
    (r"Graph capturing finished", "oom_request"),
    (r"Capturing CUDA graph|Capturing cudagraphs|Profiling CUDA graph|CUDA ?graph.*captur", "oom_graph"),
    (r"KV cache size: |Available KV cache memory|Overriding num_gpu_blocks", "oom_kv"),
    (r"Model loading took|Loading weights took|llama_kv_cache: size =", "oom_profile"),
    (r"load_tensors: .* model buffer size =", "oom_kv"),
)
"""The furthest step that a log shows, last first; what ran out of memory came after it."""
_REMARK = re.compile(r"\b(DEBUG|INFO|WARNING) \d\d-\d\d |^(INFO|WARNING|DEBUG):|\w*Warning: ")
_ERROR = re.compile(r"^\s*[\d.]{9,} E +(.*)$", re.MULTILINE)  # of llama.cpp: what follows the first is its echo
_HINTS = (r"estimated maximum model length is ([\d,]+)",)


@dataclass(frozen=True, slots=True)
class Finding:
    """A failure and the line that shows it."""

    failure: Failure
    line: str

    def sentence(self) -> str:
        knobs = f" ({', '.join(self.failure.knobs)})" if self.failure.knobs else ""
        return f"{self.failure.name}: {self.line}; next: {self.failure.next}{knobs}"


def recognise(text: str, code: int | None = None, serving: bool = False) -> Finding:
    """The class of a failure from an engine's log ``text``.

    ``code``: its exit code where it has ended, negative for a signal. ``serving``: it had answered requests already.
    """
    # What an engine merely remarked while it ran is no reason for its end.
    said = "\n".join(line for line in text.splitlines() if not _REMARK.search(line))
    for name, pattern in _FIRST:
        line = _line(pattern, said)
        if line:
            return Finding(BY_NAME[name], _hinted(line, text))
    line = _line(_OOM, said)
    if line:
        return Finding(BY_NAME["oom_request" if serving else _step(text)], line)
    if code == -9:
        return Finding(BY_NAME["oom_request" if serving else _step(text)],
                       "the kernel killed the engine, most likely for memory")  # fmt: skip
    if code == 2 and "usage:" in text:
        return Finding(BY_NAME["bad_flag"], "the engine refused its command line")
    return Finding(BY_NAME["crash"], _last_error(said) or _ended(code))


def error(finding: Finding, phase: str, tail: str) -> EngineError:
    """The finding as what launches and requests raise; the phase of a launch is the step that failed, if known."""
    failure = finding.failure
    step = STEPS.get(failure.name, phase) if phase == "launch" else phase
    found = EngineError(failure.status, step, finding.sentence(), tail)
    found.failure = failure.name
    return found


def named(name: str, line: str, phase: str, tail: str = "") -> EngineError:
    """An EngineError of a class that no log line shows (a time-out, a foreign server on the port)."""
    return error(Finding(BY_NAME[name], line), phase, tail)


def blamed(found: EngineError, values: Mapping[str, Value]) -> EngineError:
    """``found`` with the settings of ``values`` that its reason names, as name=value, so that all with them are known
    to be refused too."""
    if found.status is not Status.UNSUPPORTED:
        return found
    named = [
        f"{name}={value}"
        for name, value in values.items()
        if f"--{name.replace('_', '-')}" in found.reason
        or (isinstance(value, str) and value != "auto" and re.search(rf"\b{re.escape(value)}\b", found.reason, re.I))
    ]
    missing = [text for text in named if text not in found.reason]
    if not missing:
        return found
    told = EngineError(found.status, found.phase, f"{found.reason} [{', '.join(missing)}]", found.tail)
    told.failure = found.failure
    return told


def _line(pattern: str, text: str) -> str:
    found = re.search(pattern, text, re.MULTILINE)
    if found is None:
        return ""
    start = text.rfind("\n", 0, found.start()) + 1
    end = text.find("\n", found.end())
    line = text[start : end if end >= 0 else len(text)]
    where = found.start() - start
    return _clean(line if len(line) <= REASON else line[max(0, where - 60) : where - 60 + REASON])


def _clean(line: str) -> str:
    """A log line without the process and time stamp in front of it."""
    line = re.sub(r"\x1b\[[0-9;]*m", "", line).strip()
    line = re.sub(r"^\([\w .]+pid=\d+\)\s*|^[\d.]{9,} E +", "", line)
    return re.sub(r"^(ERROR|WARNING|INFO|CRITICAL)\s+[\d-]+\s+[\d:,.]+\s*(\[[^\]]*\]\s*)?", "", line).strip()


def _hinted(line: str, text: str) -> str:
    """The line, and the number that the engine itself proposes."""
    for pattern in _HINTS:
        found = re.search(pattern, text)
        if found and found.group(0) not in line:
            return f"{line} ({found.group(0)})"
    return line


def _step(text: str) -> str:
    return next((name for pattern, name in _STEPS if re.search(pattern, text)), "oom_load")


def _last_error(text: str) -> str:
    """llama.cpp's first line of an error, else the last line that looks like an exception's."""
    first = _ERROR.search(text)
    if first:
        return first.group(1)[:REASON]
    found = re.findall(r"^.*?\b(?:\w+\.)*\w*(?:Error|Exception|Abort|assert\w*)\b: .+$", text, re.MULTILINE)
    roots = [line for line in found if "See root cause above" not in line and "Engine core init" not in line]
    return _clean(roots[-1])[:REASON] if roots else ""


def _ended(code: int | None) -> str:
    if code is None:
        return "the engine answers no longer"
    return f"the engine died of signal {-code}" if code < 0 else f"the engine ended with code {code}"
