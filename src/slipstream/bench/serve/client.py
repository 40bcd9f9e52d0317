"""HTTP/1.1 connections that read streams of server-sent events, and note when each piece came.

One `Stream` is one answer. Its connection parses with httptools in the transport's own callback, so that the time of an
event is taken when its bytes leave the socket and not when some task gets its turn; between the start and the end of an
answer no task runs at all. A general client spends several times as much on a chunk, and the client is what must not
be measured here.

Connections are kept and used again. One that the server has closed while it lay idle is noticed at the next request,
which is then sent over a new one, if nothing of an answer had come.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from typing import cast

import httptools

from slipstream.bench.serve.stream import Stream, Whole

IDLE_S = 2.0  # an idle connection is not used after this; servers close them from 5 s on
CONNECT_S = 10.0


class Connection(asyncio.Protocol):
    """One TCP connection, with at most one answer under way."""

    def __init__(self, owner: Client) -> None:
        self._owner = owner
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._stream: Stream | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._framed = False
        self._now = 0.0
        self.idle_since = 0.0
        self.used = False
        self.closed = False

    def send(self, payload: bytes, stream: Stream) -> asyncio.Future[None]:
        """Writes a request; the future is set when the answer is over, however it ended."""
        assert self._transport is not None
        self._stream, self._framed = stream, False
        self._parser = httptools.HttpResponseParser(self)
        self._waiter = asyncio.get_running_loop().create_future()
        stream.sent = time.perf_counter()
        self._transport.write(payload)
        return self._waiter

    def close(self) -> None:
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    # ---- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            if self._stream is not None:
                self._stream.fail("bad_http", str(error))
            self.close()
            self._over(keep=False)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        stream = self._stream
        if stream is None:
            return
        now = time.perf_counter()
        if stream.status and not self._framed:
            stream.finished(now)  # an answer without a length ends with its connection
        else:
            stream.broken(f"the connection ended ({exc or 'closed by the server'})", now)
        self._over(keep=False)

    # ---- httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._framed = True

    def on_headers_complete(self) -> None:
        if self._stream is not None and self._parser.get_status_code() >= 200:
            self._stream.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._stream is not None:
            self._stream.take(body, self._now)

    def on_message_complete(self) -> None:
        if self._stream is not None and self._stream.status:
            self._stream.finished(self._now)
            self._over(keep=self._parser.should_keep_alive())

    def _over(self, *, keep: bool) -> None:
        self._stream = None
        self.used = True
        self.idle_since = time.perf_counter()
        waiter, self._waiter = self._waiter, None
        if keep and not self.closed:
            self._owner.idle.append(self)
        elif not self.closed:
            self.close()
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class Client:
    """The connections to one server. Used on one event loop; `close` at the end.

    `host`, `port`: the server; `tls` wraps connections. `headers` are sent with each request. `connected` counts the
    connections that were made, `reconnected` those made because a kept one was closed at the moment of use.
    """

    def __init__(self, host: str, port: int, *, tls: bool = False, headers: dict[str, str] | None = None) -> None:
        self.idle: list[Connection] = []
        self.connected = 0
        self.reconnected = 0
        self._host, self._port = host, port
        self._context = ssl.create_default_context() if tls else None
        default = port == (443 if tls else 80)
        shown = f"[{host}]" if ":" in host else host
        fields = {"Host": shown if default else f"{shown}:{port}", "Accept": "*/*", **(headers or {})}
        self._fields = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self._address: tuple[str, int] | None = None

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """The bytes of a request, to be made ahead of time."""
        kind = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if method == "POST" else ""
        return f"{method} {path} HTTP/1.1\r\n{self._fields}{kind}\r\n".encode() + body

    async def exchange(self, payload: bytes, stream: Stream, timeout_s: float) -> None:
        """Sends and waits for the end of the answer; whatever goes wrong stands in `stream.problem`."""
        connection: Connection | None = None
        try:
            async with asyncio.timeout(timeout_s):
                connection = self._kept() or await self._connect()
                used = connection.used
                await connection.send(payload, stream)
                if used and stream.problem == "no_answer":
                    self.reconnected += 1
                    stream.problem = stream.detail = ""
                    connection = await self._connect()
                    await connection.send(payload, stream)
        except TimeoutError:
            self._give_up(connection, stream, "timeout", f"no end of the answer within {timeout_s:g} s")
        except OSError as error:
            stream.fail("connect", f"{type(error).__name__}: {error}")
            stream.ended = time.perf_counter()
        except asyncio.CancelledError:
            self._give_up(connection, stream, "unfinished", "it was still under way when the benchmark ended")
            raise

    async def get(self, path: str, timeout_s: float = 10.0) -> tuple[int, bytes]:
        """Status and body of a GET; status 0 and the reason when there was no answer."""
        stream = Whole()
        await self.exchange(self.request("GET", path), stream, timeout_s)
        return (stream.status, stream.body) if stream.status else (0, f"{stream.problem}: {stream.detail}".encode())

    def close(self) -> None:
        for connection in self.idle:
            connection.close()
        self.idle.clear()

    def _give_up(self, connection: Connection | None, stream: Stream, problem: str, why: str) -> None:
        stream.fail(problem, f"{why}; {stream.counted} tokens had come")
        stream.ended = time.perf_counter()
        if connection is not None:
            connection.close()

    def _kept(self) -> Connection | None:
        now = time.perf_counter()
        while self.idle:
            connection = self.idle.pop()
            if not connection.closed and now - connection.idle_since < IDLE_S:
                return connection
            connection.close()
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        if self._address is None:
            found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
            self._address = (str(found[0][4][0]), int(found[0][4][1]))
        name = self._host if self._context else None
        connecting = loop.create_connection(
            lambda: Connection(self), *self._address, ssl=self._context, server_hostname=name
        )
        try:
            _, connection = await asyncio.wait_for(connecting, CONNECT_S)
        except TimeoutError:
            raise ConnectionError(f"no connection to {self._address[0]}:{self._port} within {CONNECT_S:g} s") from None
        self.connected += 1
        return connection
