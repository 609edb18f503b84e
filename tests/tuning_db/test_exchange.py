"""Export, import and merge on both databases, and from one kind to the other."""

from __future__ import annotations

import itertools

import pytest
from contracts.exchange import ExchangeContract, fill, whole
from contracts.records import make_scenario, make_trial
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tuning_db import open_store, rows
from tuning_db.errors import BadValue
from tuning_db.exchange import merge
from tuning_db.exchange_lines import Writer, checked
from tuning_db.schema import trials


@pytest.fixture
def new_file(tmp_path):
    numbers, opened = itertools.count(), []

    def make():
        opened.append(open_store(tmp_path / f"{next(numbers)}.db"))
        return opened[-1]

    yield make
    for store in opened:
        store.close()


class TestSqliteExchange(ExchangeContract):
    @pytest.fixture
    def new(self, new_file):
        return new_file


class TestPostgresqlExchange(ExchangeContract):
    examples = 2

    @pytest.fixture
    def new(self, another_database):
        opened = []

        def make():
            opened.append(open_store(another_database()))
            return opened[-1]

        yield make
        for store in opened:
            store.close()


def test_both_kinds_of_database_export_the_same_bytes(new_file, another_database):
    one = new_file()
    fill(one, 1, [(0, 0, True), (1, 1, True), (0, 2, False)])
    with open_store(another_database()) as two:
        merge(two, one)
        assert whole(two) == whole(one)
        three = new_file()
        merge(three, two)
        assert whole(three) == whole(one)


numbers = st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from(
    [1e-5, 5e-5, 1.3e-7, 1e16, 1e22, -0.0, 5e-324]
)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | numbers
    | st.text(st.characters(exclude_categories=("Cs",)), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("aé\U0001f600\x7f\n", max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(
    metrics=st.dictionaries(st.text("abc", min_size=1), numbers, max_size=4),
    config=st.dictionaries(st.just("k"), values),
)
def test_a_line_is_read_as_its_trial_would_be_stored(metrics, config):
    scenario = make_scenario()
    trial = make_trial(scenario.key, id="0123456789abcdef", metrics=metrics, config=config)
    try:
        stored = rows.trial_row(trial)
    except BadValue:
        assume(False)
    machine, writer = scenario.hardware, Writer("test")
    parts = {name: getattr(scenario, name) for name in ("engine", "engine_build", "model", "workload", "objective")}
    lines = [
        writer.head(),
        writer.record("hardware", {name: getattr(machine, name) for name in ("key", "kind", "host", "facts")}),
        writer.record("scenario", {"key": scenario.key, "hardware_key": machine.key, "created_at": 1.0, **parts}),
        writer.record("trial", {**{c.name: getattr(trial, c.name) for c in trials.c}, "samples": None}),
        writer.end(),
    ]
    read = dict(checked(lines, "test"))["trial"]
    assert {name: read[name] for name in stored} == stored
