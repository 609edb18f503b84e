"""Workload files and the conversations a seed makes: validation, determinism, equal work, no shared beginnings."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from importlib import resources

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.workload import KEYS, KINDS, Workload, WorkloadError, build, load_workload, names, parse

SOURCE = [(i * 7919 + i * i * 31) % 251 for i in range(20_000)]
BASE = {"name": "x", "sentence": "X.", "kind": "chat", "conversations": 4, "concurrency": 2, "prompt": [8, 20],
        "output": 4}  # fmt: skip

PINNED = ["4230808ba191", "eb99d7405043", "ed295e77d435"]


def prompts(conversations):
    return [turn.tokens for c in conversations for turn in c.turns]


@pytest.mark.parametrize("name", ["chat", "long", "shared", "task"])
def test_the_built_in_ones_load_and_show_every_key(name):
    workload = load_workload(name)
    assert workload.name == workload.kind == name
    text = (resources.files("autotune") / "workloads" / f"{name}.toml").read_text(encoding="utf-8")
    assert all(f"\n{key}" in text or f"\n# {key}" in text for key in KEYS if key not in ("slo", "rate"))
    assert "[slo]" in text and "rate = " in text
    assert all("#" in line or line.startswith("sentence") for line in text.splitlines() if line.strip())
    assert names() == sorted(KINDS)


def test_a_copied_file_is_the_same_workload(tmp_path):
    text = (resources.files("autotune") / "workloads" / "task.toml").read_text(encoding="utf-8")
    copy = tmp_path / "mine.toml"
    copy.write_text(text, encoding="utf-8")
    assert load_workload(copy) == load_workload(str(copy)) == load_workload("task")


def test_the_longest_sequence_bounds_all():
    workload = load_workload("task")
    assert workload.longest == workload.turns[1] * (workload.prompt[1] + workload.output[1])
    assert load_workload("shared").longest == 384 + 64 + 16
    for c in build(workload, SOURCE, 1):
        assert sum(len(t.tokens) + t.max_tokens for t in c.turns) <= workload.longest


def test_the_conversations_of_a_seed_are_pinned():
    """A change here changes what every stored measurement was asked: name the new draw in `build`'s seed text."""
    closed = parse({**BASE, "turns": [2, 3], "prefix": 10}, "x")
    opened = parse({**BASE, "concurrency": 0, "rate": 2.0, "warmup": 2}, "x")
    made = (build(closed, SOURCE, 7), build(opened, SOURCE, 7), build(opened, SOURCE, 7, warmup=True))
    assert [hashlib.sha256(repr(m).encode()).hexdigest()[:12] for m in made] == PINNED


@pytest.mark.parametrize("name", ["chat", "long", "shared", "task"])
def test_no_two_conversations_begin_alike_within_or_between_seeds(name):
    workload = replace(load_workload(name), prefix=0)
    seen = [
        c.turns[0].tokens[:16]
        for seed in range(20)
        for warmup in (False, True)
        for c in build(workload, SOURCE, seed, warmup=warmup)
    ]
    assert len(set(seen)) == len(seen)


def test_the_prefix_is_shared_within_a_run_only():
    workload = load_workload("shared")
    runs = [build(workload, SOURCE, 1), build(workload, SOURCE, 2), build(workload, SOURCE, 1, warmup=True)]
    heads = [{c.turns[0].tokens[: workload.prefix] for c in run} for run in runs]
    assert [len(h) for h in heads] == [1, 1, 1]
    assert len(set.union(*heads)) == 3
    rests = [c.turns[0].tokens[workload.prefix :][:8] for run in runs for c in run]
    assert len(set(rests)) == len(rests)


@st.composite
def workloads(draw):
    def pair(low, high):
        return tuple(sorted((draw(st.integers(low, high)), draw(st.integers(low, high)))))

    closed = draw(st.booleans())
    return Workload(
        "w", "W.", draw(st.sampled_from(KINDS)), draw(st.integers(1, 6)), pair(1, 60), pair(1, 9),
        concurrency=draw(st.integers(1, 4)) if closed else 0, rate=0.0 if closed else draw(st.floats(0.1, 100)),
        turns=pair(1, 4), prefix=draw(st.sampled_from([0, 0, 24])), seed=draw(st.integers(0, 9)),
        warmup=draw(st.integers(0, 3)),
    )  # fmt: skip


@settings(max_examples=60)
@given(workloads(), st.integers(0, 2**31), st.booleans())
def test_what_is_built_keeps_to_the_ranges(workload, seed, warmup):
    made = build(workload, SOURCE, seed, warmup)
    assert made == build(workload, SOURCE, seed, warmup)
    assert [c.id for c in made] == list(range(workload.warmup if warmup else workload.conversations))
    arrivals = [c.arrival for c in made]
    assert arrivals == sorted(arrivals)
    assert all(a > 0 for a in arrivals) if workload.rate else set(arrivals) <= {0.0}
    for c in made:
        assert workload.turns[0] <= len(c.turns) <= workload.turns[1]
        for index, turn in enumerate(c.turns):
            new = len(turn.tokens) - (workload.prefix if index == 0 else 0)
            assert workload.prompt[0] <= new <= workload.prompt[1]
            assert workload.output[0] <= turn.max_tokens <= workload.output[1]
            assert set(turn.tokens) <= set(SOURCE)


@settings(max_examples=30)
@given(workloads(), st.integers(0, 2**31), st.integers(0, 2**31))
def test_every_seed_asks_for_the_same_work(workload, first, second):
    def work(seed):
        made = build(workload, SOURCE, seed)
        return (
            sum(len(p) for p in prompts(made)), sum(t.max_tokens for c in made for t in c.turns), len(prompts(made))
        )  # fmt: skip

    assert work(first) == work(second)


def test_a_short_text_goes_round():
    workload = parse({**BASE, "prompt": [50, 50]}, "x.toml")
    assert all(len(p) == 50 for p in prompts(build(workload, [1, 2, 3], 0)))
    with pytest.raises(WorkloadError, match="fewer than two different tokens"):
        build(workload, [4, 4, 4], 0)


def test_the_identity_is_plain_and_leaves_the_wording_out():
    one, other = parse(BASE, "x"), parse({**BASE, "sentence": "Other words."}, "x")
    assert one.identity() == other.identity()
    assert one.identity()["prompt"] == [8, 20] and one.identity()["output"] == [4, 4]
    for key, value in {"seed": 3, "warmup": 2, "prefix": 5, "concurrency": 1, "slo": {"ttft": 1}}.items():
        assert parse({**BASE, key: value}, "x").identity() != one.identity()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"promt": 3}, r"x.toml: unknown key 'promt'; did you mean prompt\?"),
        ({"zzz": 3}, "unknown key 'zzz'; keys are name"),
        ({"conversations": 0}, "conversations must lie between 1 and 100,000, not 0"),
        ({"conversations": 10**9}, "conversations must lie"),
        ({"conversations": 2.5}, "conversations wants a whole number, not 2.5"),
        ({"conversations": True}, "conversations wants a whole number, not True"),
        ({"prompt": [20, 8]}, r"prompt wants \[least, most\]"),
        ({"prompt": [1, 2, 3]}, r"prompt wants a number or \[least, most\]"),
        ({"prompt": "long"}, "prompt wants a whole number, not 'long'"),
        ({"output": 0}, "output must lie between 1"),
        ({"prefix": -1}, "prefix must lie between 0"),
        ({"kind": "chatty"}, "kind cannot be 'chatty'; it is one of chat, long, shared, task"),
        ({"name": ""}, "name wants text"),
        ({"rate": 2.0}, "give one of concurrency .*, rate"),
        ({"concurrency": 0}, "give one of concurrency .*, rate"),
        ({"rate": float("nan")}, "rate must lie between 0"),
        ({"slo": {"tft": 1.0}}, "slo cannot limit 'tft'; it limits ttft, tpot, itl, e2e"),
        ({"slo": {"ttft": -1}}, "slo.ttft wants seconds"),
        ({"slo": 3}, "slo must be a table"),
    ],
)
def test_a_bad_value_is_one_clear_line(change, says):
    with pytest.raises(WorkloadError, match=says) as caught:
        parse({**BASE, **change}, "x.toml")
    assert "\n" not in str(caught.value)


def test_a_missing_key_is_named():
    table = dict(BASE)
    del table["prompt"]
    with pytest.raises(WorkloadError, match="prompt is missing"):
        parse(table, "x.toml")


def test_a_file_that_cannot_be_read_is_one_clear_line(tmp_path):
    for name, content, says in (
        ("broken.toml", b"name = ", "not valid TOML"),
        ("latin.toml", b"name = '\xff'", "not UTF-8"),
        ("absent.toml", None, "cannot read workload .*No such file"),
    ):
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(WorkloadError, match=says):
            load_workload(path)
    with pytest.raises(WorkloadError, match=r"unknown workload 'tsk'; did you mean task\?"):
        load_workload("tsk")
    with pytest.raises(WorkloadError, match="built in are chat, long, shared, task"):
        load_workload("qqqqq")
