"""One case of every operator at any sizes: what a Triton kernel and its reference are called with, and what that moves.

Made by seeds from the sizes alone, on the device that is asked for. Times nothing and compares nothing.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autotune.runtimes.native.kernels.experts.reference import Experts, Stack
from autotune.runtimes.native.kernels.latents import Latents, Scope
from autotune.runtimes.native.kernels.w4a16.reference import pack
from autotune.runtimes.native.quant.codes import int4_codes, int8_codes

PACKAGE = "autotune.runtimes.native.kernels"
BOUNDS = (-5.0, 1e-6)
SINKHORN = (20, 1e-6, 1e-5)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The shape of a model, and the tokens that a decode step looks back on."""

    hidden: int
    outputs: int
    heads: int
    latent: int
    head: tuple[int, int]
    linear_heads: int
    linear: int
    experts: int
    top: int
    inner: int
    context: int
    pools: int
    streams: int = 4


SMALL = Sizes(64, 100, 3, 32, (16, 24), 2, 16, 5, 2, 32, 70, 3)
"""Ragged, and small enough for Triton's interpreter."""
MODEL = Sizes(4096, 24576, 64, 512, (256, 256), 64, 128, 288, 8, 2048, 8192, 512)
"""GLM-5.3-Flash; outputs are those of the linear attention's query, key and value."""


@dataclass(frozen=True, slots=True)
class Case:
    """``nbytes`` is the least that must move, ``operations`` two a multiply-add of tensors of type ``unit``.

    ``plain`` runs the same product in torch at 16 bits where there is one to replace; ``restore`` undoes what a call
    changed in its arguments. Answers may be ``close`` apart, relative to the largest.
    """

    op: str
    label: str
    call: Callable[[Any], Any]
    nbytes: float
    operations: float = 0.0
    unit: str = "bf16"
    close: float = 1e-4
    plain: Callable[[], Any] | None = None
    restore: Callable[[], None] | None = None

    def bound(self, backend: str) -> Callable[[], Any]:
        """The call to ``backend``, reference or triton."""
        return partial(self.call, importlib.import_module(f"{PACKAGE}.{self.op}.{backend}"))

    def run(self, backend: str) -> list[Tensor]:
        """The answers of ``backend``."""
        if self.restore is not None:
            self.restore()
        found = self.bound(backend)()
        return [found] if isinstance(found, Tensor) else _flat(found)


def _given(op: str, arguments: tuple[Any, ...], module: Any) -> Any:
    return getattr(module, op)(*arguments)


def _flat(answers: Any) -> list[Tensor]:
    return [part.clone() for one in answers for part in ([one] if isinstance(one, Tensor) else one)]


@dataclass(frozen=True, slots=True)
class Cases:
    """Makes the cases of a model of ``sizes`` whose 16-bit type is ``dot``."""

    sizes: Sizes
    dot: torch.dtype
    device: str

    @property
    def close(self) -> float:
        return 1e-4 if self.dot is torch.float32 else 1e-2

    def some(self, *shape: int, seed: int = 0) -> Tensor:
        source = torch.Generator(self.device).manual_seed(seed + sum(shape))
        return torch.randn(shape, generator=source, device=self.device)

    def products(self, rows: int, groups: tuple[int, ...] = (32, 64, 128)) -> Iterator[Case]:
        outputs, inputs = self.sizes.outputs, self.sizes.hidden
        x, weight = self.some(rows, inputs), self.some(outputs, inputs, seed=1) * inputs**-0.5
        wide, narrow = weight.to(self.dot), x.to(self.dot)
        plain = partial(torch.nn.functional.linear, narrow, wide)
        codes, scale = int8_codes(weight)
        traffic, work, label = 4 * rows * (inputs + outputs), 2.0 * rows * inputs * outputs, f"{rows} rows"

        def made(op: str, name: str, call: Callable[[Any], Any], nbytes: float, unit: str = "bf16") -> Case:
            return Case(op, f"{label} {name}".strip(), call, nbytes + traffic, work, unit, self.close, plain)

        yield made("w8a16", "", lambda m: m.matmul(x, codes, scale, self.dot), codes.nbytes)
        yield made("w8a8", "", lambda m: m.matmul(*m.quantize(x), codes, scale), codes.nbytes, "int8")
        for group in (group for group in groups if inputs % group == 0):
            four, scales, lows = int4_codes(weight, group)
            parts = pack(four, inputs // group), scales, lows
            held = sum(part.nbytes for part in parts)
            yield made("w4a16", f"group {group}", lambda m, parts=parts: m.matmul(x, *parts, self.dot), held)

    def stack(self, outputs: int, inputs: int, bits: int, group: int) -> Stack:
        """One expert's weights at a time, so that the wide ones are never held together."""
        parts: list[tuple[Tensor, ...]] = []
        for expert in range(self.sizes.experts):
            weight = self.some(outputs, inputs, seed=expert) * inputs**-0.5
            if bits == 16:
                parts.append((weight.to(self.dot),))
            elif bits == 8:
                parts.append(int8_codes(weight))
            else:
                codes, scale, low = int4_codes(weight, group)
                parts.append((pack(codes, inputs // group), scale, low))
        return Stack(*(torch.stack(each) for each in zip(*parts, strict=True)))

    def experts(self, tokens: tuple[int, ...], bits: int, group: int = 32) -> Iterator[Case]:
        s = self.sizes
        of = Experts(
            self.stack(2 * s.inner, s.hidden, bits, group), self.stack(s.hidden, s.inner, bits, group), 10.0, self.dot
        )
        for count in tokens:
            x, scores = self.some(count, s.hidden), self.some(count, s.experts, seed=2)
            weights, chosen = scores.softmax(1).topk(s.top)
            used = len(chosen.unique())
            nbytes = (of.gate_up.nbytes + of.down.nbytes) * used / s.experts + 8 * count * s.hidden
            work = 6.0 * count * s.top * s.hidden * s.inner
            both = self.dot is torch.int8
            label = f"{count} tokens {bits} bits" + (f" group {group}" if bits == 4 else " both" if both else "")
            call = partial(_given, "experts", (x, chosen, weights, of))
            unit = "int8" if both else "bf16"
            yield Case("experts", label, call, nbytes, work, unit, max(self.close, 1e-3))

    def latents(self, rows: int) -> tuple[Latents, Scope, Scope, Tensor]:
        """A cache of ``rows`` sequences, their scopes without and with chosen pools, and queries."""
        s, size = self.sizes, 16
        blocks = -(-s.context // size)
        source = torch.Generator(self.device).manual_seed(rows)
        table = torch.randperm(rows * blocks, generator=source, device=self.device).view(rows, blocks)
        slots = (table[:, :, None] * size + torch.arange(size, device=self.device)).flatten(1)[:, : s.context]
        empty = torch.empty(0, 1, dtype=torch.bfloat16, device=self.device)
        pool = Latents(self.some(rows * blocks * size, s.latent).to(self.dot), empty, table, size, slots)
        at = torch.full((rows, 1), s.context - 1, device=self.device)
        pools = self.some(rows, s.context // 4, seed=3).topk(s.pools).indices[:, None]
        return (
            pool,
            Scope(at, 4),
            Scope(at, 4, pools, torch.ones_like(pools, dtype=torch.bool)),
            self.some(rows, 1, s.heads, s.latent),
        )

    def attention(self, rows: int) -> Iterator[Case]:
        s = self.sizes
        pool, causal, chosen, query = self.latents(rows)
        scale, label = s.head[0] ** -0.5, f"{rows} × {s.context}"
        width = pool.rows.element_size() * s.latent
        whole, part = rows * s.context * width, rows * (4 * s.pools + 3) * width
        work = 4.0 * rows * s.context * s.heads * s.latent
        less = work * part / whole

        def made(op: str, call: Callable[[Any], Any], nbytes: float, work: float) -> Case:
            return Case(op, label, call, nbytes + 2 * query.nbytes, work, close=self.close)

        yield made("absorbed", lambda m: m.absorbed(query, pool, causal, scale), whole, work)
        yield made("split_kv", lambda m: m.split_kv(query, pool, causal, scale, 8, False), whole, work)
        yield made("sparse", lambda m: m.sparse(query, pool, chosen, scale), part, less)

    def expanded(self, tokens: int) -> Case:
        s = self.sizes
        query = self.some(1, tokens, s.heads, s.head[0])
        keys, values = (self.some(1, tokens, s.heads, n, seed=4).to(self.dot) for n in s.head)
        where = Scope(torch.arange(tokens, device=self.device)[None], 4)
        nbytes = keys.nbytes + values.nbytes + 2 * query.nbytes
        scale = s.head[0] ** -0.5
        work = tokens**2 * s.heads * sum(s.head)
        call = partial(_given, "expanded", (query, keys, values, where, scale))
        return Case("expanded", f"{tokens} tokens", call, nbytes, work, close=self.close)

    def linear(self, rows: int, tokens: int, chunk: int) -> Iterator[Case]:
        s = self.sizes
        shape, inner = (s.linear_heads, s.linear), s.linear_heads * s.linear
        q, k, v, raw = (self.some(tokens, *shape, seed=n) for n in range(4))
        parts = q, k, v, BOUNDS[0] * (2 * raw).sigmoid(), self.some(tokens, s.linear_heads).sigmoid()
        state = self.some(*shape, s.linear)
        held = sum(part.nbytes for part in parts) + q.nbytes + state.nbytes * (1 + tokens // chunk)
        work = 2.0 * tokens * s.linear_heads * s.linear * (4 * chunk + 3 * s.linear)
        label = f"{tokens} tokens chunk {chunk}"
        yield Case("kda_prefill", label, lambda m: m.kda_prefill(*parts, state, chunk), held, work, "fp32", 1e-3)
        projected = (
            self.some(rows, 3 * inner),
            self.some(rows, inner),
            self.some(rows, shape[0]),
            self.some(rows, inner),
        )
        small = {
            "dt_bias": self.some(inner), "rate": self.some(shape[0], 1).exp(),
            "taps": self.some(4, 3 * inner), "o_norm": self.some(s.linear),
        }  # fmt: skip
        pool = self.some(rows + 1, 3, 3 * inner), self.some(rows + 1, *shape, s.linear)
        slots = torch.arange(rows, device=self.device)

        kept = tuple(part.clone() for part in pool)

        def step(module: Any) -> Any:
            return module.kda_decode(projected, pool, slots, small, BOUNDS), pool

        def restore() -> None:
            for part, before in zip(pool, kept, strict=True):
                part.copy_(before)

        moved = sum(part[:rows].nbytes for part in pool) * 2 + sum(part.nbytes for part in projected)
        yield Case("kda_decode", f"{rows} rows", step, moved, close=1e-3, restore=restore)

    def streams(self, rows: int) -> Case:
        s = self.sizes
        total, wide = (2 + s.streams) * s.streams, s.streams * s.hidden
        fn = self.some(total, wide) * wide**-0.5
        inputs = self.some(rows, s.streams, s.hidden), fn, self.some(total), self.some(total), self.some(s.hidden)
        nbytes = sum(part.nbytes for part in inputs) + inputs[0].nbytes / s.streams
        return Case("hyper", f"{rows} rows", lambda m: m.hyper(*inputs, SINKHORN), nbytes, close=1e-3)


def every(
    sizes: Sizes,
    dot: torch.dtype,
    device: str,
    rows: tuple[int, ...] = (1, 3, 17, 70),
    tokens: tuple[int, ...] = (1, 5, 40),
) -> Iterator[Case]:
    """Few rows of every operator, for a comparison with its reference."""
    of = Cases(sizes, dot, device)
    for count in rows:
        yield from of.products(count)
    few = dataclasses.replace(of, sizes=dataclasses.replace(sizes, experts=min(sizes.experts, 16)))
    for bits in (16, 8, 4):
        yield from few.experts(tokens, bits)
    yield from dataclasses.replace(few, dot=torch.int8).experts(tokens, 8)
    yield from of.attention(3)
    yield of.expanded(min(sizes.context, 300))
    yield from of.linear(3, 70, 16)
    yield of.streams(5)
