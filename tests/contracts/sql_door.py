"""What the read-only SQL door must answer and refuse on every database. A subclass supplies ``place``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from contracts.records import make_samples, make_scenario, make_trial
from hypothesis import given, settings
from hypothesis import strategies as st

from tuning_db import QueryError, Store, open_store
from tuning_db.exchange import exported
from tuning_db.sql_door import read

WRITES = (
    "DELETE FROM trials", "UPDATE trials SET status = 'ok'", "DROP TABLE trials", "CREATE TABLE x (a int)",
    "INSERT INTO meta VALUES ('a', 'b')", "SELECT 1; DELETE FROM trials", "ALTER TABLE trials ADD x int", "VACUUM",
    "BEGIN", "COMMIT", "", "  ", "selec", "SELECT \x00", "WITH x AS (DELETE FROM trials RETURNING id) SELECT * FROM x",
    "SELECT 1; COMMIT; DELETE FROM trials; SELECT 1",
)  # fmt: skip


class SqlDoorContract:
    """Inherited by one test class per database."""

    special: tuple[str, ...] = ()
    """What this database alone would need to be kept from."""

    @pytest.fixture(scope="class")
    def writer(self, place: Any) -> Iterator[Store]:
        with open_store(place) as store:
            key = store.ensure(make_scenario())
            for number in range(5):
                store.add(make_trial(key, id=f"aaaa000{number}"), make_samples(f"aaaa000{number}"))
            yield store

    @pytest.fixture(scope="class")
    def store(self, place: Any, writer: Store) -> Iterator[Store]:
        with open_store(place, readonly=True) as store:
            yield store

    def test_a_query_is_answered(self, store: Store) -> None:
        columns, rows = read(store, "SELECT status, count(*) AS n FROM trials GROUP BY status", 10)
        assert (columns, rows) == (["status", "n"], [{"status": "ok", "n": 5}])
        assert read(store, "SELECT id FROM trials WHERE id > 'x'", 10) == (["id"], [])

    def test_columns_of_one_name_stay_apart_and_bytes_are_hex(self, store: Store) -> None:
        tables = "trials a JOIN trials b ON a.id < b.id JOIN samples s ON s.trial_id = a.id"
        query = f"SELECT a.id, b.id, a.id, s.blob FROM {tables}"
        columns, rows = read(store, query + " ORDER BY a.id, b.id", 1)
        assert columns == ["id", "id_2", "id_3", "blob"]
        assert rows[0]["id_2"] == "aaaa0001"
        assert bytes.fromhex(rows[0]["blob"])[0] == 1

    def test_rows_are_limited(self, store: Store) -> None:
        assert len(read(store, "SELECT id FROM trials", 3)[1]) == 3
        endless = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x FROM n"
        assert [row["x"] for row in read(store, endless, 2)[1]] == [1, 2]

    def test_nothing_can_be_changed(self, store: Store, writer: Store) -> None:
        before = [*exported(writer)]
        for door in (store, writer):  # even of a database that was opened for writing
            for statement in (*WRITES, *self.special):
                with pytest.raises(QueryError) as caught:
                    read(door, statement, 10)
                assert "\n" not in str(caught.value)
        assert [*exported(writer)] == before
        writer.ensure(make_scenario(engine="other"))  # and the store can still write

    def test_any_text_is_answered_or_refused(self, store: Store, writer: Store) -> None:
        before = [*exported(writer)]
        words = st.sampled_from(
            ["SELECT ", "id", " FROM trials", "DELETE", ";", "'", "--", "/*", "(", "1", " %s", " :x", "?", "😀"]
        )

        @settings(max_examples=40, deadline=None)
        @given(st.lists(words, max_size=8).map("".join) | st.text(max_size=20))
        def holds(statement: str) -> None:
            try:
                read(store, statement, 2)
            except QueryError as error:
                assert str(error)

        holds()
        assert [*exported(writer)] == before
