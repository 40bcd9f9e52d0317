"""One HTTP request and its response over ASGI: body in, JSON or a stream out, errors in one form.

The error body is `{"error": {"message", "type", "param", "code"}}` for everything that can go wrong, also before a
handler is found. 429 and 503 carry Retry-After.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any
from urllib.parse import parse_qs

import msgspec

from slipstream.errors import ClientGone, InvalidRequest, RequestTooLarge, SlipstreamError, UnsupportedMediaType

Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
Headers = Iterable[tuple[bytes, bytes]]

JSON = b"application/json"
RETRY_AFTER_S = 1
# Of a request that is refused: who is still sending does not listen yet, so as much of the body is read, for as long,
# and with as long a pause in between.
DISCARDED, DISCARDED_S, PAUSE_S = 64 << 20, 10.0, 0.5


def error_body(error: SlipstreamError) -> dict[str, Any]:
    """The JSON form of an error; `param` and `code` may be null, `type` groups the statuses."""
    return {
        "error": {
            "message": error.message,
            "type": _error_type(error.status),
            "param": getattr(error, "param", None),
            "code": error.code,
        }
    }


def _error_type(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


class Exchange:
    """A request being answered. `status` is 0 until the response has begun."""

    __slots__ = ("_receive", "_send", "_whole", "headers", "method", "path", "request_id", "scope", "status")

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self._receive = receive
        self._send = send
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.request_id = _clean_id(self.headers.get(b"x-request-id")) or os.urandom(12).hex()
        self.status = 0
        self._whole = False  # the request has been received to its end

    async def body(self, limit: int) -> bytes:
        """The whole body of at most `limit` bytes. Raises RequestTooLarge, UnsupportedMediaType, ClientGone."""
        kind = self.headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if kind != JSON:
            raise UnsupportedMediaType(
                f"the body must be JSON with the header 'Content-Type: application/json'; "
                f"{kind.decode('latin-1') or 'no content type'!r} was given"
            )
        announced = self.headers.get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > limit:
            raise RequestTooLarge(f"the body has {int(announced)} bytes; at most {limit} are accepted")
        parts: list[bytes] = []
        size = 0
        while not self._whole:
            parts.append(await self._part())
            size += len(parts[-1])
            if size > limit:
                raise RequestTooLarge(f"the body is larger than the {limit} bytes that are accepted")
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _part(self) -> bytes:
        """What comes next of the body. Raises ClientGone."""
        event = await self._receive()
        if event["type"] == "http.disconnect":
            raise ClientGone("the client closed the connection before its request was complete")
        self._whole = not event.get("more_body", False)
        return event.get("body", b"")

    async def gone(self) -> None:
        """Returns when the client has closed the connection, or has been answered."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def start(self, status: int, content_type: bytes, headers: Headers = ()) -> None:
        self.status = status
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [(b"content-type", content_type), (b"x-request-id", self.request_id.encode()), *headers],
            }
        )

    async def write(self, data: bytes, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def reply(self, status: int, data: bytes, content_type: bytes = JSON, headers: Headers = ()) -> None:
        await self.start(status, content_type, [(b"content-length", str(len(data)).encode()), *headers])
        await self.write(data, more=False)

    async def json(self, value: Any, status: int = 200, headers: Headers = ()) -> None:
        await self.reply(status, msgspec.json.encode(value), headers=headers)

    async def error(self, error: SlipstreamError, headers: Headers = ()) -> None:
        extra = list(headers)
        if error.status in (429, 503):
            extra.append((b"retry-after", str(RETRY_AFTER_S).encode()))
        await self._discard()
        if not self._whole:
            extra.append((b"connection", b"close"))
        await self.json(error_body(error), error.status, extra)

    async def _discard(self) -> None:
        """Reads what is left of the request, within bounds: a connection that is closed on a client that is still
        sending tells it nothing. Who waits to be asked for the body is not asked."""
        left = 0 if b"expect" in self.headers else DISCARDED
        with contextlib.suppress(TimeoutError, ClientGone):
            async with asyncio.timeout(DISCARDED_S):
                while left > 0 and not self._whole:
                    async with asyncio.timeout(PAUSE_S):
                        left -= len(await self._part())

    def query(self, name: str) -> str | None:
        """A query parameter. Raises InvalidRequest when it is given twice."""
        values = parse_qs(self.scope.get("query_string", b"").decode("latin-1")).get(name, [])
        if len(values) > 1:
            raise InvalidRequest(f"the query parameter {name} is given {len(values)} times", param=name)
        return values[0] if values else None


def _clean_id(value: bytes | None) -> str:
    """A client's request id, if it is fit for headers and logs."""
    if value is None or not 0 < len(value) <= 128:
        return ""
    text = value.decode("latin-1")
    return text if text.isascii() and text.isprintable() else ""
