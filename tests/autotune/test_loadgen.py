"""The load generator on scripted endpoints: order, concurrency, arrivals, failures, and that nothing can hang it."""

from __future__ import annotations

import asyncio
import gc

import pytest

from autotune.loadgen import CUT, SKIPPED, TimeLimit, drive
from autotune.outcome import EngineError, Status
from autotune.runtimes.base import Chunk, RequestError
from autotune.runtimes.fake import VirtualLoop
from autotune.workload import Conversation, Turn, Workload

WORKLOAD = Workload("x", "X.", "chat", 4, (1, 9), (1, 9), concurrency=2)


def talk(number, turns=1, arrival=0.0):
    return Conversation(number, arrival, tuple(Turn((number, turn, 9), 3) for turn in range(turns)))


class Scripted:
    """Answers token 100 + step, one a second of virtual time; ``act(prompt, step)`` may misbehave before each."""

    def __init__(self, act=None, together=1):
        self.act, self.together = act, together
        self.prompts, self.aborted, self.active, self.most = [], [], 0, 0

    def event_loop(self):
        return VirtualLoop()

    async def stream(self, generation):
        self.prompts.append(generation.prompt)
        self.active += 1
        self.most = max(self.most, self.active)
        try:
            for step in range(0, generation.max_tokens, self.together):
                await asyncio.sleep(1.0)
                if self.act is not None:
                    await self.act(generation.prompt, step)
                count = min(self.together, generation.max_tokens - step)
                last = step + count == generation.max_tokens
                tokens = tuple(100 + step + i for i in range(count))
                yield Chunk(tokens, asyncio.get_running_loop().time(), "length" if last else None)
        except (GeneratorExit, asyncio.CancelledError):
            self.aborted.append(generation.prompt)
            raise
        finally:
            self.active -= 1


def go(endpoint, conversations, deadline=1000.0, workload=WORKLOAD):
    return drive(endpoint, workload, conversations, deadline)


def test_times_are_seconds_since_the_run_began():
    run = go(Scripted(), [talk(0, 2)])
    assert [(t.turn, t.sent, t.token_times) for t in run.timelines] == [(0, 0.0, (1, 2, 3)), (1, 3.0, (4, 5, 6))]
    assert run.wall_seconds == 6.0
    assert run.cpu_seconds >= 0


def test_a_later_turn_sends_everything_before_it():
    endpoint = Scripted()
    run = go(endpoint, [talk(4, 3)])
    answer = (100, 101, 102)
    first = (4, 0, 9)
    assert endpoint.prompts == [first, first + answer + (4, 1, 9), first + answer + (4, 1, 9) + answer + (4, 2, 9)]
    assert [t.prompt_tokens for t in run.timelines] == [3, 9, 15]


def test_several_tokens_of_one_step_share_its_time():
    (timeline,) = go(Scripted(together=2), [talk(0)]).timelines
    assert timeline.token_times == (1, 1, 2) and timeline.output_tokens == 3


@pytest.mark.parametrize("concurrency", [1, 2, 3, 8])
def test_never_more_conversations_at_once_than_allowed(concurrency):
    endpoint = Scripted()
    workload = Workload("x", "X.", "chat", 6, (1, 9), (1, 9), concurrency=concurrency)
    run = go(endpoint, [talk(i, 2) for i in range(6)], workload=workload)
    assert endpoint.most == min(concurrency, 6)
    assert run.wall_seconds == pytest.approx(6 * -(-6 // concurrency))
    assert [(t.conversation, t.turn) for t in run.timelines] == [(i, j) for i in range(6) for j in range(2)]


def test_open_loop_sends_at_the_arrivals_however_many_are_under_way():
    endpoint = Scripted()
    workload = Workload("x", "X.", "chat", 3, (1, 9), (1, 9), rate=1.0)
    run = go(endpoint, [talk(i, arrival=0.25 * (i + 1)) for i in range(3)], workload=workload)
    assert [t.sent for t in run.timelines] == [0.25, 0.5, 0.75]
    assert endpoint.most == 3


@pytest.mark.parametrize("error", [RequestError("HTTP 500"), ConnectionResetError("reset by peer")])
def test_a_failed_request_is_recorded_and_its_later_turns_are_not_sent(error):
    async def fail(prompt, step):
        if prompt[0] == 1 and step == 1:
            raise error

    endpoint = Scripted(fail)
    run = go(endpoint, [talk(0, 2), talk(1, 3)])
    assert [t.error for t in run.timelines] == ["", "", str(error), SKIPPED, SKIPPED]
    assert run.timelines[2].token_times == (1.0,)
    assert len(endpoint.prompts) == 3


def test_a_stream_that_ends_early_or_empty_is_a_failed_request():
    class Short(Scripted):
        async def stream(self, generation):
            if generation.prompt[0] == 1:
                yield Chunk((5,), asyncio.get_running_loop().time() + 1.0)

    run = go(Short(), [talk(0), talk(1)])
    assert [t.fault for t in run.timelines] == [
        "the stream ended without a token",
        "the stream broke off before its end",
    ]


def test_an_engine_failure_ends_the_run_at_once_and_aborts_the_rest():
    async def fail(prompt, step):
        if prompt[0] == 1 and step == 1:
            raise EngineError(Status.OOM, "measure", "out of memory")

    endpoint = Scripted(fail)
    with pytest.raises(EngineError) as caught:
        go(endpoint, [talk(i, 5) for i in range(4)])
    assert caught.value.status is Status.OOM
    assert endpoint.active == 0 and endpoint.aborted == [(0, 0, 9)]
    assert {prompt[0] for prompt in endpoint.prompts} == {0, 1}


def test_a_fault_of_our_own_is_not_swallowed():
    async def fail(prompt, step):
        raise TypeError("a bug")

    with pytest.raises(TypeError, match="a bug"):
        go(Scripted(fail), [talk(0)])


def test_the_time_limit_cancels_and_says_what_was_unmet():
    async def hang(prompt, step):
        if prompt[0] == 1 and step == 2:
            await asyncio.get_running_loop().create_future()

    endpoint = Scripted(hang)
    with pytest.raises(TimeLimit) as caught:
        go(endpoint, [talk(0), talk(1, 2)], deadline=50.0)
    error = caught.value
    assert (error.status, error.phase) == (Status.TIMEOUT, "measure")
    assert "50 s ended with 2 of 3 requests unfinished" in error.reason
    assert [t.error for t in error.run.timelines] == ["", CUT, CUT]
    assert [len(t.token_times) for t in error.run.timelines] == [3, 2, 0]
    assert error.run.wall_seconds == pytest.approx(50.0)
    assert endpoint.active == 0 and endpoint.aborted == [(1, 0, 9)]


def test_conversations_that_never_got_their_turn_are_unmet_too():
    with pytest.raises(TimeLimit, match="7 of 8"):
        go(Scripted(), [talk(i) for i in range(8)], 4.0, Workload("x", "X.", "chat", 8, (1, 9), (1, 9), concurrency=1))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_stream_that_ignores_its_cancellation_cannot_hang_the_run():
    class Deaf(Scripted):
        async def stream(self, generation):
            while True:
                try:
                    await asyncio.sleep(1e6)
                except (asyncio.CancelledError, GeneratorExit):
                    continue
                yield Chunk((1,), 0.0)

    with pytest.raises(TimeLimit):
        go(Deaf(), [talk(0)], deadline=5.0)
    gc.collect()  # the task left behind complains here, where it is expected


def test_it_runs_in_real_time_on_an_endpoint_without_a_clock_of_its_own():
    class Real:
        async def stream(self, generation):
            for step in range(generation.max_tokens):
                await asyncio.sleep(0)
                yield Chunk((step,), asyncio.get_running_loop().time(), "length" if step == 2 else None)

    run = go(Real(), [talk(i, 2) for i in range(4)])
    assert len(run.timelines) == 8 and not any(t.fault.startswith("a token came") for t in run.timelines)
    assert 0 < run.wall_seconds < 60


def test_nothing_to_send_is_an_empty_run():
    assert go(Scripted(), []).timelines == ()


def test_the_package_function_of_a_like_name_stays_a_function():
    """A module `autotune.load` would replace `autotune.load(path)`, the way to run an export from Python."""
    import autotune

    assert callable(autotune.load)
