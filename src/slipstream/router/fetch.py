"""Asks a worker who it is: one HTTP GET of `/worker_info`, written out by hand.

A request every few hundred milliseconds while a worker is not there yet, then none: that needs neither a client
library nor kept connections. The request is HTTP/1.0, so that the answer ends with the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
from urllib.parse import urlsplit

import msgspec

from slipstream.errors import ConfigError
from slipstream.wire import WorkerInfo

MAX_BODY = 4 << 20


class NotAWorker(Exception):
    """Something answered, but not a worker that is ready to say who it is; the message says what."""


def normalize(url: str) -> str:
    """`url` as scheme://host:port without a path; a bare host:port is taken as http. Raises ConfigError."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme != "http" or not parts.hostname or port is None:
        raise ConfigError(f"{url!r} is not a worker's address. Give http://HOST:PORT, the HTTP port of the worker.")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"http://{host}:{port}"


async def worker_info(url: str, timeout_s: float) -> WorkerInfo:
    """Raises OSError, TimeoutError, or NotAWorker."""
    parts = urlsplit(url)
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        try:
            head = f"GET /worker_info HTTP/1.0\r\nHost: {parts.netloc}\r\nAccept: application/json\r\n\r\n"
            writer.write(head.encode())
            answer = await _read_all(reader)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
    return _parse(answer, url)


async def _read_all(reader: asyncio.StreamReader) -> bytes:
    answer = bytearray()
    while block := await reader.read(1 << 16):
        answer += block
        if len(answer) > MAX_BODY:
            raise NotAWorker(f"its answer is longer than {MAX_BODY} bytes")
    return bytes(answer)


def _parse(answer: bytes, url: str) -> WorkerInfo:
    head, separator, body = answer.partition(b"\r\n\r\n")
    words = head.split(b"\r\n", 1)[0].split(b" ", 2)
    if not separator or len(words) < 2 or not words[0].startswith(b"HTTP/") or not words[1].isdigit():
        raise NotAWorker(f"{url} does not speak HTTP; give the HTTP port of a worker, not its message port")
    if words[1] != b"200":
        raise NotAWorker(f"{url}/worker_info answered {words[1].decode()}: {body[:200].decode(errors='replace')}")
    try:
        return msgspec.json.decode(body, type=WorkerInfo)
    except msgspec.MsgspecError as error:
        raise NotAWorker(f"{url}/worker_info is not that of a slipstream worker: {error}") from None
