"""The forecast of GLM-5.3-Flash beside the published table of fits: bytes of weights, tokens of cache, every layout."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import pytest

from autotune.catalogue import GIB, named
from autotune.memory.forecast import Forecast, forecast
from autotune.model import described
from search_spaces import load
from search_spaces.vllm import CHECKPOINTS

WEIGHTS_GIB = 0.25
"""The table prints one decimal; its estimate leaves 0.1 B parameters of the image tower out and rounds scales."""
TOKENS = 0.025
"""The table prints two decimals of a million; below 0.1 M a rounding of the weights is a tenth of the figure."""
HARDWARE = ("4xA100-80GB", "8xA100-80GB", "8xA100-40GB", "2xA100-80GB", "16xA100-40GB")
TABLE: dict[str, tuple[tuple[float | None, float | None], ...]] = {
    # GiB of weights a device and million KV tokens, tensor-parallel over all; None: not printed, tokens None: no fit
    "bf16": ((None, None), (75.5, None), (None, None), (None, None), (None, None)),
    "fp8": ((77.3, None), (39.1, 2.49), (39.1, None), (None, None), (19.9, 1.15)),
    "w8-g128": ((None, None), (39.8, 2.43), (None, None), (None, None), (20.3, 1.12)),
    "w6-g128": ((60.7, 0.60), (30.7, 3.20), (30.7, 0.21), (None, None), (15.8, 1.51)),
    "w5-g128": ((51.6, 1.37), (26.2, 3.58), (26.2, 0.59), (None, None), (13.5, 1.70)),
    "w4-g128-mtp16": ((45.0, 1.93), (22.9, 3.86), (22.9, 0.87), (None, None), (11.9, 1.84)),
    "w4-g128": ((42.5, 2.14), (21.7, 3.96), (21.7, 0.98), (None, None), (11.2, 1.89)),
    "w4-g32-a8": ((42.6, 2.40), (21.6, 4.37), (21.6, 1.11), (None, None), (11.1, 2.09)),
    "w3-g128": ((33.4, 2.91), (17.1, 4.35), (17.1, 1.36), (66.1, 0.0), (9.0, 2.08)),
    "w3-g128-a8": ((30.7, 3.51), (15.6, 4.92), (15.6, 1.66), (60.8, 0.68), (8.1, 2.37)),
    "w2-g128-a8": ((21.8, 4.32), (11.2, 5.33), (11.2, 2.07), (43.1, 2.31), (5.9, 2.58)),
}
CELLS = [
    pytest.param(bits, hardware, *cell, id=f"{bits} on {hardware}")
    for bits, row in TABLE.items()
    for hardware, cell in zip(HARDWARE, row, strict=True)
]
LAYOUTS = [
    # checkpoint, hardware, tp, pp, dp, dcp, GiB of weights, million tokens of all replicas
    ("w4-g128", "8xA100-80GB", 8, 1, 1, 1, 21.7, 3.96),
    ("w4-g128", "8xA100-80GB", 4, 1, 2, 1, 23.8, 7.6),
    ("w4-g128", "8xA100-80GB", 1, 1, 8, 1, 36.7, 21.5),
    ("w4-g128", "8xA100-80GB", 8, 1, 1, 8, 21.7, 31.7),
    ("fp8", "8xA100-80GB", 1, 1, 8, 1, 52.8, 10.6),
]
STAGES = [
    ("w4-g128", "8xA100-80GB", 4, 2, 21.3, 8.0),
    ("w4-g128", "8xA100-80GB", 2, 4, 21.1, 16.1),
    ("fp8", "8xA100-80GB", 4, 2, None, 5.05),
    ("w4-g128", "8xA100-40GB", 4, 2, None, 2.02),
]


def glm() -> Path:
    return Path(str(resources.files("autotune") / "data" / "glm-5.3-flash"))


@pytest.fixture(scope="module")
def model():
    return described(glm())


def setting(checkpoint: str, tp: int, pp: int = 1, dp: int = 1, dcp: int = 1):
    """The table's assumptions: gmu 0.95, eight sequences, prefix caching, three drafted tokens with a draft layer."""
    ranks = {"tp": tp, "pp": pp, "dp": dp, **({"dcp": dcp} if tp > 1 else {})}
    method = "mtp" if CHECKPOINTS[checkpoint].mtp else "none"
    return load("vllm").complete({"checkpoint": checkpoint, "spec_method": method, **ranks})


def on(model, hardware: str) -> Forecast:
    return forecast("vllm", model, named(hardware))


@pytest.mark.parametrize(("bits", "hardware", "weights", "tokens"), CELLS)
def test_the_table_of_fits(model, bits, hardware, weights, tokens):
    here, config = on(model, hardware), setting(bits, named(hardware).count)
    if weights is not None:
        assert here.demand(config).weights / GIB == pytest.approx(weights, abs=WEIGHTS_GIB)
    found = here.tokens(config) / 1e6
    if tokens is None:
        assert found < 0 and here.overflows(config)
    elif tokens == 0:
        assert abs(found) < 0.05 and here.overflows(config)
    else:
        assert found == pytest.approx(tokens, rel=TOKENS)
        assert not here.overflows(config)


def test_published_checkpoints_have_their_published_bytes(model):
    here = on(model, "1xA100-80GB")
    for bits, size in {"bf16": 642.6e9, "fp8": 329.5e9, "w4-g128-mtp16": 190.84e9, "w4-g128": 180e9}.items():
        assert here.demand(setting(bits, 1)).weights == pytest.approx(size, rel=0.002)


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_layouts_without_stages(model, case):
    bits, hardware, *layout, weights, tokens = case
    here, config = on(model, hardware), setting(bits, *layout)
    assert here.demand(config).weights / GIB == pytest.approx(weights, abs=WEIGHTS_GIB)
    assert here.tokens(config) / 1e6 == pytest.approx(tokens, rel=TOKENS)


@pytest.mark.parametrize(("bits", "hardware", "tp", "pp", "weights", "tokens"), STAGES)
def test_stages_balanced_as_the_table_has_them(model, bits, hardware, tp, pp, weights, tokens):
    """The table spreads layers evenly; added up over our stages its figures come out. Real stages hold whole layers,
    so that the one with most cached layers bounds the pool: never more than the table's."""
    here, config = on(model, hardware), setting(bits, tp, pp)
    demand = here.demand(config)
    device = here.usable(config) - here.overhead.bytes(demand.features)
    even = sum(device - demand.rank(s) for s in demand.stages) / sum(s.kv for s in demand.stages)
    assert even / 1e6 == pytest.approx(tokens, rel=TOKENS)
    assert 0.7 * even < here.tokens(config) <= even * 1.001
    if weights is not None:
        mean = sum(s.weights for s in demand.stages) / len(demand.stages) / GIB
        assert mean == pytest.approx(weights, abs=WEIGHTS_GIB)


def test_replicas_of_the_attention_do_not_fit_40_gb(model):
    assert on(model, "8xA100-40GB").overflows(setting("w4-g128", 1, 1, 8))


@pytest.mark.parametrize(("tp", "plain", "drafting"), [(1, 140.8, 728), (2, 70.4, 364), (4, 35.2, 182), (8, 17.6, 91)])
def test_states_of_a_sequence(model, tp, plain, drafting):
    space = load("vllm")
    bare = space.complete({"checkpoint": "w4-g128", "tp": tp, "prefix_caching": False, "max_num_seqs": 4})
    (stage,) = on(model, "8xA100-80GB").demand(bare).stages
    assert stage.state / 2**20 == pytest.approx(plain, abs=0.06)
    (stage,) = on(model, "8xA100-80GB").demand(setting("w4-g128", tp)).stages
    assert stage.state / 2**20 == pytest.approx(drafting, rel=0.005)
    assert stage.kv == 12_684


def test_the_share_of_wide_layers(model):
    """ "Largest average expert bits that still leave 128K tokens / 1M tokens": 6.6 and 5.4 on 4×80 GB."""
    here = on(model, "4xA100-80GB")
    six, five = (here.demand(setting(bits, 4)).weights for bits in ("w6-g128", "w5-g128"))
    for tokens, most in ((131_072, 6.6), (1_048_576, 5.4)):
        room = here.tokens(setting("w5-g128", 4)) - tokens
        assert 5 + room * 12_684 / (six - five) == pytest.approx(most, abs=0.05)


def test_fewer_layers_on_the_last_stage_move_to_the_one_before(model):
    here = on(model, "4xA100-80GB")
    even = here.demand(setting("w4-g128", 1, 4)).stages
    config = load("vllm").complete({**setting("w4-g128", 1, 4), "pp_last_fewer": 1})
    moved = here.demand(config).stages
    assert moved[-1].weights < even[-1].weights and moved[-2].weights > even[-2].weights
    assert sum(s.weights for s in moved) == pytest.approx(sum(s.weights for s in even))
