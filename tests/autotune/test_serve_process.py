"""The server as a process: it says where it listens, ends on a signal with exit code 0, and leaves nothing behind."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from contracts.scripted import byte_tokenizer

from autotune.runtimes.native.serve import ServeError, bind, is_loopback

ROOT = Path(__file__).parents[2]
CODE = """
import sys
from pathlib import Path
from contracts.scripted import ScriptedLLM
from autotune.runtimes.native.serve import Options, bind, serve
folder, port, seconds, drain = sys.argv[1:]
llm = ScriptedLLM(Path(folder), float(seconds))
alive = serve(llm, bind("127.0.0.1", int(port)), Options("tiny", float(drain)), lambda url: print(url, flush=True))
sys.exit(0 if alive else 1)
"""


@contextmanager
def process(folder: Path, seconds: float = 0.02, drain: float = 10) -> Iterator[tuple[subprocess.Popen[str], int]]:
    words = [sys.executable, "-c", CODE, str(folder), "0", str(seconds), str(drain)]
    path = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=path, start_new_session=True) as started:
        try:
            assert started.stdout is not None
            yield started, int(started.stdout.readline().rsplit(":", 1)[1])
        finally:
            if started.poll() is None:
                os.killpg(started.pid, signal.SIGKILL)


def ask(port: int, body: dict[str, object]) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=15)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    return connection.getresponse()


def group_is_gone(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_requests_end_then_exits_0(number: int, tmp_path: Path) -> None:
    with process(byte_tokenizer(tmp_path)) as (server, port):
        answer = ask(port, {"prompt": "abc", "max_tokens": 40, "stream": True})
        first = answer.readline()
        server.send_signal(number)
        text = (first + answer.read()).decode()
        assert text.endswith("data: [DONE]\n\n") and text.count('"text"') == 40
        assert server.wait(10) == 0
        assert group_is_gone(server.pid)


def test_a_second_signal_cuts_requests_off(tmp_path: Path) -> None:
    with process(byte_tokenizer(tmp_path), seconds=0.1) as (server, port):
        answer = ask(port, {"prompt": "abc", "max_tokens": 90, "stream": True})
        answer.readline()
        server.send_signal(signal.SIGTERM)
        threading.Timer(0.2, server.send_signal, [signal.SIGTERM]).start()
        with pytest.raises((http.client.HTTPException, ConnectionError)):
            answer.read()
        assert server.wait(10) == 0


def test_a_failed_engine_shows_in_the_exit_code(tmp_path: Path) -> None:
    with process(byte_tokenizer(tmp_path)) as (server, port):
        assert ask(port, {"prompt": [255]}).status == 503
        server.send_signal(signal.SIGTERM)
        assert server.wait(10) == 1


def test_a_busy_port_and_a_foreign_address_are_one_line() -> None:
    with bind("127.0.0.1", 0) as sock:
        sock.listen()
        port = sock.getsockname()[1]
        with pytest.raises(ServeError, match=f"127.0.0.1:{port}: .*--port 0"):
            bind("127.0.0.1", port)
    with pytest.raises(ServeError, match="--host"):
        bind("192.0.2.1", 0)


def test_loopback_is_known() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org")))
