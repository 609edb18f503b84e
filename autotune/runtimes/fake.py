"""An engine made of formulas, in virtual time: a known optimum, known noise and scripted failures, to test the tuner.

Its figures are inventions and never stand in for a measurement; it loads no model and starts no process.
"""

from __future__ import annotations

import asyncio
import math
import random
import selectors
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from autotune.outcome import EngineError, Status
from autotune.runtimes.base import Chunk, Endpoint, Generation, RequestError, Score
from search_spaces import Config, Space, Value

PREFILL = 5000.0
"""Prompt tokens a second of a landscape's unit speed."""
STEP = 0.005
"""Seconds of a decode step of one sequence at unit speed; each further sequence adds a tenth."""
LAUNCH = {"crash": Status.CRASH, "oom": Status.OOM, "unsupported": Status.UNSUPPORTED, "timeout": Status.TIMEOUT,
          "busy": Status.BUSY}  # fmt: skip
"""Faults that end a launch; ``crash`` and ``oom`` may come while measuring instead."""
KINDS = (*LAUNCH, "hang", "not_applied", "garbage", "nan", "errors", "empty")
FACTS: Mapping[str, Any] = {"devices": 1, "cores": 2, "layers": 4, "experts": 8, "cuda": False, "refused": {}}


@dataclass(frozen=True, slots=True)
class Landscape:
    """How fast and how wrong a configuration is.

    ``factors``: {knob: {value: factor of speed}}, multiplied; ``kl``: {knob: {value: nats}}, added. What is not
    listed counts 1 and 0.
    """

    factors: Mapping[str, Mapping[Value, float]]
    kl: Mapping[str, Mapping[Value, float]] = field(default_factory=dict)

    def speed(self, config: Mapping[str, Value]) -> float:
        return math.prod(self.factors.get(k, {}).get(v, 1.0) for k, v in config.items())

    def divergence(self, config: Mapping[str, Value]) -> float:
        """Mean KL in nats a token from the reference."""
        return math.fsum(self.kl.get(k, {}).get(v, 0.0) for k, v in config.items())

    def optimum(self, space: Space, max_kl: float = math.inf) -> Config:
        """The fastest configuration that keeps to ``max_kl`` and breaks no rule, by trying all that can matter."""
        names = [k.name for k in space.free() if k.name in self.factors or k.name in self.kl]
        best: Config | None = None
        for values in product(*(space.knob(name).domain.values for name in names)):
            config = space.complete(dict(zip(names, values, strict=True)))
            allowed = self.divergence(config) <= max_kl and not space.broken(config)
            if allowed and (best is None or self.speed(config) > self.speed(best)):
                best = config
        if best is None:
            raise ValueError(f"no configuration of the space keeps to a KL of {max_kl:g}")
        return best


NATIVE = Landscape(
    factors={
        "attention": {"absorbed": 1.0, "expanded": 0.8, "sparse": 1.15},
        "bits_experts": {16: 1.0, 8: 1.25, 4: 1.4},
        "bits_attention": {16: 1.0, 8: 1.1, 4: 1.12},
        "graphs": {"eager": 1.0, "compiled": 1.3},
        "activations": {"weight_only": 1.0, "int8_tensor": 1.3},
        "prefix_reuse": {False: 1.0, True: 1.2},
        "max_seqs": {1: 0.5, 2: 0.8, 4: 0.95, 8: 1.0, 16: 0.98},
        "threads": {1: 1.0, 2: 1.1},
    },
    kl={
        "bits_experts": {8: 0.0005, 4: 0.006},
        "bits_attention": {8: 0.0005, 4: 0.012},
        "activations": {"int8_tensor": 1.8},
    },
)
"""A landscape over the native engine's space: its fastest point fails the quality gate."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A scripted failure of every configuration that ``when`` picks.

    ``kind``: one of KINDS. ``phase``: launch or measure, for crash and oom. ``share``: of the requests that errors
    and empty strike. ``knob``: what not_applied leaves at another value.
    """

    kind: str
    when: Callable[[Config], bool] = lambda config: True
    phase: str = "launch"
    share: float = 1.0
    knob: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"fault kind {self.kind!r} is none of {', '.join(KINDS)}")


class FakeRuntime:
    """A `base.Runtime` that plays ``landscape``.

    Each launch's speed is multiplied by exp(``noise`` × a standard normal drawn from ``seed`` and the launch's
    number). ``launched`` lists the configurations in order, ``requests`` counts streams, ``running`` open launches.
    ``vocab`` must be even.
    """

    name = "fake"

    def __init__(
        self,
        landscape: Landscape = NATIVE,
        faults: Sequence[Fault] = (),
        noise: float = 0.0,
        seed: int = 0,
        facts: Mapping[str, Any] = FACTS,
        vocab: int = 256,
    ) -> None:
        if vocab < 2 or vocab % 2:
            raise ValueError(f"vocab must be even and at least 2, not {vocab}")
        self.landscape, self.faults, self.noise, self.seed = landscape, tuple(faults), noise, seed
        self.facts, self.vocab = dict(facts), vocab
        self.launched: list[Config] = []
        self.requests = 0
        self.running = 0

    def version(self) -> Mapping[str, str]:
        return {"fake": "1"}

    def capabilities(self) -> Mapping[str, Any]:
        return dict(self.facts)

    def command(self, config: Config) -> list[str]:
        return ["fake-engine", *(part for k, v in config.items() for part in (f"--{k}", str(v)))]

    @contextmanager
    def launch(self, config: Config, log: Path) -> Iterator[Endpoint]:
        self.launched.append(config)
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(" ".join(self.command(config)) + "\n", encoding="utf-8")
        faults = {f.kind: f for f in self.faults if f.when(config)}
        for kind, status in LAUNCH.items():
            if kind in faults and faults[kind].phase == "launch":
                raise EngineError(status, "launch", f"scripted {kind}", tail="fake engine: the end of its log")
        self.running += 1
        try:
            yield FakeEndpoint(self, config, faults, len(self.launched))
        finally:
            self.running -= 1


class FakeEndpoint:
    """A running fake: sleeps the seconds of its formula, in the virtual time of its own event loop."""

    def __init__(self, runtime: FakeRuntime, config: Config, faults: Mapping[str, Fault], number: int) -> None:
        self._runtime, self._config, self._faults = runtime, config, faults
        draw = random.Random(f"{runtime.seed}/{number}").gauss(0.0, 1.0)
        self._speed = runtime.landscape.speed(config) * math.exp(runtime.noise * draw)
        self._strike = random.Random(f"{runtime.seed}/faults/{number}")
        self._active = 0
        self._generated = 0

    def event_loop(self) -> asyncio.AbstractEventLoop:
        """A loop whose seconds pass at once; see `loadgen.Simulated`."""
        return VirtualLoop()

    async def stream(self, generation: Generation) -> AsyncIterator[Chunk]:
        """Tokens that depend on the prompt (and, above temperature 0, on the seed) alone."""
        loop = asyncio.get_running_loop()
        self._runtime.requests += 1
        if self._struck("errors"):
            raise RequestError("HTTP 500: scripted")
        if self._struck("empty"):
            return
        draw = random.Random(f"{generation.prompt}/{generation.seed if generation.temperature > 0 else ''}")
        self._active += 1
        try:
            await asyncio.sleep(len(generation.prompt) / (PREFILL * self._speed))
            for index in range(generation.max_tokens):
                await self._fail(index)
                await asyncio.sleep(STEP * (1 + (self._active - 1) / 10) / self._speed)
                self._generated += 1
                last = index == generation.max_tokens - 1
                token = int(draw.random() * self._runtime.vocab)
                yield Chunk((token,), loop.time(), "length" if last else None)
        finally:
            self._active -= 1

    def _struck(self, kind: str) -> bool:
        return kind in self._faults and self._strike.random() < self._faults[kind].share

    async def _fail(self, index: int) -> None:
        if "hang" in self._faults:
            await asyncio.get_running_loop().create_future()
        for kind in ("crash", "oom"):
            if kind in self._faults and index == 2:
                raise EngineError(LAUNCH[kind], "measure", f"scripted {kind}", tail="fake engine: the end of its log")

    def score(self, sequences: Sequence[Sequence[int]], top: int) -> list[Score]:
        """Distributions whose KL from the uniform reference is the landscape's, at every position.

        Half of the tokens have p = e^a / (2 cosh a) × 2/V and half e^-a…, so KL(uniform ‖ trial) = ln cosh a. The
        actual next tokens fall on both halves in turn, so the perplexity ratio is e^KL over an even number of them.
        """
        divergence = 8.0 if "garbage" in self._faults else self._runtime.landscape.divergence(self._config)
        # ln cosh a = KL, solved for a without overflow.
        tilt = divergence + math.log1p(math.sqrt(max(-math.expm1(-2 * divergence), 0.0)))
        return [self._score(sequence, min(top, self._runtime.vocab), tilt, divergence) for sequence in sequences]

    def _score(self, sequence: Sequence[int], top: int, tilt: float, divergence: float) -> Score:
        vocab = self._runtime.vocab
        count = max(len(sequence) - 1, 0)
        actual = np.asarray(sequence[1:], np.int64) % vocab
        signs = 1 - 2 * (np.arange(count) % 2)
        offsets = (np.arange(vocab)[None, :] - actual[:, None]) % 2
        logs = -math.log(vocab) - divergence + tilt * signs[:, None] * (1 - 2 * offsets)
        if "nan" in self._faults:
            logs = np.full_like(logs, np.nan)
        order = np.argsort(-logs, axis=1, kind="stable")[:, :top]
        return Score(
            np.take_along_axis(logs, actual[:, None], 1)[:, 0].astype(np.float32),
            order.astype(np.int32),
            np.take_along_axis(logs, order, 1).astype(np.float32),
        )

    def effective(self) -> Mapping[str, Any]:
        config: dict[str, Any] = dict(self._config)
        if "not_applied" in self._faults:
            name = self._faults["not_applied"].knob or next(iter(config))
            config[name] = f"not {config[name]}"
        return config

    def counters(self) -> Mapping[str, float]:
        return {"generated": float(self._generated)}

    def reset(self) -> None:
        if self._active:
            raise EngineError(Status.CRASH, "measure", f"reset with {self._active} requests running")
        self._generated = 0

    def adopt(self, config: Config) -> bool:
        self.reset()
        self._speed *= self._runtime.landscape.speed(config) / self._runtime.landscape.speed(self._config)
        self._config = config
        return True


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that jumps to the next timer instead of sleeping, and starts at second 1000."""

    def __init__(self) -> None:
        self._now = 1000.0
        super().__init__(_Jump(self))

    def time(self) -> float:
        return self._now

    def jump(self, seconds: float) -> None:
        self._now += seconds


class _Jump(selectors.DefaultSelector):
    """Never waits: a timer that is due later is due now. Waiting for nothing at all would last for ever."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise RuntimeError("virtual time stands still: every task waits for something that cannot happen")
        self._loop.jump(max(timeout, 0.0))
        return super().select(0)
