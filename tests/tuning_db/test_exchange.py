"""Export, import and merge on both databases, and from one kind to the other."""

from __future__ import annotations

import itertools

import pytest
from contracts.exchange import ExchangeContract, fill, whole

from tuning_db import open_store
from tuning_db.exchange import merge


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
