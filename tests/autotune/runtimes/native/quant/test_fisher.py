"""Predicted costs of narrow weights against what narrow weights do to the trained model, and what they leave behind."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from autotune.corpus import PROMPT_SHARE, read_tokens
from autotune.outcome import EngineError
from autotune.quality import kl_divergence
from autotune.runtimes.native import NativeRuntime
from autotune.runtimes.native.engine import Engine
from autotune.runtimes.native.quant import fisher
from autotune.setting import reference_model
from search_spaces import load
from search_spaces.bits import vector

SPACE = load("native").narrow({"cores": 2, "layers": 4, "experts": 8})
CASES = ("embedding=4", "lm_head=4", "0.attention=4", "1.experts=4", "3.shared=4", "0.dense=4", "1.attention=8")


@pytest.fixture(scope="module")
def costs() -> dict[str, dict[int, float]]:
    return fisher.sensitivities(reference_model(), count=4, length=256)


def test_it_predicts_what_each_group_alone_really_costs(costs) -> None:
    tokens = read_tokens(reference_model(), 1 << 30)
    start = int(len(tokens) * PROMPT_SHARE)
    texts = [tokens[at : at + 256] for at in range(start, start + 1024, 256)]

    def scores(vector: str):
        config = SPACE.complete({"kv_tokens": 1024, "kv_dtype": "fp32", "bits_vector": vector})
        return Engine(reference_model(), config).score(texts, 512)

    reference, said, found = scores(""), [], []
    for case in CASES:
        group, width = case.split("=")
        said.append(costs[group][int(width)])
        found.append(np.mean([kl_divergence(r, s).mean() for r, s in zip(reference, scores(case), strict=True)]))
    ratios = np.array(found) / said
    assert (ratios > 1 / 3).all() and (ratios < 3).all(), dict(zip(CASES, ratios, strict=True))
    order = [np.argsort(np.argsort(values)) for values in (said, found)]
    assert np.corrcoef(*order)[0, 1] > 0.8


def test_every_group_of_a_vector_has_a_cost_and_narrower_costs_more(costs) -> None:
    config = SPACE.default()
    assert set(costs) == set(vector(config, ("dense", "sparse", "sparse", "sparse")))
    assert all(by[4] > by[8] > 0 for by in costs.values())


def test_labels_decide_little_and_gradients_stay_off(costs) -> None:
    other = fisher.sensitivities(reference_model(), count=4, length=256, seed=1)
    ratios = np.array([other[group][4] / by[4] for group, by in costs.items()])
    assert (abs(np.log(ratios)) < np.log(1.5)).all()
    assert not torch.is_grad_enabled()


def test_the_runtime_asks_a_child_and_names_what_cannot_be_read(tmp_path, tiny) -> None:
    found = NativeRuntime(tiny).sensitivities(tmp_path / "log", group=32)
    assert all(set(by) <= {4, 8} for by in found.values()) and "2.experts" in found
    with pytest.raises(EngineError, match=r"config\.json"):
        NativeRuntime(tmp_path).sensitivities(tmp_path / "log")
