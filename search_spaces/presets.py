"""Named configurations worth starting from or comparing with, each with where it comes from. Measures nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from search_spaces.domain import Value
from search_spaces.space import Config, Space, SpaceError


@dataclass(frozen=True, slots=True)
class Preset:
    """``values`` differ from the engine's defaults; ``sentence`` says whose setting it is."""

    name: str
    engine: str
    sentence: str
    values: Mapping[str, Value]

    def config(self, space: Space) -> tuple[Config, dict[str, str]]:
        """As much of it as ``space`` offers, and why each left-out value is not possible here."""
        kept: dict[str, Value] = {}
        left: dict[str, str] = {}
        for name, value in self.values.items():
            try:
                space.check(name, value)
                kept[name] = value
            except SpaceError as error:
                left[name] = str(error)
        return space.complete(kept), left


PRESETS = (
    Preset(
        "flash-as-shipped", "native",
        "How the slow GLM-5.3-Flash was reported to be served: attention expanded to full multi-head, one global INT8 "
        "on weights and activations, plain data parallelism, no graphs, no cache reuse.",
        {
            "attention": "expanded", "graphs": "eager", "prefix_reuse": False, "activations": "int8_tensor", "dp": 2,
            **{f"bits_{group}": 8 for group in ("attention", "dense", "experts", "shared", "embedding", "lm_head")},
        },
    ),
)  # fmt: skip


def preset(name: str, engine: str = "native") -> Preset:
    """The preset called ``name``. Raises SpaceError naming those that there are."""
    found = next((p for p in PRESETS if p.name == name and p.engine == engine), None)
    if found is None:
        names = ", ".join(p.name for p in PRESETS if p.engine == engine) or "none"
        raise SpaceError(f"engine {engine} has no preset {name!r}; there are: {names}")
    return found
