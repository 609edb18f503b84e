"""Growing text: its pieces joined are the decoded whole, whatever the bytes and however they are cut."""

from __future__ import annotations

from pathlib import Path

import pytest
from contracts.scripted import byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.runtimes.native.text import Growing, Text, TextError


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    return Text(byte_tokenizer(tmp_path_factory.mktemp("model")))


@settings(max_examples=100, deadline=None)
@given(
    data=st.one_of(
        st.text(st.characters(exclude_categories=("Cs",)), max_size=80).map(lambda t: list(t.encode())),
        st.lists(st.integers(0, 255), max_size=80),
    ),
    cuts=st.lists(st.integers(1, 7), min_size=1),
)
def test_the_pieces_are_the_whole(text: Text, data: list[int], cuts: list[int]) -> None:
    growing, pieces, at, turn = Growing(text), [], 0, 0
    while at < len(data):
        step = cuts[turn % len(cuts)]
        pieces.append(growing.push(data[at : at + step]))
        at, turn = at + step, turn + 1
    pieces.append(growing.push([], last=True))
    assert "".join(pieces) == text.decode(data)


def test_no_piece_ends_inside_a_character(text: Text) -> None:
    growing = Growing(text)
    assert [growing.push([byte]) for byte in "a€".encode()] == ["a", "", "", "€"]


def test_text_needs_a_tokenizer_and_says_so(tmp_path: Path) -> None:
    with pytest.raises(TextError, match="give token ids"):
        Text(tmp_path).encode("a")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TextError, match="cannot be read"):
        Text(tmp_path).encode("a")


def test_half_a_surrogate_is_refused(text: Text) -> None:
    with pytest.raises(TextError, match="surrogate"):
        text.encode("\ud800")


def test_tokens_that_are_no_character_stay_apart(text: Text) -> None:
    assert text.token(65) == "A"
    assert len({text.token(token) for token in range(256)}) == 256
