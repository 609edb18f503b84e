"""How steps are run: operation by operation, or through regions compiled ahead of time and kept on disk."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import platformdirs
import torch
from torch import Tensor, nn

from autotune.runtimes.native import hyper, kda
from autotune.runtimes.native.capture import Buckets, CapturedSteps, CudaRecorder, Frame, Steps
from autotune.runtimes.native.kernels.cpu import fused
from autotune.runtimes.native.kernels.cpu import library as cpu
from autotune.runtimes.native.kernels.hyper import reference as hyper_kernel
from autotune.runtimes.native.kernels.kda_decode import reference as kda_kernel
from autotune.runtimes.native.moe import MoE
from search_spaces import Value

if TYPE_CHECKING:
    from autotune.runtimes.native.config import ModelConfig
    from autotune.runtimes.native.model import Decoder


Send = Callable[[Tensor], Tensor]


class Eager:
    """Operation by operation. ``kernels`` are what a policy runs instead of the reference of an op."""

    name = "eager"

    def __init__(self, config: ModelConfig) -> None:
        self.kernels: Mapping[str, Callable[..., Any]] = {}
        self.seconds = 0.0

    def bind(self, decoder: Decoder) -> None:
        """Replace what this policy runs otherwise; the decoder has its pools by now."""

    def steps(self, decoder: Decoder, frame: Frame, send: Send, knobs: Mapping[str, Value]) -> Steps:
        """What runs decode steps of a decoder that is bound."""
        return Steps(decoder, frame, send)


class Compiled(Eager):
    """The regions between matrix products through torch's ahead-of-time inductor, one package for any number of rows.

    A package is made once for each model shape, torch and processor, and loaded in milliseconds ever after (tracing
    again at each launch cost seconds a trial). ``seconds`` is what this launch spent on it.
    """

    name = "compiled"

    def __init__(self, config: ModelConfig) -> None:
        start = time.monotonic()
        sizes = (config.hc_sinkhorn_iters, config.hc_eps, config.rms_norm_eps)
        bounds = (config.linear_lower_bound, config.rms_norm_eps)
        streams, hidden = config.hc_mult, config.hidden_size
        heads, size, taps = config.linear_num_heads, config.linear_head_dim, config.linear_conv_kernel_dim
        total, inner, state = (2 + streams) * streams, heads * size, (None, heads, size, size)
        small = {"dt_bias": (inner,), "rate": (heads, 1), "taps": (taps, 3 * inner), "o_norm": (size,)}
        read = region(
            lambda s, fn, base, scale, norm: hyper_kernel.hyper(s, fn, base, scale, norm, sizes),
            [(None, streams, hidden), (total, streams * hidden), (total,), (total,), (hidden,)],
            ("read", sizes),
        )
        core = region(
            lambda w, f, b, g, s, *rest: kda_kernel.step(w, f, b, g, s, dict(zip(small, rest, strict=True)), bounds),
            [(None, taps, 3 * inner), (None, inner), (None, heads), (None, inner), state, *small.values()],
            ("core", bounds),
        )
        # hyper.write stays: its two operations cost less than a call into compiled code (18 against 40 µs).
        self.kernels = {
            "hyper": lambda s, fn, base, scale, norm, _: read(s, fn, base, scale, norm),
            "kda_decode": partial(
                kda_kernel.kda_decode,
                core=lambda w, f, b, g, s, parts, _: core(w, f, b, g, s, *(parts[name] for name in small)),
            ),
        }
        self.seconds = time.monotonic() - start


class Fused(Eager):
    """Hyper-connections, linear attention between its projections, and experts of few tokens in our own C kernels.

    Linear attention goes token by token, in prefill too: the state of a head fits the first-level cache.
    """

    name = "fused"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        library = cpu.library()
        if library is None:
            raise NotImplementedError(f"graphs=fused: {cpu.refusal()}")
        sizes = {"hidden_size": config.hidden_size, "linear_attn_config.head_dim": config.linear_head_dim}
        odd = [f"{name} {size}" for name, size in sizes.items() if size % cpu.LANES]
        if odd or config.hc_mult > cpu.STREAMS or config.n_routed_experts > cpu.EXPERTS:
            limits = f"multiples of {cpu.LANES}, at most {cpu.STREAMS} streams and {cpu.EXPERTS} experts"
            raise NotImplementedError(f"graphs=fused takes {limits}; {' and '.join(odd) or 'this model has more'}")
        self._library = library
        # The first two run until `bind` knows weights and pools.
        self.kernels = {
            "hyper": hyper_kernel.hyper, "kda_decode": kda_kernel.kda_decode, **fused.attention(library)
        }  # fmt: skip

    def bind(self, decoder: Decoder) -> None:
        library, model = self._library, decoder.config
        decoder.write = fused.writer(library)
        for layer in decoder.layers:
            layer.reads = [fused.reader(library, args) for args in layer.hc]
            if isinstance(layer.mlp, MoE):
                layer.mlp.fuse(library, model.swiglu_limit)
        for attention in decoder.linear_layers():
            assert attention.pool is not None
            attention.fused = fused.Kda(
                library, attention.small, attention.bounds, attention.pool.conv, attention.pool.state
            )


class CudaGraphs(Eager):
    """Decode steps captured once a bucket of batch (and context) and replayed; prefill runs kernel by kernel."""

    name = "cuda"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        if not torch.cuda.is_available():
            raise NotImplementedError("graphs=cuda needs a CUDA device, and there is none here")

    def steps(self, decoder: Decoder, frame: Frame, send: Send, knobs: Mapping[str, Value]) -> Steps:
        return CapturedSteps(decoder, frame, send, buckets(frame, knobs), CudaRecorder())


def buckets(frame: Frame, knobs: Mapping[str, Value]) -> Buckets:
    """The shapes that ``graph_batch`` and ``graph_contexts`` ask to capture."""
    batch = min(int(knobs["graph_batch"]), int(knobs["max_seqs"]))
    return Buckets.of(batch, frame.block, frame.size, knobs["graph_contexts"] == "buckets")


class _Module(nn.Module):
    """What `torch.export` wants around a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Any:
        return self.function(*args)


def region(function: Callable[..., Any], shapes: list[tuple[int | None, ...]], name: tuple[Any, ...]) -> Any:
    """``function`` of fp32 tensors, compiled; a size of None is the number of rows, any at run time.

    ``name`` and the shapes identify the package on disk, together with torch, the processor and our own source.
    """
    sources = [Path(module.__file__ or "").read_bytes() for module in (hyper, kda, hyper_kernel, kda_kernel)]
    where = (str(torch.get_default_device()), torch.backends.cpu.get_cpu_capability())
    identity = repr((name, shapes, torch.__version__, where)).encode()
    key = hashlib.sha256(b"".join([identity, *sources])).hexdigest()[:24]
    folder = platformdirs.user_cache_path("autotune", ensure_exists=True) / "graphs"
    folder.mkdir(exist_ok=True)
    package = folder / f"{name[0]}-{key}.pt2"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not package.is_file():
            _compile(function, shapes, package)
        compiled = torch._inductor.aoti_load_package(str(package))
    # Called below its Python wrapper, which costs more than the region itself. The package reads its inputs by the
    # strides of the example, which were those of whole tensors.
    run = compiled.loader.boxed_run
    return lambda *args: run([arg.contiguous() for arg in args])


def _compile(function: Callable[..., Any], shapes: list[tuple[int | None, ...]], package: Path) -> None:
    rows = torch.export.Dim("rows", min=2, max=1 << 20)  # one row runs the same code; export cannot say so
    example = tuple(torch.randn(*(3 if size is None else size for size in shape)) for shape in shapes)
    dynamic = tuple({0: rows} if shape[0] is None else None for shape in shapes)
    program = torch.export.export(_Module(function), example, dynamic_shapes=(dynamic,))
    with tempfile.TemporaryDirectory(dir=package.parent) as folder:
        made = torch._inductor.aoti_compile_and_package(program, package_path=str(Path(folder) / package.name))
        Path(made).replace(package)  # atomic: two launches may compile at once


def compiler() -> str | None:
    """The C++ compiler that torch would call, None where there is none."""
    return shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")


def preload() -> None:
    """What each launch with compiled regions would otherwise do again: imports, and probing the vector units (2 s)."""
    if compiler() is not None:
        import torch._inductor.package  # noqa: F401
        from torch._inductor import cpu_vec_isa

        cpu_vec_isa.valid_vec_isa_list()


POLICIES: Mapping[str, type[Eager]] = {"eager": Eager, "compiled": Compiled, "fused": Fused, "cuda": CudaGraphs}


def policy(name: str, config: ModelConfig) -> Eager:
    """The policy of a ``graphs`` value. Raises NotImplementedError for one that this machine cannot run."""
    return POLICIES[name](config)
