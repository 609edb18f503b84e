"""What every database must answer to a query. A subclass supplies ``place`` and ``empty``, the addresses of two."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import pytest
from contracts.records import HOSTILE, make_scenario, make_trial
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import select as sql

from tuning_db import Hardware, QueryError, Store, open_store
from tuning_db.filters import Compare, number
from tuning_db.query import LOOKED_AT, Asked, Fields, by_id, group, pick, points, select
from tuning_db.schema import trials

ORDER = {"=": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
GPU = Hardware("gpu", {"product": "NVIDIA A100-SXM4-80GB", "count": 4, "memory_bytes": 80 << 30})


def fill(store: Store) -> None:
    """Six search trials on a small CPU, one of them without memory, and a confirmation on four GPUs."""
    small = store.ensure(make_scenario())
    large = store.ensure(make_scenario(hardware=GPU, engine="vllm", model={"name": "zai-org/GLM-5.3-Flash"}))
    for step in range(6):
        store.add(
            make_trial(
                small,
                id=f"aaaa000{step}",
                config={"kv_dtype": "int8" if step % 2 else "bf16", "max_seqs": step, "graphs": step > 2},
                metrics={"ttft_p99": 0.1 * step, "peak_bytes": step * 2**30},
                status="ok" if step else "oom",
            )
        )
    store.add(make_trial(large, id="bbbb0000", config={"note": HOSTILE}, metrics={"kl": 0.01}, stage="confirm"))


def _ids(rows: list[dict[str, Any]]) -> list[str]:
    return [row["id"][-1] if row["id"].startswith("a") else "b" for row in rows]


class QueryContract:
    """Inherited by one test class per database."""

    @pytest.fixture(scope="class")
    def store(self, place: Any) -> Iterator[Store]:
        with open_store(place) as store:
            fill(store)
            yield store

    @pytest.mark.parametrize(
        ("where", "ids"),
        [
            (None, "012345b"),
            ("  ", "012345b"),
            ("ttft_p99<300ms", "012"),
            ("ttft_p99 <= 0.3s", "012"),
            ("metrics.ttft_p99>=400ms", "45"),
            ("ttft_p99=100000us", "1"),
            ("kv_dtype=int8 and status=ok", "135"),
            ("config.kv_dtype != int8", "024"),
            ("peak_bytes > 2GiB and peak_bytes < 4.5 GiB".replace(" GiB", "GiB"), "34"),
            ("max_seqs=1 or max_seqs=2 and kv_dtype=int8", "1"),
            ("(max_seqs=1 or max_seqs=2) and kv_dtype=bf16", "2"),
            ("graphs=true", "345"),
            ("graphs=FALSE", "012"),
            ("gpu~a100", "b"),
            ("hardware~xeon AND NOTHING", None),
            ("engine=vllm", "b"),
            ("model~glm", "b"),
            ("kl<=1%", "b"),
            ("hardware.count=4", "b"),
            ("launch>1", "012345b"),
            ("status!=ok", "0"),
            ("id~bbbb", "b"),
            ("note~'DROP TABLE'", "b"),
            ("note='" + HOSTILE.replace("\\", "\\\\").replace("'", "\\'") + "'", "b"),
            ('note="\'; DROP TABLE trials"', ""),
            ("max_seqs>1k", ""),
            ("seed=7 and block=0", "012345b"),
            ("((((ttft_p99<50ms))))", "0"),
        ],
    )
    def test_filters(self, store: Store, where: Any, ids: Any) -> None:
        if ids is None:
            with pytest.raises(QueryError):
                select(store, where)
        else:
            assert "".join(_ids(select(store, where))) == ids

    @pytest.mark.parametrize(
        ("where", "says"),
        [
            ("ttft_p9<1", "did you mean '(metrics.)?ttft_p99'"),
            ("kv_dtyp=int8", "did you mean '(config.)?kv_dtype'"),
            ("ttft_p99<fast", "is a number and 'fast' is not"),
            ("ttft_p99<5parsecs", "units are"),
            ("ttft_p99<'5ms'", "is a number"),
            ("ttft_p99", "expected = != .* after 'ttft_p99'"),
            ("ttft_p99<", "expected a value after '<'"),
            ("(status=ok", r"expected `\)`"),
            ("status=ok)", "character 10"),
            ("status=ok status=ok", "expected `and`, `or` or the end"),
            ("status=ok and", "expected a field, at the end"),
            ("status='ok", "a quote left open"),
            ("=ok", "expected a field"),
            ("(" * 100 + "status=ok" + ")" * 100, "nested more than"),
            ("status=" + "x" * 20_000, "are the most"),
        ],
    )
    def test_a_filter_that_makes_no_sense_says_where(self, store: Store, where: Any, says: Any) -> None:
        with pytest.raises(QueryError, match=says) as caught:
            select(store, where)
        assert "\n" not in str(caught.value)

    def test_a_row_without_the_field_satisfies_nothing(self, store: Store) -> None:
        assert _ids(select(store, "kl!=5")) == ["b"]
        assert "b" not in _ids(select(store, "kv_dtype!=int8"))

    def test_sorting_puts_rows_without_the_field_last(self, store: Store) -> None:
        assert "".join(_ids(select(store, sort="-ttft_p99"))) == "543210b"
        assert "".join(_ids(select(store, sort="ttft_p99"))) == "012345b"
        assert "".join(_ids(select(store, sort="kv_dtype,-max_seqs"))) == "420531b"
        assert "".join(_ids(select(store, sort="-kl"))) == "b012345"
        with pytest.raises(QueryError, match="did you mean"):
            select(store, sort="-ttft_p98")

    def test_limits(self, store: Store) -> None:
        assert "".join(_ids(select(store, sort="-ttft_p99", limit=2))) == "54"
        assert select(store, limit=0) == []
        with pytest.raises(QueryError):
            select(store, limit=-1)

    @pytest.mark.parametrize(
        ("only", "ids"),
        [
            ({"hardware": "a100"}, "b"),
            ({"hardware": "xeon", "stage": "search"}, "012345"),
            ({"model": "flash"}, "b"),
            ({"engine": "native", "status": "oom"}, "0"),
            ({"engine": "nat"}, ""),
            ({"workload": "chat", "hardware": None}, "012345b"),
        ],
    )
    def test_plain_options_narrow_the_rows(self, store: Store, only: Any, ids: Any) -> None:
        assert "".join(_ids(select(store, **only))) == ids

    def test_hardware_is_found_by_its_key(self, store: Store) -> None:
        assert len(select(store, hardware=make_scenario().hardware.key[:12])) == 6

    def test_fields_are_picked_by_their_short_names(self, store: Store) -> None:
        rows = pick(select(store, "id~a and max_seqs=3"), ["id", "ttft_p99", "kv_dtype", "kl"][:3])
        assert rows == [{"id": "aaaa0003", "ttft_p99": pytest.approx(0.3), "kv_dtype": "int8"}]
        assert pick(select(store), ["kl"])[0] == {"kl": None}
        with pytest.raises(QueryError, match="did you mean"):
            pick(select(store), ["ttft_p98"])

    def test_an_empty_database_answers_nothing(self, empty: Any) -> None:
        with open_store(empty) as store:
            assert select(store, "anything<5ms", sort="-whatever") == []
            assert group(store, "anything") == points(store, ["anything"]) == []
            with pytest.raises(QueryError):
                select(store, "anything<")

    @pytest.fixture(scope="class")
    def mixed(self, store: Store) -> dict[str, Any]:
        """Trials whose one knob holds a value of every kind, by id; the knob's name needs quoting in SQL's paths."""
        values = [None, True, False, 0, 1, -3, 0.1, 4096.5, -0.25, "", "8", "true", "Zürich ÄÖ", "a_b%c", HOSTILE, [7]]
        key = store.ensure(make_scenario(engine="mixed"))
        found = {f"cccc{i:04x}": value for i, value in enumerate(values)}
        for ident, value in found.items():
            odd = {} if value is None else {'odd"\\key': value}
            store.add(make_trial(key, id=ident, config={"mix": value, "deep": {"er": value}, "dot.ted": value, **odd}))
        return found

    @pytest.mark.parametrize("field", ["mix", "config.deep.er", "dot.ted", 'odd"\\key'])
    def test_sql_means_what_the_words_say(self, store: Store, mixed: dict[str, Any], field: str) -> None:
        words = ["8", "0", "1", "0.1", "true", "FALSE", "", "zürich", "äö", "_", "%", "\\", "'", "[7]", "é 😀", "300ms"]

        asked = Asked(store, None, {"engine": "mixed"})
        known = asked.fields.find(field)

        @settings(max_examples=60, deadline=None)
        @given(st.sampled_from(["=", "!=", "<", "<=", ">", ">=", "~"]), st.sampled_from(words), st.booleans())
        def holds(op: str, text: str, quoted: bool) -> None:
            meant = Compare(field, op, text, None if quoted else number(text))
            expected = [ident for ident, value in mixed.items() if oracle(meant, value)]
            query = asked.narrow(sql(trials.c.id)).where(asked.sql.compare(meant, known)).order_by(trials.c.id)
            assert [row.id for row in store.rows(query)] == expected

        holds()

    @pytest.mark.parametrize("sort", ["mix", "-mix", "config.deep.er", 'odd"\\key'])
    def test_any_mixture_of_values_can_be_sorted(self, store: Store, mixed: dict[str, Any], sort: str) -> None:
        rows = select(store, sort=sort, engine="mixed")
        down = sort.startswith("-")
        have = [ident for ident, value in mixed.items() if value is not None]
        have.sort(key=lambda ident: rank(mixed[ident]), reverse=down)
        assert [row["id"] for row in rows] == [*have, *(ident for ident in mixed if ident not in have)]

    def test_groups(self, store: Store) -> None:
        rows = group(store, "kv_dtype", ["ttft_p99", "kl"], engine="native")
        assert [(row["kv_dtype"], row["trials"], row["ok"]) for row in rows] == [("bf16", 3, 2), ("int8", 3, 3)]
        assert rows[0]["ttft_p99_min"] == pytest.approx(0.2)
        assert rows[0]["ttft_p99_mean"] == pytest.approx(0.3)
        assert rows[0]["ttft_p99_max"] == pytest.approx(0.4)
        assert rows[0]["kl_min"] is None
        by_flag = group(store, "graphs", engine="native")
        assert {row["graphs"]: row["trials"] for row in by_flag} == {True: 3, False: 3}
        assert {row["gpu"]: row["trials"] for row in group(store, "gpu", where="kl<1")} == {"4xA100-SXM4-80GB": 1}
        assert group(store, "status", where="max_seqs>100") == []
        with pytest.raises(QueryError, match="not a measured number"):
            group(store, "status", ["kv_dtype"])

    def test_every_kind_of_value_is_a_group(self, store: Store, mixed: dict[str, Any]) -> None:
        rows = group(store, "mix", engine="mixed")
        assert len(rows) == len(mixed)
        assert {repr(row["mix"]) for row in rows} == {repr("[7]" if v == [7] else v) for v in mixed.values()}

    def test_points_are_the_good_trials_that_have_every_metric(self, store: Store) -> None:
        found = points(store, ["ttft_p99", "peak_bytes"], "max_seqs>3")
        assert found == [
            {"id": f"aaaa000{i}", "scenario_key": make_scenario().key, "metrics.ttft_p99": pytest.approx(0.1 * i),
             "metrics.peak_bytes": i * 2**30}
            for i in (4, 5)
        ]  # fmt: skip
        assert points(store, ["kl", "peak_bytes"]) == []
        assert [row["id"] for row in by_id(store, ["bbbb0000", "none", "aaaa0001"])] == ["bbbb0000", "aaaa0001"]

    def test_a_field_that_only_an_old_trial_has_is_found(self, empty: Any) -> None:
        with open_store(empty) as store:
            key = store.ensure(make_scenario())
            store.add(make_trial(key, id="dddd0000", counters={"rare": 1, "a": {"b": 2}}, ended_at=1.0))
            for step in range(LOOKED_AT + 1):
                store.add(make_trial(key, id=f"dddd1{step:03}"))
            assert "counters.rare" not in Fields(store).known
            for where in ("counters.rare=1", "rare=1", "counters.a.b=2", "a.b<3"):
                assert [row["id"] for row in select(store, where)] == ["dddd0000"]
            with pytest.raises(QueryError, match="no trial has a field 'rara'"):
                select(store, "rara=1")

    def test_text_that_no_database_can_hold_is_refused(self, store: Store) -> None:
        for where in ("status='a\x00b'", "note~'\ud800'", "a\x00b=1", "config.\ud800=1"):
            with pytest.raises(QueryError):
                select(store, where)

    def test_any_filter_is_answered_or_refused_and_changes_nothing(self, store: Store) -> None:
        before = store.trials()
        parts = st.sampled_from(["status", "note", "=", "~", "<", "'", '"', ")", "(", " and ", "or ", ";", "--", "ok"])
        evil = st.sampled_from(
            ["DROP TABLE trials", "1=1", "\\", "%", "😀", "\x01", "$.", "||", "{}", ":x", "%(a)s", "?"]
        )

        @settings(max_examples=40, deadline=None)
        @given(st.lists(parts | evil, max_size=9).map("".join) | st.text(max_size=12).map("note='{}'".format))
        def holds(where: str) -> None:
            try:
                select(store, where)
            except QueryError as error:
                assert str(error)
            assert store.trials() == before

        holds()


def oracle(meant: Compare, value: Any) -> bool:
    """What a comparison means, in plain words of Python."""
    if value is None:
        return False
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    shown = "[7]" if value == [7] else str(value).lower() if isinstance(value, bool) else str(value)
    if meant.op == "~":
        return meant.text.lower() in shown.lower()
    if is_number and meant.number is None:
        return meant.op == "!="
    if is_number:
        return ORDER[meant.op](value, meant.number)
    flag = isinstance(value, bool) and meant.op in ("=", "!=")
    return ORDER[meant.op](shown, meant.text.lower() if flag else meant.text)


def rank(value: Any) -> tuple[int, Any]:
    """Numbers and flags by size, then texts by code point."""
    if isinstance(value, (int, float)):
        return 0, value
    return 1, "[7]" if value == [7] else value
