"""Real ranks over gloo: the same answers as one process at every width, and what is left when one of them ends."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from autotune.outcome import EngineError, Status
from autotune.runtimes.base import Generation, RequestError
from autotune.runtimes.native import NativeRuntime
from autotune.runtimes.native.engine import Engine
from autotune.runtimes.native.llm import LLM, Sampling
from autotune.runtimes.native.remote import RemoteEngine
from search_spaces import Config, load

SPACE = load("native").narrow({"cores": 8, "devices": 8, "layers": 4, "experts": 8})
EXACT: dict[str, Any] = {"kv_dtype": "fp32", "state_dtype": "fp32", "compute": "fp32", "kv_tokens": 1024}
WIDE: dict[str, Any] = {}
EIGHT = {"bits_attention": 8, "bits_dense": 8, "bits_experts": 8, "bits_shared": 8, "bits_embedding": 8}
FOUR = {"bits_attention": 8, "bits_experts": 4, "bits_shared": 4, "bits_embedding": 4, "bits_lm_head": 4,
        "bits_group_size": 32}  # fmt: skip
ROWS: tuple[tuple[dict[str, Any], dict[str, Any], dict[str, Any]], ...] = (
    ({"tp": 2}, EIGHT, {"attention": "sparse", "prefix_reuse": True}),
    ({"tp": 2, "ep": 2}, {**FOUR, "bits_long": 8, "bits_long_from": 64}, {"attention": "absorbed", "kv_tokens": 160}),
    ({"pp": 2}, {**FOUR, "bits_compensation": "bias"}, {"attention": "expanded", "prefix_reuse": True}),
    ({"pp": 4}, WIDE, {"attention": "sparse", "prefix_reuse": True, "kv_tokens": 160}),
    ({"dp": 2}, EIGHT, {"attention": "absorbed", "prefix_reuse": True}),
    ({"tp": 4, "ep": 2}, WIDE, {"attention": "expanded", "token_budget": 64}),
    ({"tp": 2, "pp": 2}, {**EIGHT, "bits_long": 16, "bits_long_from": 64, "bits_compensation": "bias"},
     {"attention": "absorbed", "prefix_reuse": True}),
    ({"tp": 2, "dp": 2, "ep": 2}, FOUR, {"attention": "sparse", "token_budget": 64}),
)  # fmt: skip
SOURCE = random.Random(3)
SHARED = [SOURCE.randrange(4, 96) for _ in range(48)]
PROMPTS = [SHARED + [SOURCE.randrange(4, 96) for _ in range(n)] for n in (3, 20, 41, 60)]


def complete(knobs: dict[str, Any]) -> Config:
    """Also values that the space would not draw: small caches, early borders of bits_long."""
    odd = {name: knobs[name] for name in ("kv_tokens", "bits_long_from") if name in knobs}
    return Config({**SPACE.complete({k: v for k, v in {**EXACT, **knobs}.items() if k not in odd}), **odd})


def session(leader: int) -> list[int]:
    """The processes of a session that run; zombies that wait for their parent do not."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = file.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[3]) == leader and fields[0] != "Z":
            found.append(int(file.parent.name))
    return sorted(found)


@contextmanager
def launched(folder: Path, knobs: dict[str, Any], log: Path) -> Iterator[Any]:
    with NativeRuntime(folder).launch(complete(knobs), log) as endpoint:
        pid = endpoint._child.pid
        yield endpoint
    assert session(pid) == []


def generate(endpoint: Any, prompts: list[list[int]], count: int) -> list[list[int]]:
    async def one(prompt: list[int]) -> list[int]:
        stream = endpoint.stream(Generation(tuple(prompt), count, ignore_eos=True))
        return [token async for chunk in stream for token in chunk.tokens]

    async def together() -> list[list[int]]:
        return list(await asyncio.gather(*map(one, prompts)))

    return asyncio.run(asyncio.wait_for(together(), 60))


@pytest.mark.parametrize(
    ("layout", "widths", "rest"), ROWS, ids=lambda part: ",".join(f"{k}={v}" for k, v in part.items())
)
def test_ranks_answer_what_one_process_answers(
    tiny: Path, run: Callable[..., list[list[int]]], layout: dict[str, Any], widths: dict[str, Any],
    rest: dict[str, Any], tmp_path: Path,
) -> None:  # fmt: skip
    alone = Engine(tiny, complete({**widths, **rest}))
    crowded = "kv_tokens" in rest
    count = 24 if crowded else 12  # then sequences outgrow the blocks that their prompts took
    wanted, scores = run(alone, PROMPTS, count), alone.score(PROMPTS[:3], 5)
    with launched(tiny, {**layout, **widths, **rest}, tmp_path / "log") as endpoint:
        for _ in range(2):  # the second time over what the first left in the cache
            assert generate(endpoint, PROMPTS, count) == wanted
        for found, other in zip(endpoint.score(PROMPTS[:3], 5), scores, strict=True):
            assert np.abs(found.logprobs - other.logprobs).max() <= 1e-5
        effective, counters = endpoint.effective(), endpoint.counters()
    for name in ("tp", "pp", "dp", "ep"):
        assert effective[name] == layout.get(name, 1)
    assert sum(effective["stages"]) == 4 and len(effective["stages"]) == layout.get("pp", 1)
    assert effective["bits_stored"] == alone.effective()["bits_stored"]
    assert counters["decode_tokens"] > 0
    if crowded:
        assert counters["evictions" if rest.get("prefix_reuse") else "preemptions"] > 0
    elif rest.get("prefix_reuse") and layout != {"dp": 2}:
        assert counters["prefix_hits"] > 0
    if layout != {"dp": 2}:
        assert 0 < counters["communication_share"] < 1 and counters["communication_bytes"] > 0
        replicated = counters["weight_bytes"] / layout.get("dp", 1)
        assert alone.counters()["weight_bytes"] <= replicated < 1.5 * alone.counters()["weight_bytes"]


def test_the_table_has_every_axis_packed_and_not_and_in_two_forms_of_attention() -> None:
    for axis in ("tp", "pp", "dp", "ep"):
        rows = [row for row in ROWS if row[0].get(axis, 1) > 1]
        assert len({widths.get("bits_experts", 16) for _, widths, _ in rows}) >= 2
        assert len({rest["attention"] for _, _, rest in rows}) >= 2


def test_requests_are_drawn_refused_and_forgotten_as_by_one_engine(tiny: Path, tmp_path: Path) -> None:
    async def use(endpoint: Any) -> list[Any]:
        stream = endpoint.stream(Generation(tuple(PROMPTS[0]), 500, ignore_eos=True))
        async for _ in stream:
            break
        await stream.aclose()

        async def one(generation: Generation) -> list[int]:
            return [token async for chunk in endpoint.stream(generation) for token in chunk.tokens]

        warm = Generation(tuple(PROMPTS[1]), 30, temperature=0.9, seed=5, ignore_eos=True)
        return await asyncio.gather(one(warm), one(warm), one(Generation((5, 6), 5000)), return_exceptions=True)

    with launched(tiny, {"tp": 2, "dp": 2}, tmp_path / "log") as endpoint:
        first, second, refused = asyncio.run(asyncio.wait_for(use(endpoint), 60))
        assert len(first) == 30 and first == second  # on two replicas
        assert isinstance(refused, RequestError) and "kv_tokens" in str(refused)
        assert len(endpoint.score([PROMPTS[0]], 1)) == 1  # which needs an idle engine: the aborted request is gone
        endpoint.reset()
        assert endpoint.counters()["communication_bytes"] == 0
        with pytest.raises(EngineError, match="2 to 1024 tokens"):
            endpoint.score([[5]], 1)


@pytest.mark.parametrize(
    ("number", "status", "word"),
    [
        (signal.SIGKILL, Status.OOM, "killed rank 1 of 2"),
        (signal.SIGSEGV, Status.CRASH, "rank 1 of 2 died of signal 11"),
    ],
)
def test_a_dead_rank_ends_the_trial_by_name_within_seconds(
    tiny: Path, tmp_path: Path, number: int, status: Status, word: str
) -> None:
    async def use(endpoint: Any) -> float:
        stream = endpoint.stream(Generation(tuple(PROMPTS[0]), 900, ignore_eos=True))
        began = 0.0
        async for _ in stream:
            if not began:
                front, _, second = session(endpoint._child.pid)
                assert front == endpoint._child.pid
                os.kill(second, number)
                began = time.monotonic()
        return began

    with launched(tiny, {"tp": 2}, tmp_path / "log") as endpoint:
        began = time.monotonic()
        with pytest.raises(EngineError, match=word) as caught:
            asyncio.run(asyncio.wait_for(use(endpoint), 30))
        assert caught.value.status is status and time.monotonic() - began < 10
        assert not [pid for pid in session(endpoint._child.pid) if pid != endpoint._child.pid]


def test_ranks_do_not_outlive_their_front(tiny: Path, tmp_path: Path) -> None:
    with launched(tiny, {"pp": 2}, tmp_path / "log") as endpoint:
        front, *ranks = session(endpoint._child.pid)
        assert len(ranks) == 2
        os.kill(front, signal.SIGKILL)
        with pytest.raises(EngineError, match="memory"):
            endpoint.counters()
        assert session(front) == []


def test_a_rank_that_cannot_load_says_which_and_why(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in tiny.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tiny / "model.safetensors")
    del tensors["lm_head.weight"]  # only the last stage reads it
    save_file(tensors, folder / "model.safetensors")
    with (
        pytest.raises(EngineError, match=r"rank 1 of 2: .*lm_head\.weight is missing") as caught,
        NativeRuntime(folder).launch(complete({"pp": 2}), tmp_path / "log"),
    ):
        pass
    assert (caught.value.status, caught.value.phase) == (Status.UNSUPPORTED, "launch")


def test_heads_that_do_not_divide_are_refused(tiny: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(EngineError, match="attention heads do not divide evenly over tp=8") as caught,
        NativeRuntime(tiny).launch(Config({**complete({}), "tp": 8}), tmp_path / "log"),
    ):
        pass
    assert caught.value.status is Status.UNSUPPORTED


def test_llm_runs_a_layout_as_it_runs_one_process(tiny: Path) -> None:
    with LLM(tiny, complete({})) as one, LLM(tiny, complete({"tp": 2, "threads": 1})) as two:
        assert isinstance(two.engine, RemoteEngine) and not isinstance(one.engine, RemoteEngine)
        pid = two.engine._child.pid
        wanted = [answer.tokens for answer in one.generate(PROMPTS, 8, ignore_eos=True)]
        assert [answer.tokens for answer in two.generate(PROMPTS, 8, ignore_eos=True)] == wanted
        assert next(iter(two.stream(PROMPTS[0], Sampling(100, ignore_eos=True)))).tokens
        assert np.abs(two.score(PROMPTS)[0].logprobs - one.score(PROMPTS)[0].logprobs).max() <= 1e-5
        assert two.effective()["tp"] == 2 and two.counters()["communication_bytes"] > 0
        for wrong in ([], [96], [5] * 1024):
            with pytest.raises(ValueError):
                two.generate([wrong], 8)
        os.kill(session(pid)[1], signal.SIGKILL)
        with pytest.raises(EngineError, match="killed rank 0 of 2"):
            two.generate(PROMPTS, 8)
    assert session(pid) == []
