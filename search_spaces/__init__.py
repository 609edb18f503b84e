"""What may vary: knobs, rules and spaces of the engines. Standard library only; imports nothing of ours."""

from __future__ import annotations

from search_spaces.domain import Choice, Float, Int, Pow2, Value
from search_spaces.space import Config, Facts, Knob, Removal, Rule, Space, SpaceError

__all__ = [
    "Choice", "Config", "Facts", "Float", "Int", "Knob", "Pow2",
    "Removal", "Rule", "Space", "SpaceError", "Value", "load",
]  # fmt: skip


def load(engine: str, platform: str = "") -> Space:
    """The whole space of an engine, before any narrowing. Raises SpaceError for an unknown engine.

    ``platform`` picks among the builds of one engine: ``cpu``, else that for GPUs.
    """
    from search_spaces import llamacpp, native, sglang, vllm, vllm_cpu

    served = vllm_cpu.SPACE if platform == "cpu" else vllm.SPACE
    spaces = {"native": native.SPACE, "vllm": served, "sglang": sglang.SPACE, "llamacpp": llamacpp.SPACE}
    if engine not in spaces:
        raise SpaceError(f"unknown engine {engine!r}; engines: {', '.join(spaces)}")
    return spaces[engine]
