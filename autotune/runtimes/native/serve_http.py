"""A small, strict HTTP/1.1 server on asyncio: heads, bodies, times and connections are bounded. Knows no route."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

_LINE = re.compile(rb"([A-Z]{1,16}) (/[!-~]*) HTTP/1\.([01])")
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t -~\x80-\xff]*?)[ \t]*")
_SINGLE = ("content-length", "content-type", "host", "transfer-encoding")
_FIELDS = 100


@dataclass(frozen=True, slots=True)
class Limits:
    """What one client may take: bytes of a request, seconds of waiting for it, and connections of all clients."""

    head: int = 16 << 10
    body: int = 8 << 20
    head_seconds: float = 10.0
    body_seconds: float = 30.0
    idle_seconds: float = 75.0
    write_seconds: float = 30.0
    linger_seconds: float = 1.0
    connections: int = 256


@dataclass(frozen=True, slots=True)
class Request:
    """One request; header names are in lower case, ``path`` has no query."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    keep: bool
    chunked: bool


class HttpError(Exception):
    """A request that is answered with an error; ``param`` names the wrong part, ``code`` is for programs."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, headers: str = ""
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers

    @property
    def document(self) -> dict[str, Any]:
        """The error in the shape that OpenAI's clients read."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


Handler = Callable[[Request, "Connection"], Awaitable[None]]


class Connection:
    """One client. Reads a request at a time, keeps what came after it, and notices when the client leaves."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limits: Limits) -> None:
        self.reader, self.writer, self.limits = reader, writer, limits
        self.busy = False
        self.keep = True
        self._buffer = bytearray()
        self._chunked = True
        self._answered = False

    async def request(self) -> Request | None:
        """The next request; None when the client is gone or idle for too long. Raises HttpError."""
        self._answered = False
        if not self._buffer:
            try:
                async with asyncio.timeout(self.limits.idle_seconds):
                    await self._fill()
            except TimeoutError:
                return None
        self.busy = True
        try:
            async with asyncio.timeout(self.limits.head_seconds):
                head = await self._head()
            if head is None:
                return None
            async with asyncio.timeout(self.limits.body_seconds):
                return await self._request(head)
        except TimeoutError:
            raise HttpError(408, "the request did not come in time") from None

    async def _fill(self) -> bool:
        data = await self.reader.read(64 << 10)
        self._buffer += data
        return bool(data)

    async def _head(self) -> bytes | None:
        while (end := self._buffer.find(b"\r\n\r\n", 0, self.limits.head)) < 0:
            if len(self._buffer) >= self.limits.head:
                raise HttpError(431, f"the request's head is longer than {self.limits.head} bytes")
            if not await self._fill():
                return None
        head = bytes(self._buffer[:end])
        del self._buffer[: end + 4]
        return head

    async def _request(self, head: bytes) -> Request:
        method, path, minor, fields = parse_head(head)
        self.keep = minor == 1 and "close" not in fields.get("connection", "").lower()
        self._chunked = minor == 1
        length = body_length(method, fields, self.limits.body)
        if "100-continue" in fields.get("expect", "").lower() and len(self._buffer) < length:
            self.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        while len(self._buffer) < length:
            if not await self._fill():
                raise HttpError(400, "the body is shorter than its Content-Length")
        body = bytes(self._buffer[:length])
        del self._buffer[:length]
        return Request(method, path.partition("?")[0], fields, body, self.keep, self._chunked)

    async def gone(self) -> None:
        """Returns when the client has left. What it sends meanwhile is kept for the next request."""
        while len(self._buffer) < self.limits.head:
            try:
                if not await self._fill():
                    return
            except OSError:
                return
        await asyncio.Event().wait()

    async def respond(
        self, status: int, body: bytes | Mapping[str, Any], kind: str = "application/json", headers: str = ""
    ) -> None:
        """Send one whole response; a mapping goes as JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self._head_out(status, kind, f"{headers}Content-Length: {len(data)}\r\n")
        await self._send(data)

    async def begin(self, kind: str) -> None:
        """Open a streamed response."""
        if not self._chunked:
            self.keep = False
        self._head_out(200, kind, "Cache-Control: no-cache\r\n" + "Transfer-Encoding: chunked\r\n" * self._chunked)
        await self._send(b"")

    async def chunk(self, data: bytes) -> None:
        """Send a piece of a streamed response."""
        await self._send(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    async def end(self) -> None:
        """Close a streamed response."""
        await self._send(b"0\r\n\r\n" if self._chunked else b"")

    def _head_out(self, status: int, kind: str, headers: str) -> None:
        self._answered = True
        text = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: {kind}\r\n{headers}"
            f"Connection: {'keep-alive' if self.keep else 'close'}\r\nX-Content-Type-Options: nosniff\r\n\r\n"
        )
        self.writer.write(text.encode("latin-1"))

    async def _send(self, data: bytes) -> None:
        """Write, and wait until the client has taken enough; one that takes nothing for too long is dropped."""
        self.writer.write(data)
        try:
            async with asyncio.timeout(self.limits.write_seconds):
                await self.writer.drain()
        except TimeoutError:
            self.writer.transport.abort()
            raise ConnectionAbortedError("the client does not read") from None

    async def refuse(self, error: HttpError) -> None:
        """Answer with an error, unless an answer has begun; then only closing tells the client."""
        if self._answered:
            self.keep = False
            return
        await self.respond(error.status, error.document, headers=error.headers)

    async def close(self, linger: bool = False) -> None:
        """Close. After refusing a request half-read, take the rest for a moment, or a reset would eat the answer."""
        with suppress(OSError, TimeoutError):
            if linger and self.writer.can_write_eof():
                self.writer.write_eof()
                async with asyncio.timeout(self.limits.linger_seconds):
                    while await self.reader.read(64 << 10):
                        pass
        self.writer.close()
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(self.limits.linger_seconds):
                await self.writer.wait_closed()


def parse_head(head: bytes) -> tuple[str, str, int, dict[str, str]]:
    """Method, target, minor version and header fields of a head without its empty line. Raises HttpError."""
    first, *lines = head.split(b"\r\n")
    matched = _LINE.fullmatch(first)
    if matched is None:
        version = first.rpartition(b" ")[2]
        if re.fullmatch(rb"HTTP/[0-9]\.[0-9]", version) and version[:7] != b"HTTP/1.":
            raise HttpError(505, "only versions 1.0 and 1.1 of HTTP are spoken here")
        raise HttpError(400, "the request line is not METHOD /path HTTP/1.1")
    if len(lines) > _FIELDS:
        raise HttpError(431, f"the request has more than {_FIELDS} header fields")
    fields: dict[str, str] = {}
    for line in lines:
        field = _FIELD.fullmatch(line)
        if field is None:
            raise HttpError(400, "a header field is malformed")
        name, value = field[1].decode().lower(), field[2].decode("latin-1")
        if name in fields and name in _SINGLE:
            raise HttpError(400, f"the header field {name} is there twice")
        fields[name] = f"{fields[name]}, {value}" if name in fields else value
    if matched[3] == b"1" and "host" not in fields:
        raise HttpError(400, "the header field Host is missing")
    return matched[1].decode(), matched[2].decode(), int(matched[3]), fields


def body_length(method: str, fields: Mapping[str, str], limit: int) -> int:
    """Bytes of the body that follows. Raises HttpError where that is unknown or too many."""
    if "transfer-encoding" in fields:
        raise HttpError(411, "send the body with a Content-Length, not in chunks")
    text = fields.get("content-length")
    if text is None:
        if method in ("POST", "PUT", "PATCH"):
            raise HttpError(411, "the header field Content-Length is missing")
        return 0
    if not re.fullmatch(r"[0-9]{1,15}", text):
        raise HttpError(400, "Content-Length is not a whole number")
    if int(text) > limit:
        raise HttpError(413, f"the body is longer than {limit} bytes")
    return int(text)


class Server:
    """Serves one handler on a bound socket until it is told to drain."""

    def __init__(self, handler: Handler, limits: Limits | None = None) -> None:
        self.handler, self.limits = handler, limits or Limits()
        self._open: dict[asyncio.Task[None], Connection] = {}
        self._server: asyncio.Server | None = None
        self._draining = False

    async def start(self, sock: socket.socket) -> None:
        """Listen. Raises OSError when the address was taken meanwhile."""
        self._server = await asyncio.start_server(self._client, sock=sock, limit=64 << 10)

    async def drain(self, seconds: float, hurry: asyncio.Event) -> None:
        """Take no more; let running requests end for ``seconds`` or until ``hurry``, then cut them off."""
        self._draining = True
        if self._server is not None:
            self._server.close()
        for task, connection in self._open.items():
            if not connection.busy:
                task.cancel()
        if self._open:
            ended: asyncio.Task[Any] = asyncio.create_task(self._ended())
            hurried: asyncio.Task[Any] = asyncio.create_task(hurry.wait())
            await asyncio.wait({ended, hurried}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            for task in list(self._open):
                task.cancel()
            await asyncio.wait({ended}, timeout=self.limits.linger_seconds)
            ended.cancel()
            hurried.cancel()

    async def _ended(self) -> None:
        await asyncio.wait(list(self._open))

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connection = Connection(reader, writer, self.limits)
        self._open[task] = connection
        linger = False
        try:
            if len(self._open) > self.limits.connections:
                linger = True
                connection.keep = False
                await connection.refuse(HttpError(503, "too many connections", headers="Retry-After: 1\r\n"))
                return
            while connection.keep and not self._draining:
                connection.busy = False
                linger = not await self._turn(connection)
        except (OSError, asyncio.CancelledError):
            writer.transport.abort()
        finally:
            await connection.close(linger)
            del self._open[task]

    async def _turn(self, connection: Connection) -> bool:
        """One request and its answer; False when the request could not be read to its end."""
        try:
            request = await connection.request()
        except HttpError as error:
            connection.keep = False
            await connection.refuse(error)
            return False
        if request is None:
            connection.keep = False
            return True
        if self._draining:
            connection.keep = False
        await self._answer(request, connection)
        return True

    async def _answer(self, request: Request, connection: Connection) -> None:
        """Run the handler, and cancel it when the client leaves."""
        work: asyncio.Task[Any] = asyncio.create_task(self._handle(request, connection))
        watch: asyncio.Task[Any] = asyncio.create_task(connection.gone())
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                connection.keep = False
            else:
                await work
        finally:
            for task in (work, watch):
                task.cancel()
            await asyncio.wait({work, watch})

    async def _handle(self, request: Request, connection: Connection) -> None:
        try:
            await self.handler(request, connection)
        except HttpError as error:
            await connection.refuse(error)
        except OSError:
            raise
        except Exception:
            logging.getLogger(__name__).exception("%s %s", request.method, request.path)
            await connection.refuse(HttpError(500, "the server has a defect here; its log has the details"))
