"""The HTTP port of a worker: health, metrics, who it is, what happened to recent requests, and whether its books are
right.

Nothing here serves tokens; routers speak the message socket that `/worker_info` names.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from slipstream.telemetry import clock
from slipstream.wire import Status, WorkerInfo

MOST_CHAPTERS = 64


@dataclass(frozen=True)
class WorkerViews:
    """What the HTTP port shows: `state` is "loading", "ready", "draining" or "failed: ..."; `info` is None while
    loading; `audit` asks the engine loop for its books; `chapter` is what is remembered of a request."""

    state: Callable[[], str]
    info: Callable[[], WorkerInfo | None]
    status: Callable[[], Awaitable[Status]]
    audit: Callable[[], Awaitable[dict[str, Any]]]
    routes: Callable[[], list[Any]]
    registry: CollectorRegistry
    chapter: Callable[[str], list[dict[str, Any]]]


def create_app(views: WorkerViews) -> Starlette:
    """The ASGI application of a worker's HTTP port."""
    machine = clock.machine_clock()

    async def health(request: Request) -> Response:
        state = views.state()
        return reply({"status": state}, 200 if state == "ready" else 503)

    async def worker_info(request: Request) -> Response:
        info = views.info()
        if info is None:
            return reply({"status": views.state()}, 503)
        return reply({**msgspec.to_builtins(info), "status": views.state(), "routes": views.routes()})

    async def load(request: Request) -> Response:
        if views.info() is None:
            return reply({"status": views.state()}, 503)
        status = msgspec.to_builtins(await views.status())
        return reply({name: status[name] for name in status if name not in ("type", "added", "removed", "reset")})

    async def audit(request: Request) -> Response:
        if views.info() is None:
            return reply({"status": views.state()}, 503)
        return reply(await views.audit())

    async def timeline(request: Request) -> Response:
        """Chapters of up to MOST_CHAPTERS requests, ids separated by commas; without any, only what the clock says."""
        moment = clock.now()
        names = [name for name in request.path_params.get("ids", "").split(",") if name][:MOST_CHAPTERS]
        info = views.info()
        return reply(
            {
                "id": info.id if info is not None else "",
                "name": info.name if info is not None else "",
                "clock": machine,
                "now": moment,
                "requests": {name: views.chapter(name) for name in names},
            }
        )

    async def metrics(request: Request) -> Response:
        return Response(generate_latest(views.registry), media_type="text/plain; version=0.0.4; charset=utf-8")

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/worker_info", worker_info),
            Route("/load", load),
            Route("/audit", audit),
            Route("/metrics", metrics),
            Route("/timeline", timeline),
            Route("/timeline/{ids:path}", timeline),
        ]
    )


def reply(body: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
