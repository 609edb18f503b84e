"""The filter language: what it means, what it refuses, and that nothing in it is ever run."""

from __future__ import annotations

import pytest
from contracts.records import HOSTILE, make_scenario, make_trial
from hypothesis import example, given
from hypothesis import strategies as st

from tuning_db import Hardware, QueryError, open_store
from tuning_db.query import UNITS, All, Compare, Some, field_names, number, order, parse, pick, select


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    gpu = Hardware("gpu", {"product": "NVIDIA A100-SXM4-80GB", "count": 4, "memory_bytes": 80 << 30})
    with open_store(tmp_path_factory.mktemp("query") / "tuning.db") as store:
        small = store.ensure(make_scenario())
        large = store.ensure(make_scenario(hardware=gpu, engine="vllm", model={"name": "zai-org/GLM-5.3-Flash"}))
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
        yield store


def _ids(rows):
    return [row["id"][-1] if row["id"].startswith("a") else "b" for row in rows]


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
def test_filters(store, where, ids):
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
def test_a_filter_that_makes_no_sense_says_where(store, where, says):
    with pytest.raises(QueryError, match=says) as caught:
        select(store, where)
    assert "\n" not in str(caught.value)


def test_a_row_without_the_field_satisfies_nothing(store):
    assert _ids(select(store, "kl!=5")) == ["b"]
    assert "b" not in _ids(select(store, "kv_dtype!=int8"))


def test_sorting_puts_rows_without_the_field_last(store):
    assert "".join(_ids(select(store, sort="-ttft_p99"))) == "543210b"
    assert "".join(_ids(select(store, sort="ttft_p99"))) == "012345b"
    assert "".join(_ids(select(store, sort="kv_dtype,-max_seqs"))) == "420531b"
    assert "".join(_ids(select(store, sort="-kl"))) == "b012345"
    with pytest.raises(QueryError, match="did you mean"):
        select(store, sort="-ttft_p98")


def test_limits(store):
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
def test_plain_options_narrow_the_rows(store, only, ids):
    assert "".join(_ids(select(store, **only))) == ids


def test_hardware_is_found_by_its_key(store):
    assert len(select(store, hardware=make_scenario().hardware.key[:12])) == 6


def test_fields_are_picked_by_their_short_names(store):
    rows = pick(select(store, "id~a and max_seqs=3"), ["id", "ttft_p99", "kv_dtype", "kl"][:3])
    assert rows == [{"id": "aaaa0003", "ttft_p99": pytest.approx(0.3), "kv_dtype": "int8"}]
    assert pick(select(store), ["kl"])[0] == {"kl": None}
    with pytest.raises(QueryError, match="did you mean"):
        pick(select(store), ["ttft_p98"])


def test_an_empty_database_answers_nothing(tmp_path):
    with open_store(tmp_path / "tuning.db") as store:
        assert select(store, "anything<5ms", sort="-whatever") == []
        with pytest.raises(QueryError):
            select(store, "anything<")


names = st.from_regex(r"[a-z_][a-z_0-9.]{0,8}", fullmatch=True).filter(lambda name: name not in ("and", "or"))
comparisons = st.builds(
    lambda name, op, text: (f'{name} {op} "{_quoted(text)}"', Compare(name, op, text, None)),
    names,
    st.sampled_from(["=", "!=", "<", "<=", ">", ">=", "~"]),
    st.text(max_size=8),
)


def _quoted(text):
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _joined(word, node):
    def join(parts):
        return f" {word} ".join(f"({text})" for text, _ in parts), node(tuple(tree for _, tree in parts))

    return join


trees = st.recursive(
    comparisons,
    lambda part: (
        st.lists(part, min_size=2, max_size=3).map(_joined("and", All))
        | st.lists(part, min_size=2, max_size=3).map(_joined("or", Some))
    ),
    max_leaves=6,
)


@given(trees)
def test_what_is_written_is_what_is_parsed(written):
    text, tree = written
    assert parse(text) == tree


@given(st.text(st.sampled_from("ab=<>!~()'\" \\andor5ms\x00é"), max_size=30) | st.text(max_size=30))
@example("__import__('os').system('x')=1")
@example("a=1; DROP TABLE trials")
def test_any_text_is_a_tree_or_a_clear_error(text):
    try:
        tree = parse(text)
    except QueryError as error:
        assert str(error)
    else:
        assert tree.holds({}) is False


@given(st.integers(-(10**6), 10**6), st.sampled_from(sorted(UNITS)))
def test_a_number_with_a_unit_is_the_float_of_its_decimal(count, unit):
    written = number(f"{count}{unit}")
    assert written == pytest.approx(count * float(UNITS[unit]))
    assert number(f"{count}{unit.replace('s', 'S').replace('b', 'B')}") == written


@pytest.mark.parametrize(
    ("text", "value"), [("300ms", 0.3), ("0.3", 0.3), ("1e3", 1000.0), ("-5%", -0.05), (".5k", 500.0)]
)
def test_numbers_are_exact(text, value):
    assert number(text) == value


@pytest.mark.parametrize(
    "text", ["", "ms", "5 ms", "5m", "1e999", "1e99999999999999999", "nan", "inf", "0x10", "1_000", "٣"]
)
def test_what_is_no_number(text):
    assert number(text) is None


@given(st.lists(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(), max_size=8))
def test_any_mixture_of_values_can_be_sorted(values):
    rows = [{"x": value} for value in values]
    up = order(rows, "x", ["x"])
    assert sorted(map(repr, up)) == sorted(map(repr, rows))
    missing = [row["x"] is None for row in up]
    assert missing == sorted(missing)


def test_the_fields_can_be_listed_for_completion(store):
    names = field_names(select(store))
    assert {"id", "status", "metrics.ttft_p99", "config.kv_dtype", "hardware.product", "engine.torch"} <= names.keys()
