"""The ladder of bit widths: for each of a few byte budgets the best allocation known, which a study sees as one knob.

Sensitivities come from the engine's backward pass, bytes from the memory model, and switches are judged by whole-model
KL on calibration text, apart from the text that quality is scored on. All of it is kept in the tuning database.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np

from autotune.allocation import Costs, Floats, predicted, refine, size
from autotune.bench import Bench
from autotune.catalogue import Machine
from autotune.hints import Candidate, fitted
from autotune.memory.forecast import forecast
from autotune.outcome import EngineError, Status
from autotune.quality import Cache, kl_divergence
from autotune.setting import SEQUENCE, Setting
from search_spaces import Choice, Config, Space
from search_spaces.bits import LAYER_GROUPS, MODEL_GROUPS, WIDTHS
from search_spaces.presets import starts
from tuning_db.canonical import digest

RUNGS = 8
MEASUREMENTS = 5
"""Whole-model KL measurements that one rung may take."""
PIECE = 64
"""Positions whose mean KL is one piece of the paired comparison; neighbours in a text are not independent."""
REASON = "the ladder of bit widths decides it (--bits groups searches widths by group)"
FIXED = {**{f"bits_{group}": 16 for group in (*LAYER_GROUPS, *MODEL_GROUPS)}, "bits_protect_first": 0,
         "bits_protect_last": 0}  # fmt: skip


@runtime_checkable
class Sensing(Protocol):
    """An engine that can tell what narrow weights would cost."""

    def sensitivities(self, log: Any, group: int = 64) -> Mapping[str, Mapping[int, float]]: ...


@dataclass(frozen=True, slots=True)
class Rung:
    """``vector``: the value of bits_vector. KL in nats a token on calibration text: predicted as a sum over groups,
    measured on the whole model after ``measurements`` of them."""

    vector: str
    weight_bytes: float
    kl_predicted: float
    kl: float
    measurements: int


def possible(setting: Setting) -> str:
    """Why no ladder can be built for ``setting``; "" when one can."""
    if not isinstance(setting.runtime, Sensing):
        return f"engine {setting.plan.engine} gives no sensitivities"
    limited = sorted(name for name in setting.plan.knobs if name.startswith("bits_"))
    if limited:
        return f"the plan's [knobs] name {limited[0]}"
    if all(setting.space.knob(f"bits_{group}").domain.size == 1 for group in (*LAYER_GROUPS, *MODEL_GROUPS)):
        return "the engine stores no narrow weights here"
    return ""


def costs(setting: Setting, bench: Bench, cache: Cache) -> Costs:
    """Bytes and predicted KL of each group and width that this engine offers here. Raises EngineError."""
    runtime = setting.runtime
    assert isinstance(runtime, Sensing)
    key = _key("sensitivity", setting, ())
    hit = cache.get(key)
    if hit is None:
        found = runtime.sensitivities(bench.logs / "sensitivities.log")
        hit = {group: {str(w): kl for w, kl in by.items()} for group, by in found.items()}, b""
        cache.put(key, "sensitivity", hit[0], b"")
    held = {width: _held(setting, width) for width in WIDTHS}
    return {
        group: {w: (held[w][group], by.get(str(w), 0.0)) for w in WIDTHS if _offered(setting.space, group, w)}
        for group, by in sorted(hit[0].items(), key=lambda item: _place(item[0]))
    }


def _place(group: str) -> tuple[int, str]:
    """Layers in order, then what is of the whole model."""
    layer, dot, name = group.partition(".")
    return (int(layer), name) if dot else (1 << 30, group)


def _offered(space: Space, group: str, width: int) -> bool:
    return space.knob(f"bits_{group.rpartition('.')[2]}").domain.contains(width)


def _held(setting: Setting, width: int) -> Mapping[str, float]:
    """Bytes by group with everything at ``width`` (16: as bf16), all on one rank."""
    machine = Machine("any", 1, 1 << 60, shared=True)
    compute = "bf16" if setting.whole.knob("compute").domain.contains("bf16") else "fp32"
    values = {f"bits_{group}": width for group in (*LAYER_GROUPS, *MODEL_GROUPS)}
    config = {**setting.whole.default(), **values, "compute": compute}
    (stage,) = forecast(setting.plan.engine, setting.model, machine).demand(config).stages
    return stage.groups


def build(
    setting: Setting, bench: Bench, cache: Cache, say: Callable[[str], None] = lambda line: None
) -> tuple[Rung, ...]:
    """The rungs from wide to narrow, each with less bytes and more KL than the one before; the first is full width.

    Taken from ``cache`` when engine build, model and text are the same. Raises EngineError.
    """
    texts = _texts(setting.source, setting.plan.quality_tokens)
    key = _key("ladder", setting, texts)
    hit = cache.get(key)
    if hit is None:
        each, judge = costs(setting, bench, cache), _Judge(setting, bench, texts)
        narrow, wide = ({g: pick(by) for g, by in each.items()} for pick in (min, max))
        budgets = np.geomspace(size(each, narrow), size(each, wide), RUNGS)
        rungs = [Rung("", size(each, wide), 0.0, 0.0, 0)]
        for number, budget in enumerate(reversed(budgets[:-1]), 2):
            # The sum is rounded up by a hair, so that the narrowest of all fits its own budget.
            found = refine(each, float(budget) * (1 + 1e-9), judge, MEASUREMENTS)
            assert found is not None
            vector, kl = written(found.widths), float(found.kl.mean())
            rung = Rung(vector, size(each, found.widths), predicted(each, found.widths), kl, found.evaluations)
            rungs.append(rung)
            counted = f"KL {kl:.3g}, {found.evaluations} measured"
            say(f"ladder {number}/{RUNGS}: {rung.weight_bytes / 2**20:.3g} MiB, {counted}")
        hit = {"rungs": [asdict(rung) for rung in _front(rungs)]}, b""
        cache.put(key, "ladder", hit[0], b"")
    return tuple(Rung(**row) for row in hit[0]["rungs"])


def _front(rungs: Sequence[Rung]) -> list[Rung]:
    """Those that no narrower one matches, wide to narrow."""
    kept: list[Rung] = []
    for rung in sorted(rungs, key=lambda rung: (rung.weight_bytes, rung.kl)):
        if not kept or rung.kl < kept[-1].kl:
            kept.append(rung)
    return kept[::-1]


def written(widths: Mapping[str, int]) -> str:
    """An allocation as a value of bits_vector, which leaves out what has full width."""
    return ",".join(f"{group}={width}" for group, width in widths.items() if width < WIDTHS[-1])


def narrowed(space: Space, rungs: Sequence[Rung]) -> Space:
    """``space`` with one ordinal knob for all widths: the rungs, in order."""
    vectors = tuple(rung.vector for rung in rungs)
    found = space.limit({**{name: (value,) for name, value in FIXED.items()}, "bits_vector": vectors}, REASON)
    knobs = [replace(k, domain=Choice(vectors, ordered=True)) if k.name == "bits_vector" else k for k in found.knobs]
    return replace(found, knobs=tuple(knobs))


def candidates(space: Space, rungs: Sequence[Rung], max_kl: float) -> list[Candidate]:
    """First candidates: graphs and reuse of prefixes with half of the bytes, and the fewest well inside the gate."""
    if not rungs:
        return []
    base = next((dict(p.values) for p in starts(space) if p.name == "graphs-and-reuse"), {})
    half = min(rungs, key=lambda rung: abs(rung.weight_bytes - rungs[0].weight_bytes / 2))
    least = [rung for rung in rungs if rung.kl <= max_kl / 2][-1]
    found: dict[str, Candidate] = {}
    for rung in (half, least):
        config = fitted(space, {**base, "bits_vector": rung.vector})
        if config is not None and config != space.default():
            found[config.key] = Candidate(config, f"ladder, {rung.weight_bytes / 2**20:.3g} MiB of weights")
    return list(found.values())


class _Judge:
    """Whole-model KL of an allocation from full width by pieces of the text, on the engine itself."""

    def __init__(self, setting: Setting, bench: Bench, texts: Sequence[Sequence[int]]) -> None:
        self.bench, self.texts, self.space = bench, texts, setting.whole
        self.base = self.space.reference_part()
        self.reference = bench.score(self.space.complete(self.base), texts)

    def __call__(self, widths: Mapping[str, int]) -> Floats:
        config: Config = self.space.complete({**self.base, "bits_vector": written(widths)})
        scores = self.bench.score(config, self.texts)
        pairs = zip(self.reference, scores, strict=True)
        kl = np.concatenate([kl_divergence(reference, score) for reference, score in pairs])
        if not np.isfinite(kl).all():
            raise EngineError(Status.QUALITY, "ladder", "the model's log-probabilities are not finite")
        return np.array([piece.mean() for piece in np.array_split(kl, max(len(kl) // PIECE, 1))])


def _texts(source: Sequence[int], tokens: int) -> list[list[int]]:
    """As many ``tokens`` as quality is scored on, spread evenly over the text that prompts are cut from instead."""
    count = -(-tokens // SEQUENCE)
    length, stride = min(tokens, SEQUENCE), max(len(source) // count, SEQUENCE)
    found = [list(source[start : start + length]) for start in range(0, len(source), stride)]
    return [ids for ids in found[:count] if len(ids) > 1]


def _key(kind: str, setting: Setting, texts: Sequence[Sequence[int]]) -> str:
    offered = {name: setting.space.knob(name).domain.values for name in FIXED}
    scenario = setting.scenario
    return digest("b1", [kind, scenario.engine_build, scenario.model, offered, RUNGS, MEASUREMENTS, texts])
