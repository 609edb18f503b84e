"""SLOs: what their text means, and what a number of requests proves, against MLPerf's published counts."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.metrics import Timeline
from autotune.slo import Run, SloError, State, judge, needed, parse, proves, summary
from autotune.stats import incomplete_beta


@pytest.mark.parametrize(
    ("text", "metric", "below", "limit"),
    [
        ("ttft_p99<500ms", "ttft_p99", True, 0.5), ("ttft_p95 <= 2 s", "ttft_p95", True, 2.0),
        ("e2e_p99.9<1min", "e2e_p99.9", True, 60.0), ("output_tok_s>100", "output_tok_s", False, 100.0),
        ("peak_bytes<4GiB", "peak_bytes", True, 4 * 2**30), ("failed_fraction<1%", "failed_fraction", True, 0.01),
        ("tasks_per_min>=3", "tasks_per_min", False, 3.0), ("kl_mean<0.01", "kl_mean", True, 0.01),
    ],
)  # fmt: skip
def test_an_slo_is_a_metric_a_sign_and_a_limit_in_any_unit(text: str, metric: str, below: bool, limit: float) -> None:
    found = parse(text)
    assert (found.metric, found.below) == (metric, below) and found.limit == pytest.approx(limit)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tftt_p99<1s", "did you mean ttft_p99"), ("ttft_p99>1s", "lower ttft_p99 is better"),
        ("output_tok_s<9", "higher output_tok_s is better"), ("ttft_p99<1GiB", "no unit 'GiB'"),
        ("ttft_p99<", "not of the form"), ("fast", "not of the form"), ("ttft_p100<1s", "between 0 and 100"),
        ("ttft_p99<1.2.3s", "not a number"), ("ttft_p99<1parsec", "no unit 'parsec'"),
    ],
)  # fmt: skip
def test_a_wrong_slo_is_refused_with_what_to_write(text: str, says: str) -> None:
    with pytest.raises(SloError, match=says):
        parse(text)


@pytest.mark.parametrize(
    ("share", "counts"),
    [(0.9, (44, 64, 81, 127)), (0.95, (90, 130, 165, 259)), (0.99, (459, 662, 838, 1307))],
)
def test_early_stopping_counts_are_mlperfs(share: float, counts: tuple[int, ...]) -> None:
    assert tuple(needed(share, over) for over in (0, 1, 2, 5)) == counts
    for over, count in zip((0, 1, 2, 5), counts, strict=True):
        assert proves(share, count, over) and not proves(share, count - 1, over)


@settings(max_examples=60)
@given(st.integers(1, 200), st.integers(1, 60), st.floats(0.01, 0.99))
def test_incomplete_beta_is_the_binomial_tail(h: int, k: int, x: float) -> None:
    n = h + k - 1
    tail = math.fsum(math.comb(n, i) * x**i * (1 - x) ** (n - i) for i in range(h, n + 1))
    assert incomplete_beta(x, h, k) == pytest.approx(tail, rel=1e-8, abs=1e-12)


def timelines(values: list[float], failed: int = 0) -> list[Timeline]:
    good = [Timeline(i, 0, 8, 1, 0.0, (v,)) for i, v in enumerate(values)]
    return good + [Timeline(1000 + i, 0, 8, 0, 0.0, (), "HTTP 500") for i in range(failed)]


@pytest.mark.parametrize(
    ("fast", "slow", "failed", "state"),
    [
        (44, 0, 0, State.MET), (43, 0, 0, State.UNPROVEN), (63, 1, 0, State.MET), (62, 1, 0, State.UNPROVEN),
        (8, 2, 0, State.NOT_MET), (63, 0, 1, State.MET), (9, 0, 2, State.NOT_MET), (0, 0, 0, State.UNPROVEN),
    ],
)  # fmt: skip
def test_a_percentile_is_met_only_where_the_count_proves_it(fast: int, slow: int, failed: int, state: State) -> None:
    found = judge(parse("ttft_p90<1s"), [Run({}, timelines([0.5] * fast + [2.0] * slow, failed))])
    assert found.state is state
    assert (found.violation > 0) == (state is State.NOT_MET)
    assert found.over == slow + failed and found.count == fast + slow + failed
    assert str(state) in found.sentence()


def test_requests_of_several_runs_prove_together_what_each_alone_does_not() -> None:
    run = Run({}, timelines([0.1] * 22))
    assert judge(parse("ttft_p90<1s"), [run]).state is State.UNPROVEN
    assert judge(parse("ttft_p90<1s"), [run, run]).state is State.MET


def test_a_rate_is_judged_on_the_interval_over_runs() -> None:
    slo = parse("output_tok_s>100")
    assert judge(slo, [Run({"output_tok_s": v}, ()) for v in (110.0, 111.0, 112.0)]).state is State.MET
    assert judge(slo, [Run({"output_tok_s": v}, ()) for v in (90.0, 101.0, 130.0)]).state is State.UNPROVEN
    assert judge(slo, [Run({"output_tok_s": 99.0}, ())]).state is State.NOT_MET
    assert judge(slo, []).state is State.UNPROVEN


def test_the_further_from_the_limit_the_larger_the_violation() -> None:
    near, far = (judge(parse("ttft_p90<1s"), [Run({}, timelines([v] * 50))]) for v in (1.1, 3.0))
    assert 0 < near.violation < far.violation
    assert summary([near, judge(parse("ttft_p90<9s"), [Run({}, timelines([1.0] * 50))])]) == "not met"
    assert summary([]) == ""
