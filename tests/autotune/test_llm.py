"""`LLM` on a scripted engine: order, streams side by side, aborts, threads, closing."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
from contracts.scripted import Scripted, byte_tokenizer

from autotune.runtimes.native.llm import LLM, Sampling
from autotune.runtimes.native.text import TextError
from search_spaces import SpaceError


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> list[Mapping[str, Any]]:
    """The configurations that engines were made with."""
    made: list[Mapping[str, Any]] = []

    def make(folder: Path, config: Mapping[str, Any]) -> Scripted:
        made.append(config)
        return Scripted()

    monkeypatch.setattr("autotune.runtimes.native.engine.Engine", make)
    return made


def scripted(llm: LLM) -> Scripted:
    return cast(Scripted, llm.engine)


def test_answers_come_in_the_order_of_the_prompts(tmp_path: Path) -> None:
    with LLM(byte_tokenizer(tmp_path)) as llm:
        answers = llm.generate(["abc", "€", "xy"], max_tokens=5)
        assert [answer.text for answer in answers] == ["abcab", "€\ufffd", "xyxyx"]
        assert {answer.finish for answer in answers} == {"length"}
        assert answers[0].tokens == tuple(b"abcab")
        assert llm.generate([[97, 98]], max_tokens=3)[0].text == "aba"
        assert llm.generate([]) == []


def test_each_prompt_draws_with_its_own_seed(tmp_path: Path) -> None:
    with LLM(tmp_path) as llm:
        llm.generate([[1], [2]], max_tokens=1, temperature=0.5, seed=7, ignore_eos=True)
        assert scripted(llm).added == [([1], 1, 0.5, 7, True), ([2], 1, 0.5, 8, True)]


def test_a_stream_is_the_whole_in_pieces(tmp_path: Path) -> None:
    with LLM(byte_tokenizer(tmp_path)) as llm:
        whole = llm.generate(["€uro"], max_tokens=9)[0]
        pieces = list(llm.stream("€uro", Sampling(max_tokens=9)))
        assert "".join(piece.text for piece in pieces) == whole.text
        assert tuple(token for piece in pieces for token in piece.tokens) == whole.tokens
        assert [piece.finish for piece in pieces] == [None] * 8 + ["length"]


def test_streams_run_side_by_side(tmp_path: Path) -> None:
    with LLM(byte_tokenizer(tmp_path)) as llm:
        one, two = llm.stream("ab", Sampling(4)), llm.stream("xyz", Sampling(6))
        texts = [piece.text for pair in zip(one, two, strict=False) for piece in pair]
        assert "".join(texts) == "axbyazbx"
        assert "".join(piece.text for piece in two) == "yz"


def test_a_stream_closed_early_aborts(tmp_path: Path) -> None:
    with LLM(byte_tokenizer(tmp_path)) as llm:
        stream = llm.stream("ab", Sampling(50))
        next(stream)
        stream.close()
        assert scripted(llm).aborted and not scripted(llm).live
        list(llm.stream("ab", Sampling(2)))
        assert len(scripted(llm).aborted) == 1


def test_a_refused_prompt_leaves_nothing_behind(tmp_path: Path) -> None:
    with LLM(tmp_path) as llm:
        with pytest.raises(ValueError, match="no such request"):
            llm.generate([[1, 2], [254]])
        assert not scripted(llm).live


def test_threads_share_an_llm(tmp_path: Path) -> None:
    with LLM(byte_tokenizer(tmp_path)) as llm, ThreadPoolExecutor(8) as pool:
        prompts = [f"<{n}>" for n in range(32)]
        answers = list(pool.map(lambda prompt: llm.generate([prompt], max_tokens=20)[0].text, prompts))
        assert answers == [(prompt * 7)[:20] for prompt in prompts]


def test_without_a_tokenizer_ids_still_work(tmp_path: Path) -> None:
    with LLM(tmp_path) as llm:
        answer = llm.generate([[1, 2]], max_tokens=3)[0]
        assert (answer.text, answer.tokens) == ("", (1, 2, 1))
        with pytest.raises(TextError, match="give token ids"):
            llm.generate(["a"])
        with pytest.raises(TypeError, match="wrap it in a list"):
            llm.generate("a")


def test_the_configuration_is_completed_and_checked(tmp_path: Path, engine: list[Mapping[str, Any]]) -> None:
    with LLM(tmp_path, {"attention": "sparse"}) as llm:
        assert llm.config["attention"] == "sparse" and llm.config["graphs"] == "eager"
        assert engine == [llm.config]
    with pytest.raises(SpaceError, match="did you mean attention"):
        LLM(tmp_path, {"atention": "sparse"})


def test_a_closed_one_says_so(tmp_path: Path) -> None:
    llm = LLM(tmp_path)
    llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate([[1]])
