"""Recorded loads of each format, the conversations made of them, and files that are none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autotune.recorded import RecordedError, digest, read
from autotune.workload import WorkloadError, build, load_workload, parse, recorded_in

SOURCE = [(i * 7919 + i * i * 31) % 251 for i in range(5000)]
KEYS = """name = 'r'
sentence = 'R.'
kind = 'chat'
conversations = 3
prompt = [1, 40]
output = [1, 9]
turns = [1, 2]
"""
SHARE = [
    {"id": "a", "conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "1234"},
                                  {"from": "human", "value": "two"}, {"from": "gpt", "value": "12"},
                                  {"from": "human", "value": "past the limit"}]},
    {"id": "b", "conversations": [{"from": "system", "value": "be kind"}, {"from": "user", "value": "three"}]},
    {"id": "silent", "conversations": [{"from": "gpt", "value": "nobody asked"}]},
]  # fmt: skip
FILES = {
    "p.txt": "first line\n\nsecond line\n",
    "p.jsonl": '{"prompt": "first line", "max_tokens": 5}\n{"prompt": "second line"}\n',
    "t.jsonl": '{"timestamp": 5000, "input_length": 70, "output_length": 3, "hash_ids": [1]}\n'
    '{"timestamp": 2000, "input_length": 12, "output_length": 90}\n',
    "t.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
    "2023-11-16 18:15:50.9951690,39,10\n",
    "s.json": json.dumps(SHARE),
}


def encode(text: str) -> list[int]:
    return list(text.encode())


def sessions(folder: Path, name: str):
    (folder / name).write_text(FILES[name], encoding="utf-8")
    return read(folder / name, encode)


def workload(folder: Path, name: str, load: str):
    (folder / name).write_text(FILES[name], encoding="utf-8")
    (folder / "w.toml").write_text(f'{KEYS}file = "{name}"\n{load}\n', encoding="utf-8")
    return recorded_in(load_workload(folder / "w.toml"), encode)


def test_prompts_keep_their_text_and_what_they_asked_for(tmp_path: Path) -> None:
    for name, outputs in (("p.txt", [0, 0]), ("p.jsonl", [5, 0])):
        found = sessions(tmp_path, name)
        assert [bytes(s.turns[0].tokens) for s in found] == [b"first line", b"second line"]
        assert [s.turns[0].output for s in found] == outputs


def test_traces_keep_lengths_and_times_in_order(tmp_path: Path) -> None:
    found = sessions(tmp_path, "t.jsonl")
    assert [(s.arrival, s.turns[0].length, s.turns[0].output) for s in found] == [(0.0, 12, 90), (3.0, 70, 3)]
    found = sessions(tmp_path, "t.csv")
    assert [(s.turns[0].length, s.turns[0].output) for s in found] == [(374, 44), (39, 10)]
    assert found[1].arrival == pytest.approx(4.314579, abs=1e-5)


def test_a_shared_conversation_has_the_turns_of_who_asked(tmp_path: Path) -> None:
    first, second = sessions(tmp_path, "s.json")
    assert [(bytes(t.tokens), t.output) for t in first.turns] == [(b"one", 4), (b"two", 2), (b"past the limit", 0)]
    assert [bytes(t.tokens) for t in second.turns] == [b"three"]


@pytest.mark.parametrize("name", FILES)
def test_every_run_stays_in_the_workload_limits(tmp_path: Path, name: str) -> None:
    load = workload(tmp_path, name, "concurrency = 2")
    made = build(load, SOURCE, 1)
    assert len(made) == 3 and made == build(load, SOURCE, 1)
    assert len({tuple(build(load, SOURCE, seed)) for seed in range(8)}) > 1
    for conversation in made:
        assert 1 <= len(conversation.turns) <= 2 and conversation.arrival == 0.0
        assert all(1 <= len(t.tokens) <= 40 and 1 <= t.max_tokens <= 9 for t in conversation.turns)


def test_arrivals_are_as_recorded_at_the_speed_asked_for(tmp_path: Path) -> None:
    load = workload(tmp_path, "t.jsonl", "speed = 2.0")
    gaps = {tuple(c.arrival for c in build(load, SOURCE, seed)) for seed in range(12)}
    assert gaps == {(0.0, 1.5, 1.5), (0.0, 0.0, 1.5)}  # from either line; past the end the clock stands for one step


def test_the_content_is_the_identity_not_the_place(tmp_path: Path) -> None:
    one = workload(tmp_path, "p.txt", "concurrency = 1")
    (tmp_path / "elsewhere").mkdir()
    other = workload(tmp_path / "elsewhere", "p.txt", "concurrency = 1")
    assert one.identity() == other.identity() and str(tmp_path) not in str(one.identity())
    assert digest(one.sessions) in one.identity().values()
    assert "file" not in load_workload("chat").identity() and "speed" not in load_workload("chat").identity()


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.txt", "\n\n", "holds no prompt"), ("a.jsonl", '{"prompt": "x"}\n{broken', "line 2 is no JSON"),
        ("a.jsonl", '{"timestamp": 1, "input_length": 4}', "'output_length' is missing"),
        ("a.jsonl", "[1]", "a.jsonl"), ("a.json", '{"no": "list"}', "a.json"), ("a.json", "[{}]", "'conversations' is"),
        ("a.csv", "when,what\n1,2\n", "'ContextTokens' is missing"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n1,-5,2\n", "line 2: -5 tokens"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nsoon,5,2\n", "soon"), ("a.bin", "x", "no recorded load"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named_with_the_formats(tmp_path: Path, name: str, text: str, says: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(RecordedError, match=says) as caught:
        read(tmp_path / name, encode)
    assert name in str(caught.value) and "ShareGPT" in str(caught.value)


def test_bytes_and_missing_files_and_speed_without_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecordedError, match="not UTF-8"):
        read(tmp_path / "a.txt", encode)
    with pytest.raises(RecordedError, match="cannot read"):
        read(tmp_path / "none.txt", encode)
    base = {"name": "x", "sentence": "X.", "kind": "chat", "conversations": 4, "prompt": 8, "output": 4}
    with pytest.raises(WorkloadError, match="speed needs a file"):
        parse({**base, "speed": 1.0}, "x")
    with pytest.raises(WorkloadError, match="give one of"):
        parse({**base, "file": "a.txt", "speed": 1.0, "rate": 2.0}, "x")
