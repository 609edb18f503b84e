"""Who holds what: every part of a weight is on exactly one rank of a tensor group, every layer on exactly one stage."""

from __future__ import annotations

from itertools import combinations, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.runtimes.native.config import read_config
from autotune.runtimes.native.engine import Engine
from autotune.runtimes.native.inspect import packed
from autotune.runtimes.native.layout import Layout, Share, partition, stage_layers, stored_bytes
from search_spaces import bits, load

POWERS = st.sampled_from([1, 2, 4])
LAYOUTS = st.builds(lambda tp, pp, dp, ep: Layout(tp, pp, dp, min(ep, tp)), POWERS, POWERS, POWERS, POWERS)
WEIGHTS = st.lists(st.integers(0, 50), min_size=1, max_size=9)


@given(LAYOUTS)
def test_ranks_and_coordinates_are_one_to_one(layout: Layout) -> None:
    places = [layout.place(rank) for rank in range(layout.world)]
    assert len({(p.replica, p.stage, p.part) for p in places}) == layout.world == layout.tp * layout.pp * layout.dp
    assert [p.replica * layout.replica + p.rank for p in places] == list(range(layout.world))
    with pytest.raises(ValueError, match="not among"):
        layout.place(layout.world)


@given(LAYOUTS)
def test_groups_partition_a_replica_and_cross_in_one_rank(layout: Layout) -> None:
    places = [layout.place(rank) for rank in range(layout.replica)]
    for name, size in (("tensor_group", layout.tp), ("pipe_group", layout.pp)):
        groups = {tuple(getattr(p, name)) for p in places}
        assert all(len(group) == size for group in groups)
        assert sorted(rank for group in groups for rank in group) == list(range(layout.replica))
        assert all(p.rank in getattr(p, name) for p in places)
    assert all(set(p.tensor_group) & set(p.pipe_group) == {p.rank} for p in places)


@given(LAYOUTS, st.integers(1, 5))
def test_the_parts_of_a_tensor_group_are_the_whole(layout: Layout, each: int) -> None:
    group = [layout.place(rank) for rank in range(layout.tp)]
    heads = list(range(each * layout.tp))
    assert [head for p in group for head in heads[p.share.of(len(heads))]] == heads
    held = [
        (expert, column)
        for p in group
        for expert in range(each * layout.ep)[p.experts.of(each * layout.ep)]
        for column in range(8)[p.inside_experts.of(8)]
    ]
    assert sorted(held) == [(expert, column) for expert in range(each * layout.ep) for column in range(8)]


def test_what_does_not_divide_is_refused_with_a_sentence(tiny: Path) -> None:
    with pytest.raises(NotImplementedError, match="7 rows, columns or experts do not divide evenly over 2"):
        Share(0, 2).of(7)
    with pytest.raises(NotImplementedError, match="ep=4 must divide tp=2"):
        Layout(tp=2, ep=4)
    with pytest.raises(NotImplementedError, match=r"4 latent and 4 linear attention heads .* tp=8"):
        Layout(tp=8).place(0).local(read_config(tiny))
    with pytest.raises(NotImplementedError, match="3 layers cannot be cut into pp=4"):
        partition([1, 1, 1], 4)


@given(WEIGHTS, st.integers(1, 9), st.integers(0, 80), st.integers(0, 80))
def test_no_other_cut_has_a_lighter_heaviest_stage(weights: list[int], stages: int, before: int, after: int) -> None:
    stages = min(stages, len(weights))

    def heaviest(runs: list[range]) -> float:
        loads = [sum(weights[i] for i in run) for run in runs]
        loads[0] += before
        loads[-1] += after
        return max(loads)

    found = partition(weights, stages, before, after)
    assert len(found) == stages and all(len(run) for run in found)
    assert [i for run in found for i in run] == list(range(len(weights)))
    every = [
        [range(a, b) for a, b in pairwise((0, *cuts, len(weights)))]
        for cuts in combinations(range(1, len(weights)), stages - 1)
    ]
    assert heaviest(list(found)) == min(map(heaviest, every))


def test_stored_bytes_are_what_an_engine_really_holds(tiny: Path) -> None:
    config = load("native").narrow({"cores": 2}).complete(
        {"bits_attention": 8, "bits_experts": 8, "bits_embedding": 8, "bits_lm_head": 8}
    )  # fmt: skip
    engine = Engine(tiny, config)
    layers, embedding, head = stored_bytes(engine.model, engine.widths.bits, engine.widths.group, 4)
    assert embedding == pytest.approx(engine.decoder.embed.nbytes, rel=0.1)
    assert head == pytest.approx(engine.decoder.head.nbytes, rel=0.1)
    held = [0.0] * len(layers)
    for key, linear in packed(engine.decoder):
        if "." in key:
            held[int(key.split(".")[0])] += linear.nbytes
    # What is never packed is the rest, nearly the same in every layer of a kind (scales and router are small).
    for kind in ("kda", "dsa"):
        rest = [layers[i] - held[i] for i, found in enumerate(engine.model.layers) if found == kind]
        assert min(rest) > 0 and max(rest) == pytest.approx(min(rest), rel=0.2)


def test_the_cut_follows_the_bit_vector(tiny: Path) -> None:
    model = read_config(tiny)
    last = Layout(pp=2).place(1)
    even = bits.vector({}, model.mlps)
    light = {key: 4 if key.startswith(("1.", "2.")) else width for key, width in even.items()}
    assert stage_layers(model, even, 32, 4, last) == range(2, 4)
    assert stage_layers(model, light, 32, 4, last) == range(3, 4)
