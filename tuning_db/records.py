"""The records that a tuning database keeps: hardware, scenario, trial, sample, reference, and their keys.

Knows what makes two machines or two scenarios the same; knows nothing of how a record is stored.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuning_db.canonical import digest

Facts = Mapping[str, Any]
"""Names to JSON values."""

LOOSE_FACTS: Mapping[str, tuple[str, ...]] = {
    "gpu": ("product", "memory_bytes", "count", "compute_capability"),
    "cpu": ("cpu_model", "cores"),
}
"""The facts that make two machines alike enough for a hint, by kind. All facts together make them the same."""


@functools.cache
def host_digest() -> str:
    """A digest that stays the same on this machine and is not its name; 16 hex digits."""
    try:
        machine = Path("/etc/machine-id").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        machine = ""
    return hashlib.sha256(f"{machine}\n{platform.node()}\n{uuid.getnode()}".encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a measurement ran on. ``kind`` is ``gpu`` or ``cpu``; every entry of ``facts`` is part of the identity.

    A fact that is None is unknown: it equals only itself on the same ``host``, never another machine's. Use the names
    of `LOOSE_FACTS` (``product``, ``memory_bytes``, ``count``, ``compute_capability``; ``cpu_model``, ``cores``),
    and add what else tells machines apart: links, ``mig_profile`` (``off`` without), power limit, driver, CUDA.
    """

    kind: str
    facts: Facts
    host: str = field(default_factory=host_digest, compare=False)

    @property
    def key(self) -> str:
        """The strict key, ``h1:…``: equal only where a number measured on one may be claimed for the other."""
        return digest("h1", {"kind": self.kind, "facts": self.known()})

    @property
    def loose(self) -> str:
        """The loose key, ``hl1:…``: equal where a configuration of one is a fair hint for the other."""
        known = self.known()
        unknown = {"unknown_on": self.host}
        facts = {name: known.get(name, unknown) for name in LOOSE_FACTS.get(self.kind, ())}
        return digest("hl1", {"kind": self.kind, "facts": facts})

    def known(self) -> dict[str, Any]:
        """The facts as they are compared: an unknown one stands for this host's own, so that no other equals it."""
        return {name: {"unknown_on": self.host} if value is None else value for name, value in self.facts.items()}

    @property
    def label(self) -> str:
        """A short name for people, such as ``4xA100-SXM4-80GB`` or ``2-core Intel Xeon``."""
        if self.kind == "gpu":
            product = re.sub(r"^(NVIDIA|AMD|Intel)\s+", "", str(self.facts.get("product") or "unknown GPU"))
            mig = self.facts.get("mig_profile")
            return f"{self.facts.get('count') or '?'}x{product}" + (f" MIG {mig}" if mig and mig != "off" else "")
        model = re.sub(r"\((R|TM)\)|\b(CPU|Processor)\b|@.*", " ", str(self.facts.get("cpu_model") or "unknown CPU"))
        return f"{self.facts.get('cores') or '?'}-core {' '.join(model.split())}"


@dataclass(frozen=True, slots=True)
class Scenario:
    """One tuning problem: this engine and model on this hardware, under this workload, for this objective.

    Everything in the four mappings counts towards the identity, so pass no file path, time or display setting.
    ``model`` and ``workload`` should carry a ``name`` for people and filters.
    """

    hardware: Hardware
    engine: str
    engine_build: Facts
    model: Facts
    workload: Facts
    objective: Facts

    @property
    def key(self) -> str:
        """``s1:…``; trials of one key answer the same question."""
        return digest("s1", {**self._measured(), "objective": self.objective})

    @property
    def measured_key(self) -> str:
        """``m1:…``, the identity without the objective: samples of one key may be judged by any objective."""
        return digest("m1", self._measured())

    @property
    def engine_key(self) -> str:
        """``e1:…``, the engine and its build: equal where the same code ran."""
        return digest("e1", {"engine": self.engine, "build": self.engine_build})

    @property
    def model_key(self) -> str:
        """``md1:…``, the model's name, revision and content."""
        return digest("md1", self.model)

    @property
    def workload_key(self) -> str:
        """``w1:…``, the workload."""
        return digest("w1", self.workload)

    @property
    def subject_key(self) -> str:
        """``u1:…``, the loose key: engine and model by name; others never answer for it, not even as a hint."""
        return digest("u1", {"engine": self.engine, "model": self.model.get("name")})

    def _measured(self) -> dict[str, Any]:
        return {
            "hardware": self.hardware.key,
            "engine": self.engine,
            "engine_build": self.engine_build,
            "model": self.model,
            "workload": self.workload,
        }


@dataclass(frozen=True, slots=True)
class Trial:
    """One measurement of one configuration, or why there is none.

    ``stage`` is search, confirm or another name; ``metrics`` and ``seconds`` (our own cost by phase: launch, warmup,
    measure, quality, tuner) are in SI units; ``block`` pairs runs of the confirmation and is 0 in the search;
    ``started_at`` and ``ended_at`` are Unix times; ``counted`` says whether it spends one trial of the budget.
    """

    id: str
    scenario_key: str
    stage: str
    config: Facts
    config_key: str
    status: str
    reason: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    effective: Facts = field(default_factory=dict)
    counters: Facts = field(default_factory=dict)
    block: int = 0
    seed: int = 0
    started_at: float = 0.0
    ended_at: float = 0.0
    provenance: Facts = field(default_factory=dict)
    counted: bool = True


@dataclass(frozen=True, slots=True)
class Sample:
    """The timeline of one request. Times are seconds since the run began; ``error`` is empty for a good request."""

    trial_id: str
    index: int
    facts: Facts
    sent: float
    token_times: tuple[float, ...]
    prompt_tokens: int
    output_tokens: int
    error: str = ""

    @property
    def first(self) -> float | None:
        """When the first token came, or None if none did."""
        return self.token_times[0] if self.token_times else None

    @property
    def last(self) -> float | None:
        """When the last token came, or None if none did."""
        return self.token_times[-1] if self.token_times else None


@dataclass(frozen=True, slots=True)
class Reference:
    """Bytes kept under a digest, such as a quality reference; ``facts`` say what they are."""

    key: str
    kind: str
    facts: Facts
    blob: bytes


_last_id = 0
_id_lock = threading.Lock()


def new_id() -> str:
    """A unique id whose order is the order of time: 48 bits of Unix milliseconds and 32 random bits, 20 hex digits.

    Ids made by one process always ascend; two processes collide with probability 2⁻³² in the same millisecond.
    """
    global _last_id
    with _id_lock:
        number = (time.time_ns() // 1_000_000) << 32 | int.from_bytes(os.urandom(4), "big")
        _last_id = max(number, _last_id + 1)
        return f"{_last_id:020x}"
