"""The router and its HTTP front as a process: the one event loop of `slipstream router`.

It listens at once, also before any worker is there: `/health` then says 503 and why. The tokenizer is the last large
thing that it makes; what it has then is set aside from garbage collection. It never imports torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket

from slipstream import garbage
from slipstream.config import FrontConfig, ObserveConfig, RouterConfig
from slipstream.errors import SetupError
from slipstream.front.app import create_app
from slipstream.front.server import serve
from slipstream.front.service import TokenizerService
from slipstream.launch.limits import raise_open_files
from slipstream.listen import listen, url_of
from slipstream.router import Router
from slipstream.telemetry.trace import open_tracing

logger = logging.getLogger(__name__)


def run_router(
    router: RouterConfig,
    front: FrontConfig,
    *,
    observe: ObserveConfig | None = None,
    tokenizer: str = "",
    drain_s: float = 30.0,
    listen_fd: int | None = None,
    accept_after_s: float = 0.0,
) -> None:
    """Runs a router until it is told to end. Raises SetupError when it cannot start.

    `listen_fd` is a listening socket inherited from the parent; without it the front's host and port are bound. With
    `accept_after_s` connections are left waiting in the socket until a request can be served, for that long at most:
    this router follows another one, whose workers it was given had joined that by themselves.
    """
    raise_open_files()
    garbage.starting()
    sock = listen(front.host, front.port) if listen_fd is None else socket.socket(fileno=listen_fd)
    sock.setblocking(False)
    service = TokenizerService(tokenizer=tokenizer, on_load=garbage.settled)
    with asyncio.Runner(loop_factory=_new_loop) as runner:
        runner.run(_run(router, front, observe, sock, service, drain_s, accept_after_s))


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # not made for every platform
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def _run(
    config: RouterConfig,
    front: FrontConfig,
    observe: ObserveConfig | None,
    sock: socket.socket,
    service: TokenizerService,
    drain_s: float,
    accept_after_s: float,
) -> None:
    observe = observe or ObserveConfig()
    spans = open_tracing(observe.otlp_endpoint, "router")
    router = Router(config, spans=spans)
    await router.start(joins=accept_after_s > 0)
    logger.info("router listens at %s", url_of(front.host, sock.getsockname()[1]))
    try:
        app = create_app(router, service, front, observe, spans)
        if accept_after_s > 0:
            await _warm_up(router, service, accept_after_s)
        await serve(app, front, sock, drain_s=drain_s)
    finally:
        await router.stop()
        if spans is not None:
            spans.close()


async def _warm_up(router: Router, service: TokenizerService, limit_s: float) -> None:
    """Workers linked and tokenizer loaded, as far as that goes in time; the front goes on with what is missing."""
    with contextlib.suppress(TimeoutError, SetupError):
        async with asyncio.timeout(limit_s):
            await router.wait_ready(limit_s)
            card = router.model_card()
            if card is not None:
                await service.load(card.model)
