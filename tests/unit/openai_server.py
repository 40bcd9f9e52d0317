"""A small server that speaks the OpenAI API badly on purpose: for tests of clients.

It answers on real sockets with bytes that a test chooses, in the pieces that a test chooses. What it is asked, it
keeps.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"


@dataclass
class Call:
    """One request and the way to answer it."""

    path: str
    body: dict[str, Any]
    writer: asyncio.StreamWriter
    headers: str = ""

    async def write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def chunked(self, pieces: Iterable[bytes]) -> None:
        """HTTP chunks, each written by itself with time for the client to read it."""
        for piece in pieces:
            await self.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await asyncio.sleep(0.002)

    async def end(self) -> None:
        await self.write(b"0\r\n\r\n")

    async def status(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        await self.write(
            f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n".encode()
            + data
        )


def event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def text(words: str, finish: str | None = None, **rest: Any) -> bytes:
    return event({"choices": [{"index": 0, "text": words, "finish_reason": finish, **rest}]})


def delta(finish: str | None = None, **fields: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]})


def usage(prompt: int, completion: int, cached: int | None = None) -> bytes:
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion, **details}})


Answer = Callable[[Call], Awaitable[None]]


async def well(call: Call) -> None:
    """A good answer: as many tokens as asked, one an event, usage if asked, then the end."""
    count = call.body.get("max_tokens", 1)
    prompt = call.body.get("prompt", "")
    length = len(prompt) if isinstance(prompt, list) else len(str(prompt or call.body["messages"]).split())
    await call.write(HEAD)
    pieces = [text("w ", "length" if at == count - 1 else None) for at in range(count)]
    if call.body.get("stream_options", {}).get("include_usage"):
        pieces.append(usage(length, count, 0))
    await call.chunked([*pieces, DONE])
    await call.end()


@dataclass
class FakeServer:
    """`answer` plays each POST; `refused` are fields that are answered with 400, as by a strict server."""

    answer: Answer = well
    refused: tuple[str, ...] = ()
    card: dict[str, Any] = field(default_factory=lambda: {"id": "fake", "owned_by": "fakes", "max_model_len": 1000})
    calls: list[Call] = field(default_factory=list)
    connections: int = 0
    url: str = ""
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.append(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                line, _, headers = head.partition("\r\n")
                length = next((int(h[16:]) for h in head.split("\r\n") if h.lower().startswith("content-length: ")), 0)
                body = json.loads(await reader.readexactly(length)) if length else {}
                call = Call(line.split()[1], body, writer, headers)
                if call.path.endswith("/models"):
                    await call.status(200, {"object": "list", "data": [self.card]})
                    continue
                self.calls.append(call)
                wrong = next((name for name in self.refused if name in body), None)
                if wrong is None and "token ids" in self.refused and isinstance(body.get("prompt"), list):
                    wrong = "prompt"
                if wrong:
                    await call.status(400, {"error": {"message": f"unknown field {wrong}", "code": "invalid_value"}})
                    continue
                await self.answer(call)
        writer.close()


@contextlib.asynccontextmanager
async def fake(answer: Answer = well, **settings: Any) -> AsyncIterator[FakeServer]:
    fake_server = FakeServer(answer, **settings)
    server = await asyncio.start_server(fake_server._serve, "127.0.0.1", 0)
    fake_server.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield fake_server
    finally:
        server.close()
        for writer in fake_server.writers:  # while there is a loop to close them
            writer.transport.abort()
        await asyncio.sleep(0)
