"""The router and its HTTP front as a process: the one event loop of `slipstream router`.

It listens at once, also before any worker is there: `/health` then says 503 and why. It never imports torch.
"""

from __future__ import annotations

import asyncio
import logging
import socket

from slipstream.config import FrontConfig, RouterConfig
from slipstream.front.app import create_app
from slipstream.front.server import serve
from slipstream.front.service import TokenizerService
from slipstream.launch import ports
from slipstream.router import Router

logger = logging.getLogger(__name__)


def run_router(
    router: RouterConfig,
    front: FrontConfig,
    *,
    tokenizer: str = "",
    drain_s: float = 30.0,
    listen_fd: int | None = None,
) -> None:
    """Runs a router until it is told to end. Raises SetupError when it cannot start.

    `listen_fd` is a listening socket inherited from the parent; without it the front's host and port are bound.
    """
    sock = ports.listen(front.host, front.port) if listen_fd is None else socket.socket(fileno=listen_fd)
    sock.setblocking(False)
    logger.info("router listens at %s", ports.url_of(front.host, sock.getsockname()[1]))
    with asyncio.Runner(loop_factory=_new_loop) as runner:
        runner.run(_run(router, front, sock, tokenizer, drain_s))


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # not made for every platform
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def _run(config: RouterConfig, front: FrontConfig, sock: socket.socket, tokenizer: str, drain_s: float) -> None:
    router = Router(config)
    await router.start()
    try:
        app = create_app(router, TokenizerService(tokenizer=tokenizer), front)
        await serve(app, front, sock, drain_s=drain_s)
    finally:
        await router.stop()
