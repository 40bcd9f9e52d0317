"""The paths of the dashboard.

The page and its files hold no data and need no key; everything that they ask for does. The page may load nothing from
anywhere else, run no code but its own files, and be shown in no frame: its content security policy says so.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Callable, Iterable
from importlib import resources
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry
from prometheus_client.metrics_core import Metric

from slipstream.errors import InvalidRequest, RouteNotFound
from slipstream.front.backend import Backend
from slipstream.front.dashboard.checks import Drawing, Findings
from slipstream.front.dashboard.snapshot import encode, state
from slipstream.front.dashboard.watch import Watch
from slipstream.front.exchange import JSON, Exchange
from slipstream.version import __version__

PAGE, PREFIX = "/dashboard", "/dashboard/"
KINDS = {
    "html": b"text/html; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "svg": b"image/svg+xml; charset=utf-8",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
SAFE = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
]
NO_STORE = [*SAFE, (b"cache-control", b"no-store")]


class Dashboard:
    """Handlers. `health` gives the reasons why a request would not be answered now, `families` the front's metrics."""

    def __init__(
        self, backend: Backend, key: str, health: Callable[[], list[str]], families: Callable[[], Iterable[Metric]]
    ) -> None:
        self._files = _files()
        registry: CollectorRegistry = backend.metrics_registry
        self._watch = Watch(registry, backend.describe, families)
        self._drawing = Drawing()
        self._findings = Findings(key)
        self._backend = backend
        self._health = health
        self.open_paths = frozenset({"/", PAGE, PREFIX, *(PREFIX + name for name in self._files)})

    def start(self) -> None:
        """On the running event loop."""
        self._watch.start()

    async def stop(self) -> None:
        """Ends everything that runs for the page, doctor's process too."""
        await asyncio.gather(self._watch.stop(), self._drawing.stop(), self._findings.stop())

    # ------------------------------------------------------------------------------------------ the page

    async def page(self, exchange: Exchange) -> None:
        await self._send_file(exchange, "index.html")

    async def root(self, exchange: Exchange) -> None:
        """Who opens the server's address in a browser wants to see it."""
        await exchange.reply(307, b"", KINDS["html"], [(b"location", b"dashboard"), *SAFE])

    async def slash(self, exchange: Exchange) -> None:
        await exchange.reply(308, b"", KINDS["html"], [(b"location", b"../dashboard"), *SAFE])

    async def file(self, exchange: Exchange, name: str) -> None:
        if name not in self._files:
            raise RouteNotFound(f"the dashboard has no file {name!r}")
        await self._send_file(exchange, name)

    async def _send_file(self, exchange: Exchange, name: str) -> None:
        data, tag = self._files[name]
        headers = [*SAFE, (b"cache-control", b"no-cache"), (b"etag", tag)]
        if exchange.headers.get(b"if-none-match") == tag:
            await exchange.reply(304, b"", KINDS[name.rpartition(".")[2]], headers)
        else:
            await exchange.reply(200, data, KINDS[name.rpartition(".")[2]], headers)

    # ------------------------------------------------------------------------------------------ its data

    async def state(self, exchange: Exchange) -> None:
        """A snapshot; `since` (Unix seconds) leaves out the history up to then."""
        since = _number(exchange, "since", 0.0)
        self._drawing.look()
        self._findings.look(_own_url(exchange))
        snapshot = await self._watch.snapshot()
        view = self._backend.describe()
        reasons = self._health()
        shown: dict[str, Any] = {
            "version": __version__,
            "router": view.get("router", ""),
            "model": view.get("model"),
            "health": {"ready": not reasons, "reasons": reasons},
            "drawing": {
                "version": self._drawing.version(snapshot.workers),
                "problem": self._drawing.problem,
                "handoff": self._drawing.handoff,
            },
            "doctor": self._findings.view(),
            **state(self._watch, snapshot, since),
        }
        await exchange.reply(200, encode(shown), JSON, NO_STORE)

    async def machine(self, exchange: Exchange) -> None:
        """The drawing, with the workers of the last snapshot."""
        snapshot = await self._watch.snapshot()
        drawing = self._drawing.svg(snapshot.workers)
        if drawing is None:
            raise RouteNotFound(self._drawing.problem or "this machine is still being read; ask again in a moment")
        await exchange.reply(200, drawing.encode(), KINDS["svg"], NO_STORE)

    async def metrics(self, exchange: Exchange) -> None:
        """The text that a snapshot's figures were read from: the front's, or that of `worker`."""
        number = int(_number(exchange, "snapshot", -1))
        snapshot = self._watch.find(number)
        if snapshot is None:
            kept = [str(snapshot.id) for snapshot in self._watch.kept]
            raise RouteNotFound(f"snapshot {number} is not kept; these are: {', '.join(kept) or 'none'}")
        reading = snapshot.front
        name = exchange.query("worker")
        if name is not None:
            ids = [w["id"] for w in snapshot.workers if name in (w.get("name"), w["id"], w["url"])]
            found = next((snapshot.readings[i] for i in ids if i in snapshot.readings), None)
            if found is None:
                raise RouteNotFound(f"snapshot {number} has no metrics of a worker {name!r}")
            reading = found
        headers = [(b"x-sampled-at", f"{reading.at:.6f}".encode()), *NO_STORE]
        await exchange.reply(200, reading.text.encode(), CONTENT_TYPE_LATEST.encode(), headers)

    async def doctor(self, exchange: Exchange) -> None:
        """Runs doctor again. The body is JSON, so that no other site's page can ask for it."""
        await exchange.body(1024)
        self._findings.again(_own_url(exchange))
        await exchange.json({"running": True})


def _files() -> dict[str, tuple[bytes, bytes]]:
    """The page's files with their entity tags, by name."""
    folder = resources.files("slipstream.front.dashboard") / "static"
    found = {}
    for file in folder.iterdir():
        if file.name.rpartition(".")[2] in KINDS:
            data = file.read_bytes()
            found[file.name] = (data, b'"' + hashlib.blake2b(data, digest_size=12).hexdigest().encode() + b'"')
    return found


def _own_url(exchange: Exchange) -> str:
    """Where this very connection arrived."""
    host, port = exchange.scope.get("server") or ("127.0.0.1", 8000)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _number(exchange: Exchange, name: str, default: float) -> float:
    text = exchange.query(name)
    try:
        number = float(text) if text else default
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise InvalidRequest(f"{name} must be a number; {text!r} was given", param=name)
    return number
