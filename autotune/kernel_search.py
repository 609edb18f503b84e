"""Kernel tuning as studies of the tuning database: a scenario for each operator, and the table of what was confirmed.

Draws nothing. The table is of exactly this hardware, these kernels' source and this torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from autotune import hardware
from autotune import model as models
from autotune.decision import decided
from autotune.kernel_bench import KernelBench
from autotune.objective import Objective
from autotune.plan import Plan, PlanError
from autotune.runtimes import native
from autotune.runtimes.native.config import read_config
from autotune.runtimes.native.kernels import operators, tuning
from autotune.runtimes.native.kernels.process import KernelProcess
from autotune.runtimes.native.kernels.tuning import Entries, Operator
from autotune.setting import packaged
from autotune.tune import Study, Tuner
from tuning_db import Hardware, Reference, Scenario, Store

OBJECTIVE = Objective("op_s")
DEFAULTS: Mapping[str, int] = {"budget": 24, "finalists": 2, "blocks": 5}
"""What a plan's own defaults become for one operator: its trials take milliseconds, and there are many of it."""
WIDTHS = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0, "int4": 0.5}
"""Bytes a weight by storage."""


@dataclass(frozen=True, slots=True)
class KernelSetting:
    """A plan made concrete: which operators the checkpoint has, and what they are measured on."""

    plan: Plan
    model: models.Model
    machine: Hardware
    build: Mapping[str, str]
    operators: tuple[Operator, ...]
    cache: int

    def footprint(self, operator: Operator) -> int:
        """Bytes of weights that pass between two uses of one: all of the model's, or twice the last-level cache."""
        return min(int(sum(self.model.parameters.values()) * _width(operator.dtype)), 2 * self.cache)

    def scenario(self, operator: Operator) -> Scenario:
        resident = self.footprint(operator) < 2 * self.cache
        return Scenario(
            hardware=self.machine,
            engine=f"kernels/{operator.backend}",
            engine_build=self.build,
            model={
                "name": operator.key, "op": operator.op, "dtype": operator.dtype, "outputs": operator.outputs,
                "inputs": operator.inputs, "rows": operator.rows,
            },
            workload={"name": "cache" if resident else "memory", "threads": 1},
            objective=OBJECTIVE.identity(),
        )  # fmt: skip

    @contextmanager
    def tuner(self, operator: Operator, store: Store, logs: Path) -> Iterator[Tuner]:
        """The study of one operator. Raises EngineError where an engine here does not make that product."""
        process = KernelProcess(operator, self.footprint(operator), logs / "kernel.log")
        try:
            bench = KernelBench.of(process)
            key = store.ensure(self.scenario(operator))
            plan = self.plan
            yield Tuner(Study(key, OBJECTIVE, plan.budget, plan.seed, plan.finalists, plan.blocks), bench, store)
        finally:
            process.close()

    def table(self, store: Store) -> Entries:
        """What was confirmed here for any shape, best or default, by `Operator.key`."""
        found: dict[str, dict[str, Any]] = {}
        for scenario in store.scenarios():
            if not scenario.engine.startswith("kernels/"):
                continue
            operator = Operator.parse(str(scenario.model["name"]))
            if self.scenario(operator).key != scenario.key:
                continue  # other hardware, other kernels, or weights that come from elsewhere
            results = list(decided(store.trials(scenario.key, stage="confirm"), scenario, store))
            if results:
                latest = max(results, key=lambda result: max(trial.ended_at for trial in result.trials))
                found[operator.key] = dict(latest.config)
        return found


def prepare(plan: Plan) -> KernelSetting:
    """Read the checkpoint and the machine. Raises the one-line errors of each part."""
    usual = {name: value for name, value in DEFAULTS.items() if plan.origin.get(name, "default") == "default"}
    plan = replace(plan, **usual)  # type: ignore[arg-type]
    folder = packaged(plan.model)
    model, machine = models.facts(folder), hardware.probe()
    gpu = machine.kind == "gpu"
    wanted = tuple(operators.operators(read_config(folder), plan.only, plan.knobs, gpu))
    if not wanted:
        raise PlanError(f"--only {plan.only!r} leaves no operator; names are such as linear/int8-bf16/512x256/16")
    cache = hardware.cache_bytes(machine.kind)
    return KernelSetting(plan, model, Hardware(machine.kind, machine.facts), build(), wanted, cache)


def tuned(plan: Plan, store: Store) -> Entries:
    """The table for engines of this plan, kept in the database under its digest so that exports can carry it.

    Only the native engine takes one.
    """
    if plan.engine != "native":
        return {}
    setting = prepare(replace(plan, only="", knobs={}))
    table = setting.table(store)
    if table:
        blob = json.dumps(table, sort_keys=True).encode()
        store.put_reference(Reference(tuning.digest(table), "kernels", {"operators": len(table)}, blob))
    return table


def build() -> dict[str, str]:
    """What decides how fast a choice is, besides the hardware: the kernels' source, torch, and triton where it is."""
    folder = Path(native.__file__).parent
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("kernels/**/*"), *folder.glob("quant/**/*")]):
        if path.suffix in (".py", ".c", ".h"):
            digest.update(path.read_bytes())
    found = {"source": digest.hexdigest()[:16], "torch": metadata.version("torch")}
    try:
        return found | {"triton": metadata.version("triton")}
    except metadata.PackageNotFoundError:
        return found


def _width(dtype: str) -> float:
    return WIDTHS[dtype.partition("-")[0].partition("g")[0]]
