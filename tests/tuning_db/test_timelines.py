"""Sample blobs: whatever goes in comes out, and a damaged blob is said to be damaged."""

from __future__ import annotations

import math

import pytest
from contracts.records import make_samples
from hypothesis import given
from hypothesis import strategies as st

from tuning_db import Sample
from tuning_db.timelines import pack, unpack

finite = st.floats(allow_nan=False, allow_infinity=False)
facts = st.dictionaries(
    st.text("abc", max_size=3), st.none() | st.booleans() | st.integers() | st.text("xé😀", max_size=5)
)
one_sample = st.builds(
    Sample,
    trial_id=st.just("abc"),
    index=st.integers(0),
    facts=facts,
    sent=finite,
    token_times=st.lists(finite, max_size=6).map(tuple),
    prompt_tokens=st.integers(0),
    output_tokens=st.integers(0),
    error=st.text(),
)


@given(st.lists(one_sample, max_size=5))
def test_samples_come_back_exactly(samples):
    back = unpack("abc", pack(samples))
    assert back == samples
    signs = [math.copysign(1, s.sent) for s in samples]
    assert [math.copysign(1, s.sent) for s in back] == signs


def test_an_error_text_may_hold_anything():
    samples = [Sample("abc", 0, {}, 0.5, (), 3, 0, "\x00 \udcff 😀")]
    assert unpack("abc", pack(samples)) == samples


@pytest.mark.parametrize("time", [float("nan"), float("inf")])
def test_a_time_that_is_not_finite_is_refused(time):
    with pytest.raises(ValueError, match="not finite"):
        pack([Sample("abc", 0, {}, time, (), 1, 1)])
    with pytest.raises(ValueError, match="not finite"):
        pack([Sample("abc", 0, {}, 0.0, (0.1, time), 1, 1)])


def test_first_and_last_token_are_derived():
    (sample,) = make_samples("abc", 1)
    assert (sample.first, sample.last) == (sample.token_times[0], sample.token_times[-1])
    empty = Sample("abc", 0, {}, 0.0, (), 1, 0, "timeout")
    assert (empty.first, empty.last) == (None, None)


@given(st.data())
def test_a_damaged_blob_is_an_error_or_still_the_truth(data):
    blob = pack(make_samples("abc"))
    at = data.draw(st.integers(0, len(blob) - 1))
    damaged = data.draw(
        st.sampled_from([blob[:at], blob[:at] + bytes([blob[at] ^ data.draw(st.integers(1, 255))]) + blob[at + 1 :]])
    )
    try:
        assert unpack("abc", damaged) == make_samples("abc")
    except ValueError as error:
        assert "abc" in str(error)


def test_regular_times_pack_to_less_than_their_raw_size():
    samples = [Sample("abc", i, {}, i * 0.5, tuple(i * 0.5 + k * 0.01 for k in range(200)), 10, 200) for i in range(50)]
    assert len(pack(samples)) < 0.8 * 8 * sum(1 + len(s.token_times) for s in samples)
