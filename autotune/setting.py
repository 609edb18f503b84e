"""Turns a Plan into what a study is made of: runtime, narrowed space, workload, scenario, bench. Measures nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from autotune import engines
from autotune import model as models
from autotune.bench import Bench
from autotune.corpus import PROMPT_SHARE, encoder, read_tokens
from autotune.hardware import Probe, probe
from autotune.launches import Launches
from autotune.memory.forecast import Forecast, forecast, machine_of
from autotune.objective import Objective
from autotune.plan import Plan
from autotune.quality import Gate, Quality
from autotune.runtimes.base import Runtime
from autotune.runtimes.native.kernels.tuning import Entries
from autotune.telemetry import Watch as Telemetry
from autotune.telemetry import ask_gpu
from autotune.workload import Workload, load_workload, recorded_in
from search_spaces import Space, SpaceError, load
from tuning_db import Hardware, Reference, Scenario, Store

SEQUENCE = 512
"""Tokens of one scored sequence: beyond the reference model's index_topk, so that sparse selection is scored too."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A plan made concrete on this machine. ``whole`` is the space before the plan's own limits."""

    plan: Plan
    runtime: Runtime
    model: models.Model
    whole: Space
    space: Space
    workload: Workload
    objective: Objective
    source: Sequence[int]
    heldout: tuple[tuple[int, ...], ...]
    scenario: Scenario


def reference_model() -> Path:
    """The folder of the trained model that comes with the package."""
    return Path(str(resources.files("autotune") / "data" / "reference"))


def packaged(name: str) -> Path:
    """A model's folder: ``name`` as a path, or a model that comes with the package under it (glm-5.3-flash: a
    config.json alone); without a name the reference model."""
    own = Path(str(resources.files("autotune"))) / "data" / name
    return reference_model() if not name else own if own.is_dir() and not Path(name).exists() else Path(name)


def prepare(plan: Plan, kernels: Entries | None = None) -> Setting:
    """Probe the machine, read the model, narrow the space; ``kernels`` are what was tuned for engines here.

    Raises the one-line errors of each part.
    """
    load(plan.engine)
    folder = packaged(plan.model)
    facts = models.facts(folder) if plan.engine == "native" else models.served(folder)
    workload = recorded_in(load_workload(plan.workload), encoder(folder, facts.vocab))
    objective = Objective(plan.objective or _usual_objective(workload))
    tokens = read_tokens(folder, facts.vocab)
    cut = int(len(tokens) * PROMPT_SHARE)
    heldout = tokens[cut : cut + plan.quality_tokens]
    runtime = _runtime(plan, folder, workload.longest, kernels)
    machine, capabilities = probe(), runtime.capabilities()
    memory = _forecast(plan.engine, facts, machine, int(capabilities["devices"])) if plan.engine == "native" else None
    whole = engines.space(runtime, plan.engine).narrow(
        {**capabilities, **model_facts(facts), **memory_facts(memory), "longest": workload.longest}
    )
    space = whole.limit(plan.knobs, "the plan's [knobs] leave it out") if plan.knobs else whole
    broken = space.broken(space.default())
    if broken:
        raise SpaceError("the default configuration breaks a rule: " + "; ".join(broken))
    scenario = Scenario(
        hardware=Hardware(machine.kind, machine.facts),
        engine=plan.engine,
        engine_build=runtime.version(),
        model=facts.identity(),
        workload={
            **workload.identity(),
            "text": hashlib.sha256(repr(tokens).encode()).hexdigest()[:16],
            "seed": plan.seed,
            **({"precision": plan.precision} if plan.precision > 0 else {}),
            "gate": {"kl": plan.max_kl, "perplexity": plan.max_perplexity, "tokens": plan.quality_tokens},
        },
        objective=objective.identity(),
    )
    sequences = tuple(tuple(heldout[i : i + SEQUENCE]) for i in range(0, len(heldout), SEQUENCE))
    return Setting(
        plan, runtime, facts, whole, space, workload, objective, tokens[:cut],
        tuple(s for s in sequences if len(s) > 1), scenario,
    )  # fmt: skip


def model_facts(model: models.Model) -> dict[str, Any]:
    """What narrows a space by the model."""
    return {
        "layers": model.layers,
        "state_bytes": model.state_bytes,
        "mlps": model.mlp_kinds,
        "experts": model.experts,
        "sizes": model.sizes,
        "inputs": model.inputs,
        "mla": model.shapes.get("kv_lora_rank", 0) > 0,
    }


def memory_facts(memory: Forecast | None) -> dict[str, Any]:
    """The forecast that a space's memory rule asks; none where the machine's memory is unknown."""
    return {"memory": memory} if memory is not None else {}


def _forecast(engine: str, model: models.Model, machine: Probe, devices: int) -> Forecast | None:
    found = machine_of(machine.kind, machine.facts, devices)
    return forecast(engine, model, found) if found is not None else None


def engine_build(plan: Plan, kernels: Entries | None = None) -> Mapping[str, Any]:
    """What the plan's engine would be here now, as part of a scenario. Raises SpaceError for an unknown engine."""
    folder = packaged(plan.model)
    return _runtime(plan, folder, load_workload(plan.workload).longest, kernels).version()


def make_bench(setting: Setting, store: Store, logs: Path, launches: Launches | None = None) -> Bench:
    """A bench whose quality references and results are cached in ``store``."""
    plan = setting.plan
    bench = Bench(
        setting.runtime, setting.space, setting.workload, setting.source, logs,
        gate=Gate(plan.max_kl, plan.max_perplexity), deadline=plan.deadline, precision=plan.precision,
        launches=launches,
        telemetry=lambda: Telemetry(gpu=ask_gpu if setting.scenario.hardware.kind == "gpu" else None),
    )  # fmt: skip
    identity = {"build": dict(setting.scenario.engine_build), "model": dict(setting.scenario.model)}
    quality = Quality(
        setting.whole, setting.heldout, StoreCache(store), identity,
        lambda config: bench.score(config, setting.heldout),
    )  # fmt: skip
    return replace(bench, quality=quality)


def _usual_objective(workload: Workload) -> str:
    return "tasks_per_min" if workload.kind == "task" else "output_tok_s"


def _runtime(plan: Plan, folder: Path, longest: int, kernels: Entries | None) -> Runtime:
    if plan.engine != "native":
        return engines.server(plan, folder, max(longest, SEQUENCE + 1))
    from autotune.runtimes.native import NativeRuntime

    return NativeRuntime(folder, kernels=kernels)


@dataclass(frozen=True, slots=True)
class StoreCache:
    """`quality.Cache` over the tuning database."""

    store: Store

    def get(self, key: str) -> tuple[Mapping[str, Any], bytes] | None:
        found = self.store.reference(key)
        return (found.facts, found.blob) if found is not None else None

    def put(self, key: str, kind: str, facts: Mapping[str, Any], blob: bytes) -> None:
        self.store.put_reference(Reference(key=key, kind=kind, facts=dict(facts), blob=blob))
