"""The C kernels behind the interfaces of the torch code that they replace; each keeps alive what C points to."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autotune.runtimes.native.kernels.absorbed.reference import absorbed
from autotune.runtimes.native.kernels.choose.reference import choose as choose_reference
from autotune.runtimes.native.kernels.cpu import library as cpu
from autotune.runtimes.native.kernels.latents import Latents, Scope
from autotune.runtimes.native.kernels.sparse.reference import sparse

Pair = tuple[Tensor, Tensor]
Triple = tuple[Tensor, Tensor, Tensor]
SPREAD = 3
"""Tokens of a mixture for each row that makes a product few. Measured with 8 experts, 2 a token."""
KINDS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int8: "int8"}


def _weight(tensor: Tensor) -> cpu.Weight:
    """An fp32 matrix as the kernels see it."""
    return cpu.Weight(cpu.KINDS["fp32"], *tensor.shape, 0, tensor.data_ptr(), 0)


def reader(library: ctypes.CDLL, args: tuple[Any, ...]) -> Callable[[Tensor], Triple]:
    """`kernels.hyper` with everything but the streams given."""
    fn, base, scale, norm, (iterations, eps, norm_eps) = args
    count, size = fn.shape[1] // norm.numel(), norm.numel()
    constants = cpu.Hyper(
        count, size, iterations, eps, norm_eps, base.data_ptr(), scale.data_ptr(), norm.data_ptr(), _weight(fn)
    )
    at, threads, run = ctypes.addressof(constants), torch.get_num_threads(), library.hyper_read

    def read(streams: Tensor, kept: Any = (constants, args)) -> Triple:
        streams, rows = streams.contiguous(), len(streams)
        x, post, mix = torch.empty(rows, size), torch.empty(rows, count), torch.empty(rows, count, count)
        run(at, streams.data_ptr(), rows, x.data_ptr(), post.data_ptr(), mix.data_ptr(), threads)
        return x, post, mix

    return read


def writer(library: ctypes.CDLL) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """`hyper.write`, in place."""
    run = library.hyper_write

    def write(streams: Tensor, output: Tensor, post: Tensor, mix: Tensor) -> Tensor:
        rows, count, size = streams.shape
        output = output.contiguous()
        run(streams.data_ptr(), output.data_ptr(), post.data_ptr(), mix.data_ptr(), rows, count, size)
        return streams

    return write


class Kda:
    """One linear-attention layer between its projections, over its pools ``conv`` and ``state``, changed in place."""

    def __init__(
        self,
        library: ctypes.CDLL,
        small: Mapping[str, Tensor],
        bounds: tuple[float, float],
        conv: Tensor,
        state: Tensor,
    ) -> None:
        heads, size = state.shape[1:3]
        self._inner, self._conv, self._state = heads * size, conv, state
        self._constants = cpu.Kda(
            heads, size, conv.shape[1] + 1, state.dtype is torch.bfloat16, *bounds,
            *(small[name].data_ptr() for name in ("taps", "dt_bias", "rate", "o_norm")),
        )  # fmt: skip
        self._kept = small
        self._at, self._step, self._segment = ctypes.addressof(self._constants), library.kda_step, library.kda_segment

    def step(self, qkv: Tensor, forget: Tensor, beta: Tensor, gate: Tensor, slots: Tensor) -> Tensor:
        """One token of each of Q sequences, [Q, …] → [Q, H·d]; ``forget`` is overwritten."""
        out = torch.empty(len(qkv), self._inner)
        inputs = [t.contiguous() for t in (qkv, forget, beta, gate, slots)]
        pools = self._conv.data_ptr(), self._state.data_ptr()
        self._step(self._at, *(t.data_ptr() for t in inputs), *pools, out.data_ptr(), len(qkv))
        return out

    def segment(
        self, qkv: Tensor, forget: Tensor, beta: Tensor, gate: Tensor, slot: int, borders: tuple[int, ...]
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """T tokens of one sequence, [T, …] → [T, H·d], and (conv, state) after each of ``borders`` tokens."""
        out, many = torch.empty(len(qkv), self._inner), len(borders)
        inputs = [t.contiguous() for t in (qkv, forget, beta, gate)]
        conv, state = self._conv[slot], self._state[slot]
        windows, states = conv.new_empty(many, *conv.shape), state.new_empty(many, *state.shape)
        ends = (ctypes.c_int64 * many)(*borders)
        self._segment(
            self._at, *(t.data_ptr() for t in inputs), conv.data_ptr(), state.data_ptr(), out.data_ptr(), len(qkv),
            ctypes.addressof(ends), many, windows.data_ptr(), states.data_ptr(),
        )  # fmt: skip
        return out, list(zip(windows.unbind(), states.unbind(), strict=True))


class Experts:
    """A mixture of experts: ``mlps`` are the local routed ones from number ``first`` on, then the shared one.

    ``rule`` is (experts a token, scaling, clamp of the activation); up to ``few`` tokens this beats torch's products.
    """

    def __init__(
        self, library: ctypes.CDLL, router: Tensor, bias: Tensor, mlps: Sequence[Any], first: int,
        rule: tuple[int, float, float],
    ) -> None:  # fmt: skip
        stored = [part for mlp in mlps for part in (mlp.gate_up, mlp.down)]
        # Each expert gets a few of the tokens, and torch pays for each expert apart. 0: a weight without a C kernel.
        self.few = SPREAD * min(getattr(part, "few", 0) for part in stored)
        array = cpu.Weight * len(mlps)
        ups, downs = (array(*(part.weight for part in stored[i::2])) for i in (0, 1)) if self.few else (None, None)
        top, scaling, limit = rule
        self._constants = cpu.Moe(
            len(router), first, len(mlps) - 1, top, router.shape[1], scaling, limit, bias.data_ptr(), _weight(router),
            ups, downs,
        )  # fmt: skip
        self._kept = (router, bias, stored, ups, downs)
        self._at, self._threads, self._run = ctypes.addressof(self._constants), torch.get_num_threads(), library.experts

    def __call__(self, x: Tensor) -> Tensor:
        x, out = x.contiguous(), torch.empty(x.shape)
        self._run(self._at, x.data_ptr(), len(x), out.data_ptr(), self._threads)
        return out


def attention(library: ctypes.CDLL) -> dict[str, Callable[..., Any]]:
    """`absorbed`, `sparse` and the choice of pools for decode steps; prefill stays with the reference.

    With a choice of pools only those are read, in both forms.
    """
    run, threads = library.latent_step, torch.get_num_threads()

    def step(query: Tensor, latents: Latents, scope: Scope, scale: float) -> Tensor:
        count, _, heads, width = query.shape
        rows, out = latents.rows, torch.empty(query.shape)
        pool = cpu.Latents(cpu.KINDS[KINDS[rows.dtype]], width, rows.data_ptr(), latents.scale.data_ptr())
        positions, query = scope.positions.flatten().contiguous(), query.contiguous()
        chosen = real = 0
        picks = 0
        if scope.pools is not None and scope.real is not None:
            kept = scope.pools.contiguous(), scope.real.contiguous()
            chosen, real, picks = kept[0].data_ptr(), kept[1].data_ptr(), kept[0].shape[-1]
        slots = latents.slots
        run(
            ctypes.addressof(pool), query.data_ptr(), count, heads, slots.data_ptr(), slots.stride(0),
            positions.data_ptr(), scope.kpool, chosen, real, picks, scale, out.data_ptr(), threads,
        )  # fmt: skip
        return out

    def either(reference: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def op(query: Tensor, latents: Latents, scope: Scope, scale: float) -> Tensor:
            fits = query.shape[1] == 1 and query.shape[3] % cpu.LANES == 0 and latents.rows.dtype in KINDS
            return (step if fits else reference)(query, latents, scope, scale)

        return op

    def choose(queries: Tensor, weights: Tensor, keys: Tensor, positions: Tensor, kpool: int, top: int) -> Pair:
        count, heads, size = queries.shape
        if keys.shape[0] != count or size % cpu.LANES:
            return choose_reference(queries, weights, keys, positions, kpool, top)
        pools = keys.shape[1]
        picks = min(top, pools)
        inputs = [t.contiguous() for t in (queries, weights, keys.float(), positions)]
        chosen, real = torch.empty(count, picks, dtype=torch.int64), torch.empty(count, picks, dtype=torch.bool)
        library.choose(
            *(t.data_ptr() for t in inputs), count, heads, size, pools, kpool, picks, chosen.data_ptr(), real.data_ptr()
        )
        return chosen, real

    return {"absorbed": either(absorbed), "sparse": either(sparse), "choose": choose}
