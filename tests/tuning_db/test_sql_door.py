"""The read-only SQL door on both databases."""

from __future__ import annotations

import pytest
from contracts.sql_door import SqlDoorContract


class TestSqliteDoor(SqlDoorContract):
    special = (
        "ATTACH 'x.db' AS x",
        "PRAGMA query_only=OFF",
        "PRAGMA writable_schema=ON",
        "SELECT load_extension('x')",
        "REPLACE INTO meta VALUES ('a', 'b')",
        "REINDEX",
    )

    @pytest.fixture(scope="class")
    def place(self, tmp_path_factory):
        return tmp_path_factory.mktemp("door") / "tuning.db"


class TestPostgresqlDoor(SqlDoorContract):
    special = (
        "SET TRANSACTION READ WRITE",
        "COPY (SELECT 1) TO PROGRAM 'true'",
        "COPY trials TO STDOUT",
        "SELECT set_config('transaction_read_only', 'off', false)",
        "SELECT * INTO x FROM trials",
        "DO $$ BEGIN DELETE FROM trials; END $$",
        "LISTEN x",
        "SELECT id FROM trials FOR UPDATE",
        "SELECT lo_create(0)",
        "SELECT set_config('transaction_read_only', 'off', true) UNION ALL SELECT lo_create(0)::text",
    )

    @pytest.fixture(scope="class")
    def place(self, another_database):
        return another_database()
