"""Asks a worker who it is: one GET of its `/worker_info`."""

from __future__ import annotations

import msgspec

from slipstream.plain_http import NotHttp, base_url, call
from slipstream.wire import WorkerInfo


class NotAWorker(Exception):
    """Something answered, but not a worker that can say who it is; the message says what."""


class NotReady(Exception):
    """A worker answered that it cannot say yet, or any more, who it is, as all do while they load or end."""


ORDINARY = {"loading": "it is loading its model", "ended": "it is ending"}  # states without information


def normalize(url: str) -> str:
    """A worker's address as http://host:port. Raises ConfigError."""
    return base_url(url, "a worker's address. Give http://HOST:PORT, the HTTP port of the worker.")


async def worker_info(url: str, timeout_s: float) -> WorkerInfo:
    """Raises OSError, TimeoutError, NotReady or NotAWorker."""
    try:
        status, body = await call("GET", f"{url}/worker_info", timeout_s=timeout_s)
    except NotHttp as error:
        raise NotAWorker(f"{error}; give the HTTP port of a worker, not its message port") from None
    if status == 503 and (reason := _ordinary(body)):
        raise NotReady(reason)
    if status != 200:
        raise NotAWorker(f"{url}/worker_info answered {status}: {body[:200].decode(errors='replace')}")
    try:
        return msgspec.json.decode(body, type=WorkerInfo)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise NotAWorker(f"{url}/worker_info is not that of a slipstream worker: {error}") from None


def _ordinary(body: bytes) -> str:
    """What a worker without information is doing; "" when that is nothing ordinary."""
    try:
        return ORDINARY.get(msgspec.json.decode(body, type=dict[str, str]).get("status", ""), "")
    except (msgspec.MsgspecError, RecursionError):
        return ""
