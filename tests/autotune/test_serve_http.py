"""The HTTP layer by raw bytes: what is malformed, too large or too slow is refused, and the server stays up."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from contracts import serving
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autotune.runtimes.native.serve_http import HttpError, body_length, parse_head

Start = Callable[..., Any]
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest.fixture
def running(tmp_path: Path) -> Start:
    return partial(serving.start, tmp_path)


def statuses(answer: bytes) -> list[int]:
    return [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]]


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\r\n\r\n", 400),
        (b"GET\r\n\r\n", 400),
        (b"get /health HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET  /health HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET http://x/health HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\n\r\n", 400),
        (b"GET /health HTTP/2.0\r\nHost: x\r\n\r\n", 505),
        (b"GET /he\x00alth HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (HEALTH + b"Host: y\r\n\r\n", 400),
        (HEALTH + b"A : b\r\n\r\n", 400),
        (HEALTH + b"A: b\r\n folded\r\n\r\n", 400),
        (HEALTH + b"A: b\nB: c\r\n\r\n", 400),
        (HEALTH + b"A: " + b"b" * 3000 + b"\r\n\r\n", 431),
        (HEALTH + b"A: b\r\n" * 101 + b"\r\n", 431),
        (b"x" * 5000, 431),
        (POST + b"\r\n", 411),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 411),
        (POST + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}", 411),
        (POST + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}", 400),
        (POST + b"Content-Length: +2\r\n\r\n{}", 400),
        (POST + b"Content-Length: -1\r\n\r\n", 400),
        (POST + b"Content-Length: 99999999999\r\n\r\n", 413),
        (POST + b"Content-Length: 30000\r\n\r\n" + b"x" * 30_000, 413),
        (POST + b"Content-Length: 5\r\n\r\n{}", 408),
        (HEALTH, 408),
    ],
)
def test_what_is_wrong_is_refused_and_the_connection_closed(running: Start, data: bytes, status: int) -> None:
    with running() as server:
        answer = server.raw(data)
        assert statuses(answer) == [status]
        head, _, body = answer.partition(b"\r\n\r\n")
        assert b"Connection: close" in head
        assert json.loads(body)["error"]["message"]
        assert server.ask("GET", "/health")[0] == 200


def test_one_connection_answers_one_request_after_another(running: Start) -> None:
    with running() as server:
        body = b'{"prompt": "ab", "max_tokens": 2}'
        post = POST + b"Content-Length: %d\r\n\r\n" % len(body) + body
        answer = server.raw(HEALTH + b"\r\n" + post + HEALTH + b"Connection: close\r\n\r\n")
        assert statuses(answer) == [200, 200, 200]
        assert answer.count(b"keep-alive") == 2 and answer.endswith(b'{"status": "ok"}')


def test_http_1_0_streams_until_the_connection_closes(running: Start) -> None:
    with running() as server:
        body = b'{"prompt": "ab", "max_tokens": 2, "stream": true}'
        answer = server.raw(POST.replace(b"1.1", b"1.0") + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        head, _, text = answer.partition(b"\r\n\r\n")
        assert b"chunked" not in head and text.endswith(b"data: [DONE]\n\n") and text.startswith(b"data: {")


def test_expect_continue_is_answered_first(running: Start) -> None:
    with running() as server, socket.create_connection(("127.0.0.1", server.port), timeout=5) as sock:
        body = b'{"prompt": "ab", "max_tokens": 2}'
        sock.sendall(POST + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body))
        assert sock.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(body)
        assert sock.recv(100).startswith(b"HTTP/1.1 200 OK")


def test_too_many_connections_are_sent_away(running: Start) -> None:
    with running() as server:
        others = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(8)]
        assert statuses(server.raw(HEALTH + b"\r\n")) == [503]
        for other in others:
            other.close()
        serving.wait_until(lambda: server.ask("GET", "/health")[0] == 200)


def test_a_client_that_never_reads_is_dropped(running: Start) -> None:
    with running(write_seconds=0.2) as server, socket.socket() as sock:
        sock.settimeout(5)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.port))
        body = b'{"prompt": "ab", "max_tokens": 90, "stream": true}'
        with pytest.raises(
            ConnectionError
        ):  # streams pile up until both sockets' buffers are full, whatever their size
            while True:
                sock.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert not server.llm.engine.live
        assert server.ask("GET", "/health")[0] == 200


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=200), st.sampled_from([b"", HEALTH, POST]))
def test_any_head_is_parsed_or_refused(data: bytes, start: bytes) -> None:
    try:
        method, path, minor, fields = parse_head((start + data).rstrip(b"\r\n"))
    except HttpError as error:
        assert error.status in (400, 431, 505)
        return
    assert method.isupper() and path.startswith("/") and minor in (0, 1)
    assert all("\n" not in value and "\r" not in value for value in fields.values())
    try:
        assert 0 <= body_length(method, fields, 1000) <= 1000
    except HttpError as error:
        assert error.status in (400, 411, 413)
