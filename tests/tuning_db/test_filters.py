"""The filter language: what it means, what it refuses, and that nothing in it is ever run."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tuning_db import QueryError
from tuning_db.filters import UNITS, All, Compare, Some, number, parse

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
        assert isinstance(tree, (Compare, All, Some))


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
