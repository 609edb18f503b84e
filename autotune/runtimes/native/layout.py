"""How ranks share one model: which rank holds which part of a weight, and which layers. Knows no process, no tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from autotune.runtimes.native.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Share:
    """Part ``index`` of ``count`` equal parts."""

    index: int = 0
    count: int = 1

    def of(self, size: int) -> slice:
        """This part of ``size`` things. Raises NotImplementedError where they do not divide evenly."""
        if size % self.count:
            raise NotImplementedError(f"{size} rows, columns or experts do not divide evenly over {self.count} ranks")
        part = size // self.count
        return slice(self.index * part, (self.index + 1) * part)


@dataclass(frozen=True, slots=True)
class Layout:
    """``dp`` replicas of the model, each cut into ``pp`` runs of layers, each of these over ``tp`` ranks.

    Attention is split by heads, feed-forward layers by their inner size, embedding and output by the vocabulary;
    the latent, the indexer, the router and the hyper-connections are on every rank. The ranks of a tensor group form
    ``ep`` groups of experts: each group holds whole experts' worth, split over the tp / ep ranks in it.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        if min(self.tp, self.pp, self.dp, self.ep) < 1 or self.tp % self.ep:
            raise NotImplementedError(f"ep={self.ep} must divide tp={self.tp}: experts live on a tensor group's ranks")

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Layout:
        """The layout of a configuration's knobs."""
        return cls(*(int(config.get(name, 1)) for name in ("tp", "pp", "dp", "ep")))

    @property
    def replica(self) -> int:
        """Ranks that run one copy of the model together."""
        return self.tp * self.pp

    @property
    def world(self) -> int:
        return self.replica * self.dp

    def place(self, rank: int) -> Place:
        """Where ``rank`` stands: tensor ranks next to each other, then stages, then replicas."""
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} is not among {self.world}")
        replica, inside = divmod(rank, self.replica)
        return Place(self, replica, *divmod(inside, self.tp))


@dataclass(frozen=True, slots=True)
class Place:
    """One rank's coordinates: which replica, which pipeline stage of it, which part of each matrix."""

    layout: Layout = Layout()
    replica: int = 0
    stage: int = 0
    part: int = 0

    @property
    def rank(self) -> int:
        """Its number among the ranks of its replica."""
        return self.stage * self.layout.tp + self.part

    @property
    def tensor_group(self) -> list[int]:
        """The ranks, of its replica, that hold the other parts of its matrices."""
        return [self.stage * self.layout.tp + part for part in range(self.layout.tp)]

    @property
    def pipe_group(self) -> list[int]:
        """The ranks, of its replica, that hold the same part of the other stages."""
        return [stage * self.layout.tp + self.part for stage in range(self.layout.pp)]

    @property
    def first(self) -> bool:
        return self.stage == 0

    @property
    def last(self) -> bool:
        return self.stage == self.layout.pp - 1

    @property
    def share(self) -> Share:
        """Its part of heads, of inner columns and of the vocabulary."""
        return Share(self.part, self.layout.tp)

    @property
    def experts(self) -> Share:
        """Its group's part of the routed experts."""
        return Share(self.part // (self.layout.tp // self.layout.ep), self.layout.ep)

    @property
    def inside_experts(self) -> Share:
        """Its part of each expert of its group."""
        width = self.layout.tp // self.layout.ep
        return Share(self.part % width, width)

    def local(self, config: ModelConfig) -> ModelConfig:
        """``config`` with only this rank's heads, for whatever computes them."""
        tp = self.layout.tp
        if config.num_attention_heads % tp or config.linear_num_heads % tp:
            raise NotImplementedError(
                f"{config.num_attention_heads} latent and {config.linear_num_heads} linear attention heads do not "
                f"divide evenly over tp={tp} ranks"
            )
        return replace(
            config,
            num_attention_heads=config.num_attention_heads // tp,
            linear_num_heads=config.linear_num_heads // tp,
        )


def partition(weights: Sequence[float], stages: int, before: float = 0, after: float = 0) -> tuple[range, ...]:
    """Cut layers of these ``weights`` into ``stages`` runs so that the heaviest is as light as can be.

    ``before`` and ``after`` are carried by the first and the last run (embedding and output). Exact, by dynamic
    programming over the cuts; of equally good ones the earliest. Raises NotImplementedError with fewer layers than
    stages.
    """
    count = len(weights)
    if not 1 <= stages <= count:
        raise NotImplementedError(f"{count} layers cannot be cut into pp={stages} stages of at least one layer")
    sums = [0.0, *accumulate(weights)]

    def load(start: int, stop: int, stage: int) -> float:
        ends = (before if stage == 0 else 0) + (after if stage == stages - 1 else 0)
        return sums[stop] - sums[start] + ends

    # best[stop]: (heaviest run, cuts) of the first ``stop`` layers in the runs so far
    best: dict[int, tuple[float, tuple[int, ...]]]
    best = {stop: (load(0, stop, 0), (0, stop)) for stop in range(1, count - stages + 2)}
    for stage in range(1, stages):
        best = {
            stop: min(
                (max(heaviest, load(cut, stop, stage)), (*cuts, stop))
                for cut, (heaviest, cuts) in best.items()
                if cut < stop
            )
            for stop in range(stage + 1, count - stages + stage + 2)
        }
    cuts = best[count][1]
    return tuple(range(start, stop) for start, stop in pairwise(cuts))


def stage_layers(config: ModelConfig, bits: Mapping[str, int], group: int, wide: int, place: Place) -> range:
    """The layers of ``place``'s stage, weighed by their stored bytes; ``wide`` is the bytes of a 16-bit weight."""
    per_layer, embedding, head = stored_bytes(config, bits, group, wide)
    return partition(per_layer, place.layout.pp, embedding, head)[place.stage]


def stored_bytes(
    config: ModelConfig, bits: Mapping[str, int], group: int, wide: int
) -> tuple[list[float], float, float]:
    """Bytes of each layer, of the embedding and of the output projection under a bit vector, on one rank."""
    c, hidden = config, config.hidden_size
    each = {16: float(wide), 8: 1.0, 4: 0.5 + 4 / group}  # 4 bits: a scale and an offset of 16 bits for each group
    width, heads, expert = c.linear_num_heads * c.linear_head_dim, c.num_attention_heads, 3 * c.moe_intermediate_size
    packed = {
        "kda": 4 * hidden * width,
        "dsa": hidden * (c.q_lora_rank + c.kv_lora_rank + heads * c.v_head_dim)
        + c.q_lora_rank * heads * c.qk_nope_head_dim,
        "dense": 3 * hidden * c.intermediate_size,
        "experts": hidden * expert * c.n_routed_experts,
        "shared": hidden * expert * c.n_shared_experts,
    }
    never = {  # the rest of a layer: never packed
        "kda": hidden * (2 * c.linear_head_dim + c.linear_num_heads) + 2 * c.linear_head_dim * width,
        "dsa": c.kv_lora_rank * heads * (c.qk_nope_head_dim + c.v_head_dim)
        + c.q_lora_rank * c.index_n_heads * c.index_head_dim
        + hidden * (2 * c.index_head_dim + c.index_n_heads),
    }
    streams = 4 * 2 * (2 + c.hc_mult) * c.hc_mult * c.hc_mult * hidden  # fp32 hyper-connections
    layers = []
    for index, (attention, mlp) in enumerate(zip(c.layers, c.mlps, strict=True)):
        groups = ("dense",) if mlp == "dense" else ("experts", "shared")
        total = packed[attention] * each[bits[f"{index}.attention"]] + never[attention] * wide + streams
        total += sum(packed[name] * each[bits[f"{index}.{name}"]] for name in groups)
        layers.append(total + (4 * hidden * c.n_routed_experts if mlp == "sparse" else 0))
    vocabulary = hidden * c.vocab_size
    return layers, vocabulary * each[bits["embedding"]], vocabulary * each[bits["lm_head"]]
