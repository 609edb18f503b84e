"""What a space offers on this machine or on a named one, at no launch: what is left, removed, learned, and what fits.

Measures nothing; `cli.space` prints it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autotune import infeasible, kernel_search
from autotune.catalogue import GIB, Machine, named
from autotune.hardware import probe
from autotune.hints import fitted
from autotune.memory.forecast import ENGINES, Forecast, forecast, machine_of
from autotune.model import Model, described
from autotune.plan import Plan
from autotune.runtimes.native import NativeRuntime
from autotune.setting import memory_facts, model_facts, packaged, prepare
from autotune.workload import load_workload
from search_spaces import Space, Value, load, vllm
from search_spaces.bits import LAYER_GROUPS, MODEL_GROUPS
from search_spaces.presets import Preset, starts
from tuning_db import StoreError, open_store

SAMPLES = 400
"""Random configurations by which the share that breaks no rule is estimated."""
LEAST_TOKENS = 32768
"""KV tokens below which a checkpoint counts as not fitting: the shortest max_model_len of vLLM's space."""
LEAN: Mapping[str, Value] = {
    "spec_method": "none", "max_num_seqs": 4, "max_num_batched_tokens": 1152, "cudagraph_mode": "NONE", "gmu": 0.96,
    "prefix_caching": False, "ssm_dtype": "bfloat16",
}  # fmt: skip
"""What needs least memory: where even that leaves no cache, a checkpoint is removed."""


@dataclass(frozen=True, slots=True)
class Fit:
    """``bits`` on ``layout``: bytes of weights on the fullest device and KV tokens of all replicas; ``reason``: why it
    does not fit or may not run, else empty."""

    bits: str
    layout: str
    weight_bytes: float
    kv_tokens: int
    reason: str


@dataclass(frozen=True, slots=True)
class Offer:
    """``learned``: what the scenario's failed trials exclude; ``share``: of random configurations, those that break no
    rule; ``starts``: published recipes that a search measures first."""

    engine: str
    model: Model
    machine: Machine | None
    space: Space
    memory: Forecast | None
    fits: tuple[Fit, ...]
    learned: tuple[str, ...]
    share: float
    starts: tuple[Preset, ...]


def offer(plan: Plan, hardware: str = "") -> Offer:
    """Raises the one-line errors of each part."""
    machine = named(hardware) if hardware else None
    path = packaged(plan.model)
    model = described(path)
    if plan.engine == "native" and machine is None and model.weights_digest:
        space, learned = _here(plan)
        memory = space.facts.get("memory")
        machine = memory.machine if memory is not None else None
    else:
        probed = NativeRuntime(path).capabilities() if plan.engine == "native" and machine is None else {}
        machine = machine or _this()
        memory = forecast(plan.engine, model, machine) if machine is not None and plan.engine in ENGINES else None
        space, learned = _there(plan, model, machine, memory, probed), ()
    fits = tuple(_fits(space, memory)) if memory is not None else ()
    recipes = tuple(p for p in starts(space) if fitted(space, p.values) not in (None, space.default()))
    return Offer(plan.engine, model, machine, space, memory, fits, learned, _share(space), recipes)


def _here(plan: Plan) -> tuple[Space, tuple[str, ...]]:
    """The space of a search on this machine, with what its own trials taught."""
    try:
        with open_store(plan.db or None, readonly=True) as store:
            setting = prepare(plan, kernel_search.tuned(plan, store))
            trials = store.trials(scenario_key=setting.scenario.key, stage="search")
    except StoreError:
        if plan.origin.get("db") == "--db":
            raise
        setting, trials = prepare(plan), []  # nothing was ever measured here
    space = infeasible.learned(setting.space, [t for t in trials if t.counted])
    before = len(setting.space.rules)
    return space, tuple(rule.sentence for rule in space.rules[before:])


def _this() -> Machine | None:
    found = probe()
    devices = found.facts.get("count" if found.kind == "gpu" else "cores") or 1
    return machine_of(found.kind, found.facts, int(devices))


def _there(
    plan: Plan, model: Model, machine: Machine | None, memory: Forecast | None, probed: Mapping[str, Any]
) -> Space:
    """The space on a machine that is named, or of an engine that cannot be probed here."""
    facts: dict[str, Any] = {
        **model_facts(model), **memory_facts(memory), "longest": load_workload(plan.workload).longest,
        "mtp_layers": model.shapes["mtp_layers"],
    }  # fmt: skip
    if machine is not None:
        facts |= {
            "devices": machine.count, "cuda": not machine.shared, "compute_capability": machine.capability,
            "link": machine.link,
        }  # fmt: skip
        if machine.shared:
            facts["cores"] = machine.count
    facts |= probed
    whole = load(plan.engine)
    if plan.engine == "vllm" and memory is not None and not memory.machine.shared:
        facts["unfit"] = _unfit(memory, whole)
    space = whole.narrow(facts)
    if plan.engine == "vllm":
        space = vllm.settled(space)
    return space.limit(plan.knobs, "the plan's [knobs] leave it out") if plan.knobs else space


def _layouts(space: Space, devices: int) -> Iterator[dict[str, Value]]:
    """All of tp × pp × dp that use every device; with replicas the experts are split over all ranks."""
    values = {name: [int(v) for v in space.knob(name).domain.values] for name in ("tp", "pp", "dp")}
    for dp in values["dp"]:
        for pp in values["pp"]:
            for tp in reversed(values["tp"]):
                if tp * pp * dp == devices and not (pp > 1 and dp > 1):
                    yield {"tp": tp, "pp": pp, "dp": dp}


def _named(layout: Mapping[str, Value]) -> str:
    return " ".join(f"{name}{value}" for name, value in layout.items() if value != 1) or "tp1"


def _choices(space: Space) -> Iterator[tuple[str, dict[str, Value]]]:
    """Widths by name with the knobs that make them."""
    if space.engine == "vllm":
        for name, checkpoint in vllm.CHECKPOINTS.items():
            drafts = checkpoint.mtp and space.knob("spec_method").domain.contains("mtp")
            moe = next(m for m in ("marlin", "humming", "triton") if checkpoint.experts in vllm.WIDTHS[m])
            yield name, {"checkpoint": name, "spec_method": "mtp" if drafts else "none", "moe_backend": moe}
        return
    compute = "bf16" if space.knob("compute").domain.contains("bf16") else "fp32"
    for width in (16, 8, 4):
        values: dict[str, Value] = {f"bits_{group}": width for group in (*LAYER_GROUPS, *MODEL_GROUPS)}
        kept = {name: value for name, value in values.items() if space.knob(name).domain.contains(value)}
        yield f"{width} bits ({compute})" if width == 16 else f"{width} bits", {**kept, "compute": compute}


def _fits(space: Space, memory: Forecast) -> Iterator[Fit]:
    """Every width on every layout, all else as by default; three drafted tokens where there is a draft layer."""
    removed = {(r.knob, r.value): r.reason for r in space.removals}
    for bits, chosen in _choices(space):
        for layout in _layouts(space, memory.machine.count):
            values = {**space.default(), **chosen, **layout}
            if space.engine == "vllm":
                values |= {"ep": int(layout["dp"]) > 1, "spec_k": 3}
            try:
                demand = memory.demand(values)
            except NotImplementedError as error:
                yield Fit(bits, _named(layout), 0.0, 0, str(error))
                continue
            tokens = memory.tokens(values)
            config = {k: v for k, v in values.items() if k != "kv_cap"}
            broken = [r.sentence for r in space.rules if not r.name.endswith(("memory", "pool")) and r.broken(
                {**config, "kv_cap": 0}, space.facts)]  # fmt: skip
            reason = "; ".join(broken) or removed.get(("checkpoint", bits), "")
            if tokens < 1:
                reason = "out of memory"
            yield Fit(bits, _named(layout), demand.weights, max(int(tokens), 0), reason)


def _unfit(memory: Forecast, whole: Space) -> dict[str, str]:
    """Why each checkpoint that fits no layout does not, at its best layout."""
    found = {}
    free = replace(whole, facts={"devices": memory.machine.count})
    for name, chosen in _choices(free):
        best: tuple[float, str, float, float] | None = None
        for layout in _layouts(free, memory.machine.count):
            values = {**free.default(), **chosen, **layout, **LEAN}
            try:
                demand, tokens = memory.demand(values), memory.tokens(values)
            except NotImplementedError:
                continue
            left = memory.usable(values) - memory.overhead.bytes(demand.features) - demand.graphs
            if best is None or tokens > best[0]:
                best = (tokens, _named(layout), demand.weights / GIB, left / GIB)
        if best is not None and best[0] < LEAST_TOKENS:
            tokens, layout_name, weights, room = best
            found[name] = (
                f"{weights:.1f} GiB of weights a device at best ({layout_name}), of {room:.1f} GiB beside overhead, "
                + (f"leave {tokens:,.0f} tokens of cache" if tokens > 0 else "leave no cache")
            )
    return found


def _share(space: Space) -> float:
    draw = random.Random(0)
    free: Sequence[Any] = space.free()
    valid = 0
    for _ in range(SAMPLES):
        config = space.complete({knob.name: draw.choice(knob.domain.values) for knob in free})
        valid += not any(rule.broken(config, space.facts) for rule in space.rules)
    return valid / SAMPLES
