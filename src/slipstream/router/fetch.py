"""Asks a worker who it is: one GET of its `/worker_info`."""

from __future__ import annotations

import msgspec

from slipstream.plain_http import NotHttp, base_url, call
from slipstream.wire import WorkerInfo


class NotAWorker(Exception):
    """Something answered, but not a worker that is ready to say who it is; the message says what."""


def normalize(url: str) -> str:
    """A worker's address as http://host:port. Raises ConfigError."""
    return base_url(url, "a worker's address. Give http://HOST:PORT, the HTTP port of the worker.")


async def worker_info(url: str, timeout_s: float) -> WorkerInfo:
    """Raises OSError, TimeoutError, or NotAWorker."""
    try:
        status, body = await call("GET", f"{url}/worker_info", timeout_s=timeout_s)
    except NotHttp as error:
        raise NotAWorker(f"{error}; give the HTTP port of a worker, not its message port") from None
    if status != 200:
        raise NotAWorker(f"{url}/worker_info answered {status}: {body[:200].decode(errors='replace')}")
    try:
        return msgspec.json.decode(body, type=WorkerInfo)
    except msgspec.MsgspecError as error:
        raise NotAWorker(f"{url}/worker_info is not that of a slipstream worker: {error}") from None
