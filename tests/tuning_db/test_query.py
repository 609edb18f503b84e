"""Queries on both databases, and that the common ones go by an index."""

from __future__ import annotations

import pytest
from contracts.query import QueryContract


class TestSqliteQuery(QueryContract):
    @pytest.fixture(scope="class")
    def place(self, tmp_path_factory):
        return tmp_path_factory.mktemp("query") / "tuning.db"

    @pytest.fixture
    def empty(self, tmp_path):
        return tmp_path / "empty.db"


class TestPostgresqlQuery(QueryContract):
    @pytest.fixture(scope="class")
    def place(self, another_database):
        return another_database()

    @pytest.fixture
    def empty(self, another_database):
        return another_database()
