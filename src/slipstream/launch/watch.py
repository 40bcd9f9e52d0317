"""Asks the router, about once a second, whether it can serve and which workers it has; tells it which will not return.

In a thread of its own, so that a router that hangs does not hold up its supervision. The newest answer is in `latest`.
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

import msgspec

from slipstream.launch.banner import Member, Members

logger = logging.getLogger(__name__)

ANSWER_S = 3.0


@dataclass(frozen=True)
class Snapshot:
    """What the router said last: `serving` is its /health, `members` its /workers; `reached` whether it answered."""

    reached: bool = False
    serving: bool = False
    members: tuple[Member, ...] = ()


class Watcher:
    """Polls one router until `close`; `on_news` is called on the watching thread after every poll.

    Of each worker address in `former`, a set that the owner replaces, the router is told to wait no longer, as often
    as it is found waiting for it; not if somebody has named that address, by `POST /workers`, who wants it waited for.
    """

    def __init__(self, url: str, api_key: str, on_news: Callable[[], None]) -> None:
        self.latest = Snapshot()
        self.interval_s = 0.25
        self.former: frozenset[str] = frozenset()
        self._url = url
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._on_news = on_news
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch-router", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(self.interval_s):
            self.latest = self._ask()
            for member in self.latest.members:
                if member.joins and member.url in self.former and member.state in ("connecting", "refused"):
                    self._withdraw(member.url)
            self._on_news()

    def _ask(self) -> Snapshot:
        try:
            health, _ = http_call("GET", self._url, "/health", self._headers)
            status, body = http_call("GET", self._url, "/workers", self._headers)
        except (OSError, http.client.HTTPException):
            return Snapshot()
        members = msgspec.json.decode(body, type=Members).workers if status == 200 else ()
        return Snapshot(True, health == 200, tuple(members))

    def _withdraw(self, url: str) -> None:
        logger.info("%s is nobody's address any more; the router waits for it no longer", url)
        with contextlib.suppress(OSError, http.client.HTTPException):  # it will be found waiting again
            http_call("DELETE", self._url, f"/workers/{quote(url, safe='')}?drain=false", self._headers)


def http_call(method: str, url: str, path: str, headers: Mapping[str, str] | None = None) -> tuple[int, bytes]:
    """Status and body of an answer; no proxy, no redirects. Raises OSError or HTTPException."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=ANSWER_S)
    try:
        connection.request(method, path, headers=dict(headers or {}))
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()
