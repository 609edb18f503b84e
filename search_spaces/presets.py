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


_WIDE: Mapping[str, tuple[Value, ...]] = {"graphs": ("cuda", "fused", "compiled"), "prefix_reuse": (True,)}
_EIGHT: Mapping[str, tuple[Value, ...]] = {
    f"bits_{group}": (8,) for group in ("attention", "dense", "experts", "shared", "lm_head")
}
_DRAFTS: Mapping[str, tuple[Value, ...]] = {"spec_method": ("mtp",), "spec_k": (3,), "max_capture_size": (32, 64)}
_STARTS: Mapping[str, Mapping[str, tuple[str, Mapping[str, tuple[Value, ...]]]]] = {
    "native": {
        "graphs-and-reuse": ("Captured steps and reuse of prefixes, as every published recipe has them.", _WIDE),
        "weights-8": ("The W8A16 recipes for A100: eight-bit weights everywhere.", {**_WIDE, **_EIGHT}),
        "experts-4": (
            "The published four-card builds: INT8 attention and INT4 experts in groups of 32.",
            {**_WIDE, **_EIGHT, "bits_experts": (4,), "bits_group_size": (32,)},
        ),
        "tensor-expert": (
            "The eight-card recipes: tensor ranks with their experts spread over them.",
            {**_WIDE, "tp": (8, 4, 2), "ep": (8, 4, 2)},
        ),
    },
    "vllm": {
        "fp8-tensor": (
            "Eight A100 80 GB as first reported (93 tokens/s alone): FP8 on eight tensor ranks, 32 sequences.",
            {"checkpoint": ("fp8",), "tp": (8,), "max_num_seqs": (32,), "max_model_len": (262144,)},
        ),
        "fp8-tensor-expert-draft": (
            "The eight-card profile with whole experts, drafts and NCCL's ring.",
            {
                **_DRAFTS,
                "checkpoint": ("fp8",),
                "tp": (8,),
                "ep": (True,),
                "gmu": (0.9,),
                "max_model_len": (524288,),
                "max_num_batched_tokens": (8192,),
                "nccl_ring": (True,),
                "allreduce": ("nccl",),
            },
        ),
        "fp8-stages": (
            "Eight cards for throughput: two stages of four tensor ranks, 16 sequences, long steps.",
            {
                "checkpoint": ("fp8",),
                "tp": (4,),
                "pp": (2,),
                "gmu": (0.8,),
                "max_num_seqs": (16,),
                "max_model_len": (1048576,),
                "max_num_batched_tokens": (16384,),
            },
        ),
        "w4-tensor-draft": (
            "Four cards for latency: four-bit experts on tensor ranks, the draft layer at 16 bits.",
            {
                **_DRAFTS,
                "checkpoint": ("w4-g128-mtp16",),
                "tp": (4,),
                "max_num_batched_tokens": (3460,),
                "max_model_len": (262144,),
            },
        ),
        "w4-stages-draft": (
            "Four cards for throughput and long prompts: a stage a card and blocks as large as a state.",
            {
                **_DRAFTS,
                "checkpoint": ("w4-g128-mtp16",),
                "tp": (1,),
                "pp": (4,),
                "block_size": (4608,),
                "max_num_batched_tokens": (8192,),
                "max_model_len": (262144,),
                "gmu": (0.94,),
                "kv_cap": (4_194_304,),
            },
        ),
        "w4-int8-attention-stages": (
            "Four cards with INT8 attention and INT4 experts in groups of 32, a stage a card.",
            {"checkpoint": ("w4-g32-a8",), "tp": (1,), "pp": (4,), "max_model_len": (131072,), "kv_cap": (4_194_304,)},
        ),
        "w4-small-cards": (
            "Eight cards of 40 GB: four-bit experts, whole ones on each tensor rank, two drafted tokens.",
            {
                **_DRAFTS,
                "checkpoint": ("w4-g128-mtp16",),
                "spec_k": (2,),
                "tp": (8,),
                "ep": (True,),
                "gmu": (0.93,),
                "max_model_len": (131072,),
            },
        ),
    },
}
"""Starting points of a search, each value as alternatives, best first."""


def starts(space: Space) -> tuple[Preset, ...]:
    """Published recipes worth measuring first, each knob at the best of its alternatives that ``space`` offers.

    One for other hardware, of which a knob has no alternative here, is left out.
    """
    domains = {knob.name: knob.domain for knob in space.knobs}
    found = []
    for name, (sentence, wanted) in _STARTS.get(space.engine, {}).items():
        offered = {k: [v for v in several if domains[k].contains(v)] for k, several in wanted.items()}
        if all(offered.values()):
            found.append(Preset(name, space.engine, sentence, {k: several[0] for k, several in offered.items()}))
    return tuple(found)
