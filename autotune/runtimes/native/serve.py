"""Serves one LLM over HTTP in OpenAI's shape until a signal ends it. Routes and life cycle, no bytes."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import signal
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from autotune.runtimes.base import Generation
from autotune.runtimes.native import serve_api as api
from autotune.runtimes.native.llm import LLM
from autotune.runtimes.native.serve_engine import Driver, Part
from autotune.runtimes.native.serve_http import Connection, HttpError, Limits, Request, Server

QUEUE = 256
"""Requests waiting for their first token above which new ones are sent away."""
DRAIN_SECONDS = 30.0


class ServeError(Exception):
    """A server that cannot start; one line that says what to type instead."""


@dataclass(frozen=True, slots=True)
class Options:
    """``name`` is the model's name to clients; ``drain`` is how long a signal lets running requests go on."""

    name: str
    drain: float = DRAIN_SECONDS
    queue: int = QUEUE
    limits: Limits = field(default_factory=Limits)


def bind(host: str, port: int) -> socket.socket:
    """A bound socket, not yet listening; port 0 takes a free one. Raises ServeError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ServeError(f"cannot serve on {host}: {error.strerror or error}; try --host 127.0.0.1") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise ServeError(
            f"cannot serve on {host}:{port}: {error.strerror}; try --port 0, which takes a free one, or another --host"
        ) from None
    return sock


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def address(sock: socket.socket) -> str:
    """The URL of a bound socket."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(llm: LLM, sock: socket.socket, options: Options, ready: Callable[[str], None]) -> bool:
    """Serve until SIGTERM or SIGINT, then drain; a second signal cuts running requests off.

    ``ready`` is called with the URL once requests are taken. Returns False when the engine has failed meanwhile.
    Raises ServeError when the address was taken since `bind`.
    """
    return asyncio.run(_serve(llm, sock, options, ready))


async def _serve(llm: LLM, sock: socket.socket, options: Options, ready: Callable[[str], None]) -> bool:
    loop = asyncio.get_running_loop()
    stop, hurry = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: (hurry if stop.is_set() else stop).set())
    driver = Driver(llm.engine, loop)
    service = Service(llm, driver, options)
    server = Server(service.handle, options.limits)
    try:
        where = address(sock)
        try:
            await server.start(sock)
        except OSError as error:
            raise ServeError(f"cannot serve on {where}: {error.strerror}; try --port 0 for a free one") from None
        ready(where)
        await stop.wait()
        service.draining = True
        await server.drain(options.drain, hurry)
        return not driver.failure
    finally:
        driver.close()


class Service:
    """The routes."""

    def __init__(self, llm: LLM, driver: Driver, options: Options) -> None:
        self.llm, self.driver, self.options = llm, driver, options
        self.bounds = api.Bounds(options.name, llm.vocabulary, llm.capacity)
        self.effective = llm.effective()
        self.started = int(time.time())
        self.draining = False
        self._routes: dict[str, tuple[str, Callable[[Request, Connection], Any]]] = {
            "/v1/completions": ("POST", self._completions),
            "/v1/models": ("GET", self._models),
            "/v1/config": ("GET", self._config),
            "/health": ("GET", self._health),
            "/metrics": ("GET", self._metrics),
        }

    async def handle(self, request: Request, connection: Connection) -> None:
        """Answer one request. Raises HttpError for what has no answer."""
        if request.path not in self._routes:
            raise HttpError(404, f"there is no {request.path[:80]} here; there are {', '.join(self._routes)}")
        method, route = self._routes[request.path]
        if request.method != method:
            raise HttpError(405, f"{request.path} takes {method} only", headers=f"Allow: {method}\r\n")
        await route(request, connection)

    async def _models(self, request: Request, connection: Connection) -> None:
        model = {
            "id": self.options.name,
            "object": "model",
            "created": self.started,
            "owned_by": "autotune",
            "max_model_len": self.bounds.tokens,
        }
        await connection.respond(200, {"object": "list", "data": [model]})

    async def _config(self, request: Request, connection: Connection) -> None:
        await connection.respond(
            200,
            {
                "engine": "native",
                "model": self.options.name,
                "config": dict(self.llm.config),
                "effective": dict(self.effective),
            },
        )

    def _unable(self) -> str:
        return self.driver.failure or ("the server is shutting down" if self.draining else "")

    async def _health(self, request: Request, connection: Connection) -> None:
        reason = self._unable()
        await connection.respond(503 if reason else 200, {"status": reason or "ok"})

    async def _metrics(self, request: Request, connection: Connection) -> None:
        counters = {} if self.driver.failure else dict(await self.driver.counters())
        if "kv_used_tokens" in counters:
            counters["kv_usage"] = counters["kv_used_tokens"] / self.bounds.tokens
        text = prometheus(self.driver, counters)
        await connection.respond(200, text.encode(), "text/plain; version=0.0.4; charset=utf-8")

    async def _completions(self, request: Request, connection: Connection) -> None:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # also keeps other sites' pages from posting here without asking first
            raise HttpError(415, "send the body as Content-Type: application/json")
        reason = self._unable()
        if reason:
            raise HttpError(503, reason)
        asked = api.parse(request.body, self.llm.text, self.bounds)
        if self.driver.waiting + len(asked.prompts) > self.options.queue:
            raise HttpError(503, "too many requests are waiting", headers="Retry-After: 1\r\n")
        job = _Job(self, asked)
        try:
            if asked.stream:
                await job.stream(connection)
            else:
                await job.whole(connection)
        finally:
            job.abort()


class _Job:
    """One completion request under way."""

    def __init__(self, service: Service, asked: api.Asked) -> None:
        self._service, self._asked = service, asked
        self._driver = service.driver
        self._outputs = [api.Output(service.llm.text, asked.stop) for _ in asked.prompts]
        self._parts: asyncio.Queue[tuple[int, Part]] = asyncio.Queue()
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.options.name,
        }
        self._numbers = [self._submit(index, prompt) for index, prompt in enumerate(asked.prompts)]

    def _submit(self, index: int, prompt: tuple[int, ...]) -> int:
        asked = self._asked
        generation = Generation(prompt, asked.max_tokens, asked.temperature, asked.seed + index, asked.ignore_eos)
        return self._driver.submit(generation, lambda part: self._parts.put_nowait((index, part)))

    def abort(self) -> None:
        """Stop what still runs of this request."""
        for number in self._numbers:
            self._driver.abort(number)

    async def _next(self) -> tuple[int, Part, str]:
        """The next part of a choice that goes on, and the text it adds. Raises HttpError 400 or 503."""
        while True:
            index, part = await self._parts.get()
            if part.finish == "refused":
                raise HttpError(400, part.reason)
            if part.finish == "error":
                raise HttpError(503, part.reason)
            output = self._outputs[index]
            if output.finish is not None:  # parts that were under way when its stop string came
                continue
            text = output.push(part.tokens, part.finish)
            if output.finish is not None and part.finish is None:
                self._driver.abort(self._numbers[index])
            return index, part, text

    def _open(self) -> bool:
        return any(output.finish is None for output in self._outputs)

    def _usage(self) -> dict[str, int]:
        return api.usage(self._asked, sum(len(output.tokens) for output in self._outputs))

    async def whole(self, connection: Connection) -> None:
        texts = [""] * len(self._outputs)
        while self._open():
            index, _, text = await self._next()
            texts[index] += text
        choices = [
            api.choice(i, texts[i], output.finish, await self._logprobs(i), output.tokens if self._asked.ids else None)
            for i, output in enumerate(self._outputs)
        ]
        await connection.respond(200, {**self._head, "choices": choices, "usage": self._usage()})

    async def _logprobs(self, index: int) -> dict[str, Any] | None:
        """Scored afterwards in one pass, so that requests without logprobs pay nothing."""
        top = self._asked.logprobs
        tokens, prompt = self._outputs[index].tokens, self._asked.prompts[index]
        if top is None or not tokens:
            return None
        try:
            score = await self._driver.score([*prompt, *tokens], max(top, 1))
        except RuntimeError as error:
            raise HttpError(503, str(error)) from None
        return api.logprobs(self._service.llm.text, tokens, score, len(prompt), top)

    async def stream(self, connection: Connection) -> None:
        begun = False
        try:
            while self._open():
                index, part, text = await self._next()
                if not begun:
                    await connection.begin("text/event-stream; charset=utf-8")
                    begun = True
                finish = self._outputs[index].finish
                ids = part.tokens if self._asked.ids else None
                if text or finish or ids:
                    await self._event(connection, [api.choice(index, text, finish, None, ids)])
        except HttpError as error:
            if not begun:
                raise
            await connection.chunk(f"data: {json.dumps(error.document)}\n\n".encode())
            connection.keep = False
            return
        if self._asked.usage:
            await self._event(connection, [], usage=self._usage())
        await connection.chunk(b"data: [DONE]\n\n")
        await connection.end()

    async def _event(self, connection: Connection, choices: list[dict[str, Any]], **more: Any) -> None:
        document = {**self._head, "choices": choices, **more}
        await connection.chunk(f"data: {json.dumps(document)}\n\n".encode())


def prometheus(driver: Driver, counters: Any) -> str:
    """The text of /metrics: the server's own counts, then the engine's numbers under their own names."""
    counts = driver.counts
    lines: list[str] = []

    def add(name: str, kind: str, help_: str, values: Mapping[str, float]) -> None:
        lines.extend([f"# HELP autotune_{name} {help_}", f"# TYPE autotune_{name} {kind}"])
        lines.extend(f"autotune_{name}{labels} {value:.17g}" for labels, value in values.items())

    add("requests_total", "counter", "Prompts taken.", {"": counts["requests"]})
    ends = {f'{{finish="{end}"}}': counts[f"finish_{end}"] for end in ("stop", "length", "abort", "error", "refused")}
    add("requests_finished_total", "counter", "Prompts done with, by how they ended.", ends)
    add("prompt_tokens_total", "counter", "Tokens of prompts taken.", {"": counts["prompt_tokens"]})
    add("generated_tokens_total", "counter", "Tokens generated.", {"": counts["generated_tokens"]})
    add("requests_running", "gauge", "Prompts past their first token.", {"": driver.running})
    add("requests_waiting", "gauge", "Prompts before their first token.", {"": driver.waiting})
    first = "autotune_time_to_first_token_seconds"
    lines.append(f"# HELP {first} From taking a prompt to its first token.")
    lines.append(f"# TYPE {first} summary")
    lines.append(f"{first}_sum {driver.first_seconds:.17g}")
    lines.append(f"{first}_count {counts['first_tokens']}")
    for name, value in sorted(counters.items()):
        if name.isidentifier() and name.isascii():
            add(f"engine_{name}", "gauge", "As the engine counts it.", {"": float(value)})
    return "\n".join(lines) + "\n"
