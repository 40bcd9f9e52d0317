"""One HTTP request between our own processes, written out by hand.

Workers join routers and routers ask workers who they are: a request every few hundred milliseconds while the other side
is not there yet, then none. That needs neither a client library nor kept connections nor a thread that could outlive
its purpose. The request is HTTP/1.0, so that the answer ends with the connection; no proxy is ever asked.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from urllib.parse import urlsplit

from slipstream.errors import ConfigError

MAX_ANSWER = 4 << 20


class NotHttp(ValueError):
    """Something answered, but not with HTTP, or without end."""


def base_url(url: str, what: str) -> str:
    """`url` as http://host:port without a path; a bare host:port is taken as http.

    Raises ConfigError: "'...' is not " and then `what`, which says what was wanted.
    """
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port
        (parts.hostname or "").encode("idna")
    except (ValueError, UnicodeError):
        raise ConfigError(f"{url!r} is not {what}") from None
    strange = not (parts.hostname or "").isprintable()
    if parts.scheme != "http" or not parts.hostname or strange or not port:
        raise ConfigError(f"{url!r} is not {what}")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"http://{host}:{port}"


def why_not(error: Exception) -> str:
    """Why a process of ours was not reached, in words: that one starts or ends is no trouble and looks like none."""
    if isinstance(error, ConnectionRefusedError):
        return "nothing listens there"
    if isinstance(error, ConnectionError):
        return "it ended while it was asked"
    return str(error)


async def call(
    method: str, url: str, *, body: bytes = b"", headers: Mapping[str, str] | None = None, timeout_s: float
) -> tuple[int, bytes]:
    """Status and body of the answer of `http://host:port/path`. Raises OSError, TimeoutError, NotHttp."""
    parts = urlsplit(url)
    lines = [f"{method} {parts.path or '/'} HTTP/1.0", f"Host: {parts.netloc}", "Accept: application/json"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    if body:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        try:
            writer.write("\r\n".join([*lines, "", ""]).encode() + body)
            answer = await _read_all(reader, url)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
    return _parse(answer, url)


async def _read_all(reader: asyncio.StreamReader, url: str) -> bytes:
    answer = bytearray()
    while block := await reader.read(1 << 16):
        answer += block
        if len(answer) > MAX_ANSWER:
            raise NotHttp(f"the answer of {url} is longer than {MAX_ANSWER} bytes")
    return bytes(answer)


def _parse(answer: bytes, url: str) -> tuple[int, bytes]:
    head, separator, body = answer.partition(b"\r\n\r\n")
    words = head.split(b"\r\n", 1)[0].split(b" ", 2)
    if not separator or len(words) < 2 or not words[0].startswith(b"HTTP/") or not words[1].isdigit():
        raise NotHttp(f"{url} does not answer with HTTP")
    return int(words[1]), body
