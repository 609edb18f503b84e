"""A running server on a scripted engine, and a client of it."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from contracts.scripted import ScriptedLLM, byte_tokenizer

from autotune.runtimes.native.llm import LLM
from autotune.runtimes.native.serve import Options, Service, bind
from autotune.runtimes.native.serve_engine import Driver
from autotune.runtimes.native.serve_http import Limits, Server

QUICK = Limits(
    head=2048, body=20_000, head_seconds=0.4, body_seconds=0.4, idle_seconds=5, write_seconds=1, linger_seconds=0.5,
    connections=8,
)  # fmt: skip


class Running:
    """A server in a thread of its own, and a client of it."""

    def __init__(self, llm: ScriptedLLM, port: int) -> None:
        self.llm, self.port = llm, port
        self.service: Service
        self.stop: Callable[[], None]

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any, http.client.HTTPMessage]:
        """Status, body (decoded where it is JSON) and headers of one request on a fresh connection."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        try:
            connection.request(method, path, data, {"Content-Type": "application/json", **headers})
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        kind = answer.headers.get("Content-Type", "")
        return answer.status, json.loads(text) if kind == "application/json" else text.decode(), answer.headers

    def complete(self, **body: Any) -> tuple[int, Any]:
        return self.ask("POST", "/v1/completions", body)[:2]

    def events(self, **body: Any) -> list[Any]:
        """The documents of a streamed completion; the last must be [DONE]."""
        status, text, headers = self.ask("POST", "/v1/completions", {**body, "stream": True})
        assert status == 200 and headers["Content-Type"].startswith("text/event-stream")
        *events, done, rest = text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]

    def raw(self, data: bytes, wait: float = 5.0) -> bytes:
        """All that comes back for ``data`` until the server closes."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=wait) as sock:
            sock.sendall(data)
            found = b""
            while piece := sock.recv(65536):
                found += piece
            return found


def wait_until(true: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait for something that another thread brings about."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.01)


@contextmanager
def start(
    folder: Path, seconds: float = 0.0, tokenizer: bool = True, drain: float = 5.0, **changes: Any
) -> Iterator[Running]:
    """A running server; ``changes`` are limits, or the length of its queue."""
    llm = ScriptedLLM(byte_tokenizer(folder) if tokenizer else folder, seconds)
    queue = changes.pop("queue", 64)
    limits = replace(QUICK, **changes)
    sock = bind("127.0.0.1", 0)
    server, began = Running(llm, sock.getsockname()[1]), threading.Event()

    async def main() -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        driver = Driver(llm.engine, loop)
        server.service = Service(cast(LLM, llm), driver, Options("tiny", queue=queue))
        http_server = Server(server.service.handle, limits)
        await http_server.start(sock)

        def end() -> None:
            with suppress(RuntimeError):  # it has ended already: its loop is closed
                loop.call_soon_threadsafe(stop.set)

        server.stop = end
        began.set()
        await stop.wait()
        server.service.draining = True
        await http_server.drain(drain, asyncio.Event())
        driver.close()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    assert began.wait(10)
    try:
        yield server
    finally:
        server.stop()
        thread.join(20)
        assert not thread.is_alive()
