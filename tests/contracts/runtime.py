"""What every engine must do. A subclass supplies ``runtime``, a ``config`` it runs, and a ``bad_config`` it cannot."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest

from autotune.loadgen import event_loop
from autotune.outcome import EngineError, Status
from autotune.runtimes.base import Chunk, Endpoint, Generation, Runtime
from search_spaces import Config

PROMPT = tuple(range(32, 80))
STEPS = 6


def run(endpoint: Endpoint, work: Coroutine[Any, Any, Any]) -> Any:
    """Run ``work`` in the endpoint's own kind of loop, never for more than a minute."""
    loop = event_loop(endpoint)
    try:
        return loop.run_until_complete(asyncio.wait_for(work, 60))
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


async def collect(endpoint: Endpoint, generation: Generation) -> list[Chunk]:
    return [chunk async for chunk in endpoint.stream(generation)]


def tokens(chunks: list[Chunk]) -> tuple[int, ...]:
    return tuple(token for chunk in chunks for token in chunk.tokens)


class RuntimeContract:
    """Subclass it as ``TestX(RuntimeContract)`` with fixtures ``runtime``, ``config`` and ``bad_config``."""

    @pytest.fixture
    def endpoint(self, runtime: Runtime, config: Config, tmp_path):
        with runtime.launch(config, tmp_path / "logs" / "launch.log") as endpoint:
            yield endpoint

    def test_it_says_what_it_is(self, runtime: Runtime, config: Config) -> None:
        assert runtime.name
        assert runtime.version() and all(isinstance(v, str) for v in runtime.version().values())
        assert runtime.version() == runtime.version()
        assert isinstance(runtime.capabilities()["refused"], dict)
        command = runtime.command(config)
        assert command and all(isinstance(part, str) for part in command)

    def test_a_stream_gives_the_tokens_asked_for_in_order_of_time(self, endpoint: Endpoint) -> None:
        chunks = run(endpoint, collect(endpoint, Generation(PROMPT, STEPS)))
        assert len(tokens(chunks)) == STEPS
        assert all(isinstance(token, int) and token >= 0 for token in tokens(chunks))
        assert [c.finish for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
        times = [c.at for c in chunks]
        assert times == sorted(times)

    def test_greedy_is_deterministic_alone_and_in_company(self, endpoint: Endpoint) -> None:
        async def both() -> list[list[Chunk]]:
            prompts = (PROMPT, PROMPT[::-1])
            return await asyncio.gather(*(collect(endpoint, Generation(p, STEPS)) for p in prompts))

        alone = run(endpoint, collect(endpoint, Generation(PROMPT, STEPS)))
        again = run(endpoint, collect(endpoint, Generation(PROMPT, STEPS)))
        company = run(endpoint, both())
        assert tokens(alone) == tokens(again) == tokens(company[0])

    def test_closing_a_stream_aborts_it_and_the_next_one_works(self, endpoint: Endpoint) -> None:
        async def break_off() -> int:
            async with aclosing(endpoint.stream(Generation(PROMPT, 400))) as chunks:
                async for chunk in chunks:
                    return len(chunk.tokens)
            return 0

        assert run(endpoint, break_off()) >= 1
        endpoint.reset()
        assert len(tokens(run(endpoint, collect(endpoint, Generation(PROMPT, STEPS))))) == STEPS

    def test_scores_are_log_probabilities_in_order(self, endpoint: Endpoint) -> None:
        sequences = (PROMPT, PROMPT[:9])
        scores = endpoint.score(sequences, 16)
        for sequence, score in zip(sequences, scores, strict=True):
            assert score.logprobs.shape == (len(sequence) - 1,)
            assert score.ids.shape == score.top.shape == (len(sequence) - 1, 16)
            assert (score.logprobs <= 1e-5).all()
            assert (np.diff(score.top, axis=1) <= 0).all()
            assert (np.exp(score.top.astype(np.float64)).sum(1) <= 1 + 1e-4).all()
            for i, token in enumerate(sequence[1:]):
                place = np.flatnonzero(score.ids[i] == token)
                assert not place.size or score.top[i, place[0]] == pytest.approx(score.logprobs[i], abs=1e-5)

    def test_the_whole_vocabulary_is_a_distribution(self, endpoint: Endpoint) -> None:
        (score,) = endpoint.score([PROMPT[:5]], 10**6)
        assert np.exp(score.top.astype(np.float64)).sum(1) == pytest.approx(np.ones(4), abs=1e-3)
        assert all(len(set(row)) == len(row) for row in score.ids.tolist())

    def test_it_runs_what_was_asked(self, endpoint: Endpoint, config: Config) -> None:
        effective = endpoint.effective()
        assert {k: effective[k] for k in config if k in effective} == {
            k: v for k, v in config.items() if k in effective
        }
        assert any(name in effective for name in config)

    def test_counters_are_numbers_and_a_reset_keeps_it_alive(self, endpoint: Endpoint) -> None:
        first = run(endpoint, collect(endpoint, Generation(PROMPT, STEPS)))
        assert all(np.isfinite(float(value)) for value in endpoint.counters().values())
        endpoint.reset()
        assert tokens(run(endpoint, collect(endpoint, Generation(PROMPT, STEPS)))) == tokens(first)

    def test_launches_follow_one_another_and_agree(self, runtime: Runtime, config: Config, tmp_path) -> None:
        answers = []
        for number in range(2):
            with runtime.launch(config, tmp_path / f"{number}.log") as endpoint:
                answers.append(tokens(run(endpoint, collect(endpoint, Generation(PROMPT, STEPS)))))
            assert (tmp_path / f"{number}.log").is_file()
        assert answers[0] == answers[1]

    def test_an_exception_inside_passes_through_and_the_next_launch_works(
        self, runtime: Runtime, config: Config, tmp_path
    ) -> None:
        with pytest.raises(KeyError, match="mine"), runtime.launch(config, tmp_path / "a.log"):
            raise KeyError("mine")
        with runtime.launch(config, tmp_path / "b.log") as endpoint:
            assert run(endpoint, collect(endpoint, Generation(PROMPT, 1)))

    def test_a_bad_launch_is_a_typed_failure(self, runtime: Runtime, bad_config: Config, tmp_path) -> None:
        with pytest.raises(EngineError) as caught, runtime.launch(bad_config, tmp_path / "bad.log"):
            pass
        assert caught.value.phase == "launch"
        assert caught.value.status in (Status.UNSUPPORTED, Status.OOM, Status.CRASH, Status.TIMEOUT)
        assert caught.value.reason
