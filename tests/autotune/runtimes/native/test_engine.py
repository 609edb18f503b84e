"""The engine's own promises: packed weights, what really runs, isolation, refusals, a random walk over its knobs."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autotune.runtimes.native.config import CheckpointError
from autotune.runtimes.native.engine import Engine
from autotune.runtimes.native.quant.linear import Embedding, Int4, Int8, Int8Both, Wide, make_linear
from autotune.setting import reference_model
from search_spaces import Config, load

SPACE = load("native").narrow({"cores": 2, "layers": 4, "experts": 8})
PROMPT = list(range(40, 90))
WIDTHS = ("attention", "dense", "experts", "shared", "embedding", "lm_head")


def engine(**knobs: Any) -> Engine:
    return Engine(reference_model(), SPACE.complete({"kv_tokens": 1024, **knobs}))


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 64])
@pytest.mark.parametrize(
    ("make", "tolerance"),
    [
        (lambda w: Wide(w, "fp32"), 1e-5), (lambda w: Wide(w, "bf16"), 0.01), (lambda w: Int8(w, "fp32"), 1e-5),
        (lambda w: Int8(w, "bf16"), 0.01), (lambda w: Int4(w, 32, "fp32"), 1e-5),
        (lambda w: Int4(w, 128, "fp32"), 1e-5), (lambda w: Int4(w, 64, "bf16"), 0.01),
        (lambda w: Int8Both(w, "fp32"), 0.03),
    ],
)  # fmt: skip
def test_a_packed_product_is_dequantize_then_multiply(make: Any, tolerance: float, rows: int) -> None:
    torch.manual_seed(rows)
    linear, x = make(torch.randn(192, 256)), torch.randn(rows, 256)
    wanted = x @ linear.dense().t()
    assert (linear(x) - wanted).norm() <= tolerance * wanted.norm()


@pytest.mark.parametrize(("bits", "bytes_a_weight", "error"), [(16, 2.0, 0.01), (8, 1.02, 0.01), (4, 0.63, 0.12)])
def test_weights_are_really_stored_narrow(bits: int, bytes_a_weight: float, error: float) -> None:
    weight = torch.randn(256, 256)
    stored = make_linear(weight, bits, "bf16", 32)
    assert stored.nbytes <= bytes_a_weight * weight.numel()
    assert (stored.dense() - weight).norm() <= error * weight.norm()
    table = Embedding(weight, bits, "bf16")
    assert table.nbytes <= (bytes_a_weight + 0.02) * weight.numel()
    assert (table(torch.tensor([3, 250])) - weight[[3, 250]]).norm() <= 2 * error * weight[[3, 250]].norm()


def test_a_shape_that_a_packing_cannot_take_stays_wider() -> None:
    assert make_linear(torch.randn(64, 96), 4, "fp32", 64).kernel == "int8"
    assert make_linear(torch.randn(40, 20), 8, "fp32").kernel == "fp32"


def test_effective_is_read_from_what_runs() -> None:
    running = engine(bits_experts=4, bits_attention=8, bits_protect_first=1, activations="int8_tensor", kv_dtype="int8")
    found = running.effective()
    assert found["bits_stored"]["3.experts"] == 4 and found["bits_stored"]["0.attention"] == 16
    assert found["bits_stored"]["2.attention"] == 8 and found["bits_stored"]["lm_head"] == 16
    assert found["kernels"] == "fp32,int4,int8_both"
    assert all(found[name] == value for name, value in running.knobs.items())
    running.decoder.layers[3].attention.form = "expanded"  # type: ignore[union-attr]
    running.blocks.reuse = True
    assert running.effective()["attention"] == "expanded" and running.effective()["prefix_reuse"] is True


def test_narrower_weights_answer_differently_but_not_by_much(run: Any) -> None:
    text = list((reference_model().parent / "heldout.txt").read_bytes()[:400])
    losses = {}
    for bits in (16, 8, 4):
        running = engine(**{f"bits_{name}": bits for name in WIDTHS})
        losses[bits] = float(-running.score([text], 1)[0].logprobs.mean())
    assert losses[16] < losses[4] < losses[16] + 0.2
    assert abs(losses[8] - losses[16]) < 0.02


def test_sequences_do_not_see_one_another(run: Any) -> None:
    alone = run(engine(kv_dtype="fp32"), [PROMPT], 12)[0]
    source = random.Random(3)
    crowd = [[source.randrange(256) for _ in range(n)] for n in (5, 70, 33)]
    together = run(engine(kv_dtype="fp32", prefix_reuse=True), [crowd[0], PROMPT, *crowd[1:], PROMPT], 12)
    assert together[1] == together[4] == alone


def test_a_seeded_draw_depends_on_nothing_but_its_seed(run: Any) -> None:
    one = run(engine(), [PROMPT], 12, temperature=0.9, seed=5)[0]
    other = run(engine(max_seqs=4), [PROMPT[:9], PROMPT], 12, temperature=0.9, seed=5)[1]
    different = run(engine(), [PROMPT], 12, temperature=0.9, seed=6)[0]
    assert one == other != different


def test_a_repeated_prompt_computes_only_its_end(run: Any) -> None:
    running, prompt = engine(prefix_reuse=True, kv_dtype="fp32"), [i % 200 for i in range(500)]
    first = run(running, [prompt], 8)
    running._steps["prefill_tokens"] = 0
    assert run(running, [prompt], 8) == first
    assert running.counters()["prefill_tokens"] <= 100
    running.reset()
    assert running.counters()["prefix_hits"] == 0
    assert run(running, [prompt], 8) == first


@pytest.mark.parametrize("graphs", ["eager", "fused"])
def test_a_prompt_cut_anywhere_is_continued_from_the_same_place(run: Any, graphs: str) -> None:
    prompt, knobs = [i % 200 for i in range(300)], {"kv_dtype": "fp32", "graphs": graphs}
    wanted = run(engine(**knobs), [prompt], 4)
    for budget in (37, 100, 150):  # none of them a multiple of a block
        running = Engine(
            reference_model(), Config({**engine(prefix_reuse=True, **knobs).knobs, "token_budget": budget})
        )
        assert run(running, [prompt], 4) == run(running, [prompt], 4) == wanted
        assert running.counters()["prefix_hits"] == 256


def test_checkpoints_stay_inside_their_memory(run: Any) -> None:
    running = engine(prefix_reuse=True, state_cache_mib=4, kv_tokens=4096)
    for start in range(0, 100, 20):
        run(running, [[start] * 400], 2)
    counters = running.counters()
    assert 2 << 20 < counters["checkpoint_bytes"] <= 4 << 20
    assert counters["state_evictions"] > 0 and counters["cache_bytes"] > counters["checkpoint_bytes"]
    assert counters["kv_kept_tokens"] + counters["kv_used_tokens"] <= counters["kv_tokens"]


def test_an_aborted_request_gives_its_blocks_back() -> None:
    running = engine()
    free = len(running.blocks.free)
    running.add("a", PROMPT, 50, ignore_eos=True)
    for _ in range(5):
        running.step()
    running.abort("a")
    running.abort("unknown")
    assert not running.busy and len(running.blocks.free) == free


@pytest.mark.parametrize(
    ("prompt", "count", "word"),
    [
        ([], 3, "at least one"), ([5], 0, "at least 1"), ([5, 999], 3, "vocabulary"), ([-1], 3, "vocabulary"),
        ([5] * 900, 200, "kv_tokens"),
    ],
)  # fmt: skip
def test_requests_that_can_never_run_are_refused(prompt: list[int], count: int, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        engine().add("x", prompt, count)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((reference_model() / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"no \.safetensors"):
        Engine(tmp_path, SPACE.default())


@given(st.data())
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_configuration_of_the_space_runs_and_is_what_it_says(data: st.DataObject) -> None:
    chosen = {k.name: data.draw(st.sampled_from(k.domain.values), label=k.name) for k in SPACE.free()}
    config = SPACE.complete({**chosen, "graphs": "eager"})
    running = Engine(reference_model(), config)
    for number in range(3):
        running.add(number, PROMPT[: 10 + 15 * number], 4, ignore_eos=True)
    counts = {0: 0, 1: 0, 2: 0}
    while running.busy:
        for number, tokens, _ in running.step():
            counts[number] += len(tokens)
    assert counts == {0: 4, 1: 4, 2: 4}
    assert all(running.effective()[name] == value for name, value in config.items())
    assert torch.isfinite(torch.from_numpy(running.score([PROMPT], 5)[0].top)).all()


@pytest.mark.parametrize(
    "knobs", [{}, {"state_dtype": "bf16"}, {"bits_experts": 4, "bits_shared": 8}, {"kv_dtype": "int8"}]
)
def test_the_fused_step_gives_the_eager_tokens(run: Any, knobs: dict[str, Any]) -> None:
    prompts = [PROMPT, PROMPT[:7], PROMPT[:30]]
    usual = {"kv_dtype": "fp32", **knobs}
    assert run(engine(graphs="fused", **usual), prompts, 12) == run(engine(**usual), prompts, 12)


def test_the_compiled_step_gives_the_eager_tokens(run: Any) -> None:
    prompts = [PROMPT, PROMPT[:7], [i % 250 for i in range(200)]]
    assert run(engine(graphs="compiled", kv_dtype="fp32"), prompts, 12) == run(engine(kv_dtype="fp32"), prompts, 12)
    assert Config(engine(graphs="compiled").knobs)["graphs"] == "compiled"
