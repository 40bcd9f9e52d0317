"""Runs the application under uvicorn until a signal, and ends it in order.

On SIGTERM or SIGINT: /health turns 503 and no new request is taken; streams under way have `drain_s` to finish; what is
left then ends with an error event; the sockets close. A second signal skips the waiting. The process's own end is the
caller's business: `serve` returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import AsyncIterator, Iterator

import uvicorn

from slipstream.config import FrontConfig
from slipstream.front.app import FrontApp
from slipstream.listen import listen, url_of

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
CLOSE_S = 2.0  # for the error events of cut streams to leave


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling, which would end the process behind the caller's back."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(
    app: FrontApp,
    config: FrontConfig,
    sock: socket.socket | None = None,
    *,
    drain_s: float = 30.0,
    stop: asyncio.Event | None = None,
) -> None:
    """Serves until SIGTERM, SIGINT or `stop`; returns when all is closed.

    `sock` is a bound, listening socket; without it the config's host and port are bound. Signals are only caught in
    the main thread. Runs on the caller's event loop; uvloop (`uvloop.run`) is the fast one. Raises ConfigError when the
    address cannot be bound.
    """
    sock = sock or listen(config.host, config.port)
    server = _Server(
        uvicorn.Config(
            app,
            host=config.host,
            port=config.port,
            loop="none",
            http="httptools",
            ws="none",
            lifespan="on",
            access_log=config.log_level == "debug",
            log_config=None,
            log_level="debug" if config.log_level == "debug" else "warning",
            server_header=False,
            date_header=True,
            timeout_keep_alive=75,
            backlog=2048,
        )
    )
    stop = stop or asyncio.Event()
    hurry = asyncio.Event()
    with _signals(stop, hurry):
        running = asyncio.create_task(server.serve(sockets=[sock]))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not running.done():
            await _finish(app, server, hurry, drain_s)
        await running


@contextlib.asynccontextmanager
async def running(app: FrontApp, config: FrontConfig, *, drain_s: float = 0.0) -> AsyncIterator[str]:
    """The front on this event loop for the length of a block; gives its URL."""
    sock = listen(config.host, config.port)
    stop = asyncio.Event()
    task = asyncio.create_task(serve(app, config, sock, drain_s=drain_s, stop=stop))
    host, port = sock.getsockname()[:2]
    try:
        yield url_of(host, port)
    finally:
        stop.set()
        await task


async def _finish(app: FrontApp, server: uvicorn.Server, hurry: asyncio.Event, drain_s: float) -> None:
    app.drain()
    if app.in_flight:
        logger.info("finishing %d requests, for up to %g s", app.in_flight, drain_s)
    await _until_idle(app, hurry, drain_s)
    if app.in_flight:
        logger.warning("%d requests did not finish in %g s and are ended", app.in_flight, drain_s)
        app.cut("the server is shutting down before this answer was complete; send the request again")
        await _until_idle(app, asyncio.Event(), CLOSE_S)
    server.config.timeout_graceful_shutdown = int(CLOSE_S)
    server.should_exit = True


async def _until_idle(app: FrontApp, hurry: asyncio.Event, limit_s: float) -> None:
    loop = asyncio.get_running_loop()
    end = loop.time() + limit_s
    while app.in_flight and loop.time() < end:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(hurry.wait(), 0.02)
            return


@contextlib.contextmanager
def _signals(stop: asyncio.Event, hurry: asyncio.Event) -> Iterator[None]:
    """The first signal sets `stop`, a second one `hurry`."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()

    def caught(number: int) -> None:
        logger.info("%s received", signal.Signals(number).name)
        (hurry if stop.is_set() else stop).set()

    for number in SIGNALS:
        loop.add_signal_handler(number, caught, number)
    try:
        yield
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
