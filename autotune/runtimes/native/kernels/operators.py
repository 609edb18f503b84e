"""Which products an engine makes of a checkpoint: their shapes, at every width that weights can have. Runs none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from autotune.runtimes.native.config import ModelConfig
from autotune.runtimes.native.kernels.tuning import ROWS, Operator
from search_spaces import Value
from search_spaces.bits import LAYER_GROUPS, MODEL_GROUPS, WIDTHS

COMPUTE = ("fp32", "bf16")
USUAL_GROUP = (64,)
GROUPS = tuple(name for name in (*LAYER_GROUPS, *MODEL_GROUPS) if name != "embedding")

Shape = tuple[int, int]


def packable(config: ModelConfig) -> list[Shape]:
    """[outputs, inputs] of the weights that the ``bits_*`` knobs store at a width, each once."""
    hidden, inner, expert = config.hidden_size, config.intermediate_size, config.moe_intermediate_size
    shapes = [(config.vocab_size, hidden)]
    if "kda" in config.layers:
        wide = config.linear_num_heads * config.linear_head_dim
        shapes += [(3 * wide, hidden), (hidden, wide)]
    if "dsa" in config.layers:
        heads, rank = config.num_attention_heads, config.q_lora_rank
        shapes += [(rank + config.kv_lora_rank, hidden), (heads * config.qk_nope_head_dim, rank)]
        shapes += [(hidden, heads * config.v_head_dim)]
    if "dense" in config.mlps:
        shapes += [(2 * inner, hidden), (hidden, inner)]
    if "sparse" in config.mlps:
        shared = expert * config.n_shared_experts
        shapes += [(2 * expert, hidden), (hidden, expert), (2 * shared, hidden), (hidden, shared)]
    return list(dict.fromkeys(shape for shape in shapes if min(shape) > 0))


def operators(
    config: ModelConfig, only: str = "", knobs: Mapping[str, Sequence[Value]] | None = None, gpu: bool = False
) -> list[Operator]:
    """Every product of packable weights: one a width, a group, a type of products and a number of rows.

    ``knobs`` are a plan's limits of the engine's space, whose excluded widths, groups and types are left out; groups
    other than the usual are in only when it names them. ``only`` keeps the operators whose key contains it. With
    ``gpu`` they are those of the Triton kernels; 16-bit products are then torch's own and have no choice.
    """
    limits = knobs or {}
    found = [
        Operator(op, dtype, outputs, inputs, rows)
        for outputs, inputs in packable(config)
        for dtype, group in _dtypes(limits)
        if inputs % group == 0
        for op, dtype in (_triton(dtype) if gpu else [("linear", dtype)])
        for rows in ROWS
    ]
    return [operator for operator in dict.fromkeys(found) if only in operator.key]


def _triton(dtype: str) -> list[tuple[str, str]]:
    """The Triton ops of a stored type; int8 weights are multiplied by wide activations or by int8 ones."""
    if dtype.startswith("int8"):
        return [("w8a16", dtype), ("w8a8", "int8-int8")]
    return [("w4a16", dtype)] if dtype.startswith("int4") else []


def _dtypes(limits: Mapping[str, Sequence[Value]]) -> Iterator[tuple[str, int]]:
    """(``dtype``, the inputs that must divide evenly)."""
    widths = {int(width) for group in GROUPS for width in limits.get(f"bits_{group}", WIDTHS)}
    for compute in map(str, limits.get("compute", COMPUTE)):
        if 16 in widths:
            yield compute, 1
        if 8 in widths:
            yield f"int8-{compute}", 1
        for group in limits.get("bits_group_size", USUAL_GROUP) if 4 in widths else ():
            yield f"int4g{group}-{compute}", int(group)
