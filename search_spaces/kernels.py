"""Meta-parameters of the native engine's kernels, one space a backend. Knows no shape: facts and defaults are given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from search_spaces.domain import Choice, Int, Pow2, Value
from search_spaces.space import Facts, Knob, Rule, Space, SpaceError

SHARED_BYTES = 163 << 10
"""Shared memory that one thread block may ask for on sm80; a larger device says so in its facts."""
ACCUMULATORS = 256
"""fp32 sums that a thread can hold; it has 255 registers for everything."""


def _packed(config: Mapping[str, Value]) -> bool:
    return config["path"] == "packed"


def _path(value: Value, facts: Facts) -> str:
    return str(facts.get("refused", {}).get(f"path={value}", ""))


def _compiled(value: Value, facts: Facts) -> str:
    return "" if facts.get("compiled", True) else "there are no C kernels to build otherwise"


def _shared(config: Mapping[str, Value], facts: Facts) -> bool:
    """Triton 3.9 keeps the tiles of all stages but the one being multiplied, as compilations for sm80 show."""
    rows = int(config["m"]) * float(facts.get("activation_bytes", 4))
    weights = int(config["n"]) * float(facts.get("weight_bytes", 1))
    held = (rows + weights) * int(config["k"]) * max(int(config["stages"]) - 1, 1)
    return held > int(facts.get("shared_bytes", SHARED_BYTES))


CPU = Space(
    "kernels/cpu",
    (
        Knob(
            "path", "kernel", Choice(("packed", "dense")), "packed",
            "Multiply the weight as it is stored, or unpack it and let torch's own product run.", refuse=_path,
        ),
        Knob(
            "block", "kernel", Pow2(2, 8), 4, "Outputs that share one load of the activations.",
            when=_packed, refuse=lambda v, f: _compiled(v, f) if v != 4 else "",
        ),
        Knob(
            "ahead", "kernel", Choice((0, 512, 1024, 2048, 4096, 8192), ordered=True), 8192,
            "Bytes by which the stream of each weight row is prefetched.",
            when=_packed, refuse=lambda v, f: _compiled(v, f) if v != 8192 else "",
        ),
    ),
)  # fmt: skip

TRITON = Space(
    "kernels/triton",
    (
        Knob("m", "kernel", Pow2(16, 256), 16, "Activation rows of a tile; the matrix units take 16 at least."),
        Knob("n", "kernel", Pow2(16, 256), 64, "Outputs of a tile."),
        Knob(
            "k", "kernel", Pow2(16, 256), 128, "Inputs of a tile.",
            refuse=lambda v, f: (
                f"one matrix instruction of this type takes {f['least_k']} inputs"
                if int(v) < int(f.get("least_k", 16)) else ""
            ),
        ),
        Knob("split", "kernel", Pow2(1, 64), 1, "Parts that the inputs are split into, summed afterwards."),
        Knob("warps", "kernel", Pow2(1, 16), 4, "Warps of a thread block."),
        Knob("stages", "kernel", Int(1, 6), 3, "Tiles in flight: loads of the next ones overlap the products."),
    ),
    (
        Rule("shared", "the tiles in flight must fit the shared memory of a thread block", _shared),
        Rule(
            "group", "a tile must hold whole groups of 4-bit weights: group divides k",
            lambda c, f: int(c["k"]) % max(int(f.get("group", 1)), 1) != 0,
        ),
        Rule(
            "split", "each part of the inputs must have a tile of its own",
            lambda c, f: int(c["split"]) > 1 and int(c["split"]) * int(c["k"]) > int(f.get("inputs", 1 << 30)),
        ),
        Rule(
            "threads", "each thread must have at least one output of the tile",
            lambda c, f: int(c["m"]) * int(c["n"]) < 32 * int(c["warps"]),
        ),
        Rule(
            "registers", "the sums of a tile must fit the registers of its threads",
            lambda c, f: int(c["m"]) * int(c["n"]) > 32 * ACCUMULATORS * int(c["warps"]),
        ),
        Rule(
            "rows", "a tile of more than twice the rows multiplies mostly zeros",
            lambda c, f: int(c["m"]) > max(16, 2 * int(f.get("rows", 1 << 30))),
        ),
    ),
)  # fmt: skip

SPACES = {space.engine: space for space in (CPU, TRITON)}


def kernel_space(backend: str, facts: Facts, defaults: Mapping[str, Any]) -> Space:
    """The space of one operator on ``backend`` (cpu or triton), whose default is what the engine runs untuned.

    Raises SpaceError for an unknown backend, and for defaults that are not in the space.
    """
    space = SPACES.get(f"kernels/{backend}")
    if space is None:
        raise SpaceError(f"no kernels are tuned on {backend!r}; backends: cpu, triton")
    for name, value in defaults.items():
        space.check(name, value)
    knobs = tuple(replace(knob, default=defaults.get(knob.name, knob.default)) for knob in space.knobs)
    return replace(space, knobs=knobs).narrow(facts)
