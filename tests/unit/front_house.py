"""A front before a router that plays a script, the official client, and an HTTP client bare enough to misbehave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import openai
from tests.unit.scripted import ScriptedRouter, Stage, byte_tokenizer

from slipstream.config import FrontConfig
from slipstream.front.app import FrontApp, create_app
from slipstream.front.server import running
from slipstream.front.service import TokenizerService

MESSAGES: Any = [{"role": "user", "content": "hi"}]
EOS = 256


def saying(text: str, *, finish: Any = "stop", cached: int = 0) -> Any:
    """A script that says `text` byte by byte and stops by itself."""

    async def script(stage: Stage) -> None:
        for at, byte in enumerate(text.encode()):
            stage.say([byte], cached_tokens=cached if at == 0 else None)
            await asyncio.sleep(0)
        if finish == "stop":
            stage.say([EOS], finish="stop", stop_token=EOS)
        else:
            stage.say([], finish=finish)

    return script


async def until(condition: Callable[[], bool]) -> None:
    """Waits for something that has no event of its own to wait for."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


class Wire:
    """One HTTP/1.1 request on a connection of its own, read piece by piece."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.status = 0
        self.headers: dict[str, str] = {}

    async def head(self) -> None:
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        self.status = int(lines[0].split(" ")[1])
        self.headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:] if line)}

    async def chunk(self) -> bytes:
        """The next chunk of a chunked body, b"" at its end. Raises IncompleteReadError when the connection ends."""
        size = int(await self.reader.readuntil(b"\r\n"), 16)
        return (await self.reader.readexactly(size + 2))[:-2]

    async def body(self) -> bytes:
        if "content-length" in self.headers:
            return await self.reader.readexactly(int(self.headers["content-length"]))
        parts = []
        while part := await self.chunk():
            parts.append(part)
        return b"".join(parts)

    def close(self) -> None:
        self.writer.transport.abort()


@dataclass
class House:
    url: str
    router: ScriptedRouter
    app: FrontApp
    client: openai.AsyncOpenAI

    async def open(self, method: str, path: str, data: bytes = b"", **headers: str) -> Wire:
        """Sends a request and reads nothing yet."""
        parts = urlsplit(self.url)
        wire = Wire(*await asyncio.open_connection(parts.hostname, parts.port))
        sent = {"host": parts.netloc, "connection": "close"}
        sent.update((name.replace("_", "-"), value) for name, value in headers.items())
        if "transfer-encoding" not in sent:
            sent.setdefault("content-length", str(len(data)))
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in sent.items())]
        wire.writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + data)
        return wire

    async def request(
        self, method: str, path: str, data: bytes = b"", **headers: str
    ) -> tuple[int, Any, dict[str, str]]:
        """Status, decoded JSON (None for other content), headers."""
        wire = await self.open(method, path, data, **headers)
        try:
            await wire.head()
            body = b"" if method == "HEAD" else await wire.body()
        finally:
            wire.close()
        is_json = wire.headers.get("content-type") == "application/json"
        return wire.status, json.loads(body) if is_json and body else None, wire.headers

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any, dict[str, str]]:
        return await self.request("POST", path, json.dumps(body).encode(), content_type="application/json", **headers)

    async def stream(self, path: str, body: Any) -> Wire:
        data = json.dumps({"stream": True, **body}).encode()
        return await self.open("POST", path, data, content_type="application/json")

    async def events(self, path: str, body: Any) -> list[Any]:
        """All events of a stream, decoded; "[DONE]" as it is, comments as ": ..."."""
        wire = await self.stream(path, body)
        await wire.head()
        assert wire.status == 200, await wire.body()
        text = (await wire.body()).decode()
        wire.close()
        assert text.endswith("\n\n")
        return [decoded(event) for event in text[:-2].split("\n\n")]


def decoded(event: str) -> Any:
    if event.startswith(":") or event == "data: [DONE]":
        return event.removeprefix("data: ")
    assert event.startswith("data: {"), event
    assert "\n" not in event
    return json.loads(event[len("data: ") :])


@asynccontextmanager
async def house(script: Any, *, config: FrontConfig | None = None, **options: Any) -> AsyncIterator[House]:
    config = config or FrontConfig(port=0)
    router = ScriptedRouter(script, **options)
    app = create_app(router, TokenizerService(tokenizer=byte_tokenizer()), config)
    async with running(app, config) as url:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=config.api_key or "none", max_retries=0)
        async with client:
            yield House(url, router, app, client)
