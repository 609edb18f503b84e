"""Forecasts one engine's memory on one machine: whether a configuration fits, and what is said beside a measurement."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autotune.catalogue import GIB, Machine
from autotune.memory import demands
from autotune.memory.overhead import Overhead, assumed, learned
from autotune.memory.ranks import Demand
from autotune.model import Model
from autotune.outcome import KEPT_LAUNCH
from search_spaces import Value

Config = Mapping[str, Value]
ENGINES: Mapping[str, Callable[[Model, Config], Demand]] = {"native": demands.native, "vllm": demands.vllm}
USUAL_GRAPHS = 32
"""Rows of the largest captured graph behind the assumed overhead: 8 sequences of one token and three drafted ones."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """``machine`` with ``overhead`` a rank, for ``engine`` on ``model``."""

    engine: str
    model: Model
    machine: Machine
    overhead: Overhead = field(default_factory=Overhead)

    def demand(self, config: Config) -> Demand:
        """Raises NotImplementedError for a layout that the model cannot be cut into."""
        return ENGINES[self.engine](self.model, config)

    def usable(self, config: Config) -> float:
        """Bytes of a device that the configuration may use."""
        return self.machine.memory_bytes * float(config.get("gmu", 1.0))

    def tokens(self, config: Config) -> float:
        """KV tokens of all replicas that fit beside the rest, each replica running its share of the sequences."""
        demand = self.demand(config)
        return demand.room(self._free(demand, config))

    def overflows(self, config: Config) -> bool:
        """Whether the configuration needs more memory than there is, or holds fewer tokens than it must."""
        if self.machine.shared and self._surely_fits(config):
            return False
        demand = self.demand(config)
        if demand.tokens is None:
            least = int(config.get("max_model_len", 1))
            return demand.room(self._free(demand, config)) < least * demand.ranks.dp
        if self.machine.shared:
            return demand.total() + self._beside(demand) * demand.ranks.count > self.usable(config)
        return demand.most() > self._free(demand, config)

    def _surely_fits(self, config: Config) -> bool:
        """A bound in a few products, for small models on large machines: no rank holds more than all of it in fp32
        twice, and its cache in fp32."""
        model, ranks = self.model, math.prod(int(config[name]) for name in ("tp", "pp", "dp"))
        weights = 2 * 4.2 * sum(model.parameters.values())
        cache = 4 * model.kv_bytes_per_token * (int(config["kv_tokens"]) + 64)
        states = 2 * model.state_bytes * (int(config["max_seqs"]) + 1) + (int(config.get("state_cache_mib", 0)) << 20)
        beside = self.overhead.bytes({"tokens": float(config["token_budget"]), "seqs": float(config["max_seqs"])})
        return ranks * (weights + cache + states + beside) <= self.machine.memory_bytes

    def _free(self, demand: Demand, config: Config) -> float:
        whole = self.usable(config) / (demand.ranks.count if self.machine.shared else 1)
        return whole - self._beside(demand)

    def _beside(self, demand: Demand) -> float:
        return self.overhead.bytes(demand.features)

    def said(self, config: Config, counters: Mapping[str, Any]) -> dict[str, dict[str, float]]:
        """``predicted`` beside ``measured`` bytes, all ranks together, under the names of the engine's counters.

        ``weight_bytes`` are those in a bit vector's groups, as engines count them.
        """
        try:
            demand = self.demand(config)
        except NotImplementedError:
            return {}
        count = demand.ranks.tp * demand.ranks.dp
        packed = sum(sum(v for k, v in stage.groups.items() if k) for stage in demand.stages) * count
        packed += demand.second * demand.ranks.count
        beside = demand.graphs + demand.kept + demand.second
        cache = sum(demand.rank(s) - s.weights - beside for s in demand.stages) * count
        peak = demand.total() + self._beside(demand) * demand.ranks.count
        predicted = {"weight_bytes": packed, "cache_bytes": cache, "peak_bytes": peak}
        return {
            "predicted": {name: float(round(value)) for name, value in predicted.items()},
            "measured": {name: float(counters[name]) for name in predicted if name in counters},
        }

    def taught(self, rows: Iterable[tuple[Config, Mapping[str, Any]]]) -> Forecast:
        """With the overhead that (configuration, counters) of measured trials of one engine build show.

        A launch that was kept for a second configuration teaches by its first alone, since its peak is of both. On
        GPUs the engine's ``device_peak_bytes`` count; its ``peak_bytes`` are those of the host.
        """
        name = "peak_bytes" if self.machine.shared else "device_peak_bytes"
        seen = []
        for config, counters in rows:
            if name in counters and not counters.get(KEPT_LAUNCH):
                demand = self.demand(config)
                residual = (float(counters[name]) - demand.total()) / demand.ranks.count
                seen.append((demand.features, residual))
        return replace(self, overhead=learned(seen, self.overhead))


def forecast(engine: str, model: Model, machine: Machine) -> Forecast:
    """Before anything was measured. A CPU's overhead counts as none until trials teach it."""
    if machine.shared:
        return Forecast(engine, model, machine)
    sizes = len(demands.capture_sizes(USUAL_GRAPHS))
    graphs = demands.GRAPH_BASE + demands.GRAPH_EACH * sizes if engine == "vllm" else 0.0
    return Forecast(engine, model, machine, assumed(machine.memory_bytes, graphs))


def machine_of(kind: str, facts: Mapping[str, Any], devices: int) -> Machine | None:
    """This machine, from the facts of `hardware.probe`; None where its memory is unknown."""
    memory = facts.get("memory_bytes")
    if memory is None:
        return None
    if kind == "cpu":
        return Machine("this machine", devices, int(memory), shared=True)
    # The probe rounds to what is printed on the card; a process gets about 1.1 % less.
    usable = int(int(memory) * 0.9893)
    return Machine("this machine", devices, usable, facts.get("compute_capability"), facts.get("links"))


def words(demand: Demand) -> str:
    """``42.5 GiB of weights, 1.4 GiB of states`` on the fullest rank."""
    state = max(demand.slots * stage.state for stage in demand.stages)
    return f"{demand.weights / GIB:.1f} GiB of weights and {state / GIB:.1f} GiB of states on the fullest device"
