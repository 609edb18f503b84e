"""The engine's process when things go wrong: killed, hung, its tuner gone. Nothing is left, every end has a reason."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune.outcome import EngineError, Status
from autotune.runtimes.base import Generation, RequestError
from autotune.runtimes.native import NativeRuntime
from autotune.runtimes.native import runtime as native
from autotune.setting import reference_model
from search_spaces import load

CONFIG = load("native").narrow({"cores": 2, "layers": 4, "experts": 8}).complete({"max_seqs": 4, "kv_tokens": 1024})
PROMPT = tuple(range(40, 90))
TUNER = """
import sys, time
from pathlib import Path
from autotune.runtimes.native import NativeRuntime
from autotune.runtimes.native.zygote import zygote
from autotune.setting import reference_model
from search_spaces import load
config = load("native").narrow({"cores": 2}).default()
with NativeRuntime(reference_model()).launch(config, Path(sys.argv[1])) as endpoint:
    print(endpoint._child.pid, zygote()._process.pid, flush=True)
    time.sleep(60)
"""


def alive(pid: int) -> bool:
    """Whether ``pid`` runs; a zombie that waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def gone(*pids: int, seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(map(alive, pids))


@pytest.fixture(scope="module")
def runtime() -> NativeRuntime:
    return NativeRuntime(reference_model())


@pytest.fixture
def endpoint(runtime: NativeRuntime, tmp_path: Path) -> Iterator[Any]:
    with runtime.launch(CONFIG, tmp_path / "launch.log") as endpoint:
        yield endpoint
    assert gone(endpoint._child.pid)


async def two_streams(endpoint: Any, after_first: Callable[[], None]) -> list[Any]:
    """Two long streams; ``after_first`` runs when both are under way. What each ended with."""
    started = [asyncio.Event(), asyncio.Event()]

    async def one(index: int) -> int:
        count = 0
        async for chunk in endpoint.stream(Generation(PROMPT, 900)):
            count += len(chunk.tokens)
            started[index].set()
        return count

    tasks = [asyncio.create_task(one(index)) for index in range(2)]
    await asyncio.gather(*(event.wait() for event in started))
    after_first()
    return await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize(
    ("number", "status", "word"), [(signal.SIGSEGV, Status.CRASH, "signal 11"), (signal.SIGKILL, Status.OOM, "memory")]
)
def test_a_death_ends_every_stream_with_its_reason(endpoint: Any, number: int, status: Status, word: str) -> None:
    found = asyncio.run(asyncio.wait_for(two_streams(endpoint, lambda: os.kill(endpoint._child.pid, number)), 30))
    assert [type(end) for end in found] == [EngineError, EngineError]
    assert {end.status for end in found} == {status} and word in found[0].reason
    with pytest.raises(EngineError, match=word):
        endpoint.counters()


def test_a_failing_call_is_a_crash_that_names_the_exception(endpoint: Any) -> None:
    with pytest.raises(EngineError, match="AttributeError") as caught:
        endpoint._call("no_such_method")
    assert caught.value.status is Status.CRASH
    assert "Traceback" in caught.value.tail


def test_an_engine_that_hangs_is_killed(endpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "CALL_SECONDS", 0.3)
    os.kill(endpoint._child.pid, signal.SIGSTOP)
    with pytest.raises(EngineError, match="no answer in time") as caught:
        endpoint.counters()
    assert caught.value.status is Status.TIMEOUT
    assert gone(endpoint._child.pid)


def test_a_launch_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    with (
        pytest.raises(EngineError, match="no answer in time") as caught,
        NativeRuntime(reference_model(), launch_seconds=0.0).launch(CONFIG, tmp_path / "a.log"),
    ):
        pass
    assert (caught.value.status, caught.value.phase) == (Status.TIMEOUT, "launch")


def test_a_checkpoint_that_cannot_be_loaded_says_why(tmp_path: Path) -> None:
    with (
        pytest.raises(EngineError, match=r"config\.json") as caught,
        NativeRuntime(tmp_path / "nothing").launch(CONFIG, tmp_path / "a.log"),
    ):
        pass
    assert (caught.value.status, caught.value.phase) == (Status.UNSUPPORTED, "launch")


def test_a_refused_request_leaves_the_others_alone(endpoint: Any) -> None:
    async def both() -> list[Any]:
        async def one(generation: Generation) -> int:
            return sum([len(chunk.tokens) async for chunk in endpoint.stream(generation)])

        jobs = (one(Generation(PROMPT, 20)), one(Generation(PROMPT, 5000)))
        return await asyncio.gather(*jobs, return_exceptions=True)

    good, bad = asyncio.run(asyncio.wait_for(both(), 30))
    assert good == 20
    assert isinstance(bad, RequestError) and "kv_tokens" in str(bad)


def test_nothing_outlives_a_killed_tuner(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", TUNER, str(tmp_path / "a.log")],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])},
    ) as tuner:
        assert tuner.stdout is not None
        pids = [int(word) for word in tuner.stdout.readline().split()]
        assert len(pids) == 2 and all(map(alive, pids))
        tuner.kill()
    assert gone(*pids)
