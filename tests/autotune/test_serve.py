"""The server's answers: completions whole and streamed, bad requests, clients that leave, an engine that fails."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from contracts import serving
from contracts.serving import wait_until

Start = Callable[..., Any]


@pytest.fixture
def running(tmp_path: Path) -> Start:
    return partial(serving.start, tmp_path)


def test_a_completion_with_its_usage(running: Start) -> None:
    with running() as server:
        status, answer = server.complete(model="tiny", prompt="abc", max_tokens=7, return_token_ids=True)
        assert status == 200
        assert answer["object"] == "text_completion" and answer["model"] == "tiny"
        assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 7, "total_tokens": 10}
        assert answer["choices"] == [
            {
                "index": 0,
                "text": "abcabca",
                "logprobs": None,
                "finish_reason": "length",
                "token_ids": list(b"abcabca"),
            }
        ]


def test_prompts_as_texts_ids_and_lists(running: Start) -> None:
    with running() as server:
        for prompt in ("ab", [97, 98], ["ab"], [[97, 98]]):
            assert server.complete(prompt=prompt, max_tokens=3)[1]["choices"][0]["text"] == "aba"
        _, answer = server.complete(prompt=["ab", "xyz", "€"], max_tokens=3)
        assert [choice["text"] for choice in answer["choices"]] == ["aba", "xyz", "€"]
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        assert answer["usage"] == {"prompt_tokens": 8, "completion_tokens": 9, "total_tokens": 17}


@pytest.mark.parametrize("extra", [{}, {"stop": "ca"}, {"stop": ["zz", "bcab"]}, {"stop": "b"}])
def test_a_stream_says_what_a_whole_answer_says(running: Start, extra: dict[str, Any]) -> None:
    with running() as server:
        body = {"prompt": ["abc", "€uro"], "max_tokens": 20, "return_token_ids": True, **extra}
        _, whole = server.complete(**body)
        events = server.events(**body, stream_options={"include_usage": True})
        assert events[-1]["choices"] == [] and events[-1]["usage"] == whole["usage"]
        for choice in whole["choices"]:
            mine = [e["choices"][0] for e in events[:-1] if e["choices"][0]["index"] == choice["index"]]
            assert "".join(part["text"] for part in mine) == choice["text"]
            assert [i for part in mine for i in part["token_ids"]] == choice["token_ids"]
            assert [part["finish_reason"] for part in mine][-1] == choice["finish_reason"]
            assert not any(part["finish_reason"] for part in mine[:-1])


def test_a_stop_string_ends_the_text_before_it(running: Start) -> None:
    with running(seconds=0.002) as server:
        _, answer = server.complete(prompt="abc", max_tokens=90, stop=["ca"])
        assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("ab", "stop")
        wait_until(lambda: not server.llm.engine.live)


def test_sampling_reaches_the_engine(running: Start) -> None:
    with running() as server:
        server.complete(prompt=["a", "b"], max_tokens=1, temperature=0.5, seed=7, ignore_eos=True)
        assert server.llm.engine.added == [((97,), 1, 0.5, 7, True), ((98,), 1, 0.5, 8, True)]
        server.complete(prompt="a", max_tokens=1)
        assert server.llm.engine.added[-1][2] == 1.0


def test_logprobs_are_those_of_the_answer(running: Start) -> None:
    with running() as server:
        _, answer = server.complete(prompt="ab", max_tokens=3, logprobs=2)
        found = answer["choices"][0]["logprobs"]
        assert found["tokens"] == ["a", "b", "a"] and found["text_offset"] == [0, 1, 2]
        assert found["token_logprobs"] == [-97.0, -98.0, -97.0]
        assert found["top_logprobs"] == [{"A": 0.0, "B": -1.0}] * 3


def test_logprobs_wait_for_an_idle_engine_and_starve_nobody(running: Start) -> None:
    with running(seconds=0.005, connections=64) as server, ThreadPoolExecutor(24) as pool:
        jobs = [
            pool.submit(server.complete, prompt="abc", max_tokens=5 + n, **({"logprobs": 1} if n % 3 == 0 else {}))
            for n in range(24)
        ]
        answers = [job.result() for job in jobs]
        assert [status for status, _ in answers] == [200] * 24
        assert [len(a["choices"][0]["text"]) for _, a in answers] == [5 + n for n in range(24)]
        assert all((a["choices"][0]["logprobs"] is not None) == (n % 3 == 0) for n, (_, a) in enumerate(answers))


def test_many_at_once_each_get_their_own(running: Start) -> None:
    with running(seconds=0.001, connections=64) as server, ThreadPoolExecutor(24) as pool:
        prompts = [f"<{n}>" for n in range(48)]
        answers = list(pool.map(lambda prompt: server.complete(prompt=prompt, max_tokens=12), prompts))
        assert [a["choices"][0]["text"] for _, a in answers] == [(prompt * 5)[:12] for prompt in prompts]


def test_models_config_health_and_metrics(running: Start) -> None:
    with running() as server:
        assert server.ask("GET", "/v1/models")[1]["data"][0]["id"] == "tiny"
        config = server.ask("GET", "/v1/config")[1]
        assert config["effective"] == server.llm.effective() and config["config"] == server.llm.config
        assert server.ask("GET", "/health?x=1")[:2] == (200, {"status": "ok"})
        server.complete(prompt="abc", max_tokens=5)
        status, text, headers = server.ask("GET", "/metrics")
        assert status == 200 and headers["Content-Type"].startswith("text/plain; version=0.0.4")
        lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        assert lines["autotune_requests_total"] == "1" and lines["autotune_generated_tokens_total"] == "5"
        assert lines['autotune_requests_finished_total{finish="length"}'] == "1"
        assert lines["autotune_requests_running"] == lines["autotune_requests_waiting"] == "0"
        assert lines["autotune_engine_prefix_hits"] == "3" and lines["autotune_engine_kv_usage"] == "0.5"


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "prompt"),
        ({"prompt": None}, 400, "prompt"),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": [[]]}, 400, "prompt"),
        ({"prompt": {"a": 1}}, 400, "prompt"),
        ({"prompt": ["a", 1]}, 400, "prompt"),
        ({"prompt": [256]}, 400, "prompt"),
        ({"prompt": [-1]}, 400, "prompt"),
        ({"prompt": [True]}, 400, "prompt"),
        ({"prompt": ["a"] * 65}, 400, "prompt"),
        ({"prompt": "\ud800"}, 400, "prompt"),
        ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
        ({"prompt": "a", "max_tokens": 1.5}, 400, "max_tokens"),
        ({"prompt": "a", "max_tokens": 100}, 400, "max_tokens"),
        ({"prompt": "a", "temperature": -1}, 400, "temperature"),
        ({"prompt": "a", "temperature": float("nan")}, 400, "temperature"),
        ({"prompt": "a", "seed": "x"}, 400, "seed"),
        ({"prompt": "a", "stream": 1}, 400, "stream"),
        ({"prompt": "a", "stop": [""]}, 400, "stop"),
        ({"prompt": "a", "n": 2}, 400, "n"),
        ({"prompt": "a", "max_token": 2}, 400, "max_token"),
        ({"prompt": "a", "logprobs": 1, "stream": True}, 400, "logprobs"),
        ({"prompt": [254]}, 400, None),
        ({"prompt": "a", "model": "other"}, 404, "model"),
        (b"{", 400, None),
        (b"[]", 400, None),
        (b"[" * 10_000, 400, None),
    ],
)
def test_a_bad_request_names_what_is_wrong(running: Start, body: Any, status: int, param: str | None) -> None:
    with running() as server:
        found, answer, _ = server.ask("POST", "/v1/completions", body)
        assert found == status
        assert answer["error"]["param"] == param and answer["error"]["message"]
        assert answer["error"]["type"] == "invalid_request_error"
        assert server.complete(prompt="ab", max_tokens=2)[0] == 200


def test_wrong_paths_methods_and_types(running: Start) -> None:
    with running() as server:
        assert server.ask("GET", "/v1/chat/completions")[0] == 404
        status, _, headers = server.ask("GET", "/v1/completions")
        assert (status, headers["Allow"]) == (405, "POST")
        assert server.ask("POST", "/health", {})[0] == 405
        assert server.ask("POST", "/v1/completions", {"prompt": "a"}, **{"Content-Type": "text/plain"})[0] == 415
        assert server.ask("POST", "/v1/completions", b" " * 20_001)[0] == 413


def test_without_a_tokenizer_ids_still_work(running: Start) -> None:
    with running(tokenizer=False) as server:
        assert server.complete(prompt="a")[0] == 400
        assert server.complete(prompt=[1, 2], stop="a")[0] == 400
        _, answer = server.complete(prompt=[1, 2], max_tokens=3)
        assert answer["choices"][0]["token_ids"] == [1, 2, 1] and answer["choices"][0]["text"] == ""
        events = server.events(prompt=[1, 2], max_tokens=3)
        assert [i for event in events for i in event["choices"][0]["token_ids"]] == [1, 2, 1]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_aborts_its_request(running: Start, stream: bool) -> None:
    with running(seconds=0.02) as server:
        body = json.dumps({"prompt": "abc", "max_tokens": 90, "stream": stream}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", server.port)) as sock:
            sock.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            wait_until(lambda: bool(server.llm.engine.live))
        wait_until(lambda: not server.llm.engine.live)
        assert len(server.llm.engine.aborted) == 1
        assert server.service.driver.counts["finish_abort"] == 1


def test_a_full_queue_sends_away(running: Start) -> None:
    with running(seconds=0.3, queue=2) as server, ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(server.complete, prompt="a", max_tokens=2) for _ in range(2)]
        wait_until(lambda: server.service.driver.waiting == 2)
        status, answer, headers = server.ask("POST", "/v1/completions", {"prompt": "a"})
        assert (status, answer["error"]["type"], headers["Retry-After"]) == (503, "server_error", "1")
        assert [job.result()[0] for job in waiting] == [200, 200]


def test_a_failed_engine_ends_every_request_and_health(running: Start) -> None:
    with running(seconds=0.05) as server, ThreadPoolExecutor(2) as pool:
        slow = pool.submit(server.complete, prompt="a", max_tokens=90)
        wait_until(lambda: bool(server.llm.engine.live))
        status, answer = server.complete(prompt=[255])
        assert status == 503 and "device on fire" in answer["error"]["message"]
        assert slow.result()[0] == 503
        assert server.ask("GET", "/health")[0] == 503
        assert server.complete(prompt="a")[0] == 503
        assert server.ask("GET", "/metrics")[0] == 200


def test_an_engine_that_fails_in_a_stream_sends_no_done(running: Start) -> None:
    with running(seconds=0.02) as server, ThreadPoolExecutor(1) as pool:
        stream = pool.submit(server.ask, "POST", "/v1/completions", {"prompt": "a", "max_tokens": 90, "stream": True})
        wait_until(lambda: server.service.driver.running == 1)
        server.complete(prompt=[255])
        with pytest.raises(Exception, match="IncompleteRead") as caught:
            stream.result()
        text = caught.value.partial.decode()  # type: ignore[attr-defined]
        assert "device on fire" in text and "[DONE]" not in text


def test_draining_ends_what_runs_and_takes_no_more(running: Start) -> None:
    with running(seconds=0.02) as server, ThreadPoolExecutor(1) as pool:
        job = pool.submit(server.complete, prompt="abc", max_tokens=30)
        wait_until(lambda: server.service.driver.running == 1)
        idle = socket.create_connection(("127.0.0.1", server.port))
        server.stop()
        wait_until(lambda: server.service.draining)
        with pytest.raises(OSError):
            server.complete(prompt="a")
        assert job.result()[1]["usage"]["completion_tokens"] == 30
        idle.close()


def test_draining_has_an_end(running: Start) -> None:
    with running(seconds=0.05, drain=0.1) as server:
        errors: list[Exception] = []

        def client() -> None:
            try:
                server.complete(prompt="abc", max_tokens=95)
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=client)
        thread.start()
        wait_until(lambda: server.service.driver.running == 1)
        server.stop()
        thread.join(5)
        assert len(errors) == 1
