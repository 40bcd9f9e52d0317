"""The opened routes of one rank: how they come, what is written over them, how they go.

A route belongs to a peer, which is one link to another worker; when the link has ended, all routes of the peer are
closed, and that is over when none of its tickets is under way. Opening waits for the peer, so it has a thread; all
else happens with the mover's turn. Futures are answered whatever a transport raises: a preflight that nobody answers
would hold its link for ever.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import msgspec

from slipstream.errors import PeerLost, RouteUnavailable, TransferError
from slipstream.kv.layout import KVLayout
from slipstream.transfer.copies import HeadMove, PageMap
from slipstream.transfer.job import Route
from slipstream.transfer.mover import CLOSED, Ended, Mover
from slipstream.transfer.transports.base import Exports, Remote, Runs, Transport

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Peer:
    """A peer as the mover sees it."""

    opened: list[Route] = field(default_factory=list)
    used: tuple[Route, ...] | None = None  # empty where this rank has nothing to send to this peer
    tickets: int = 0
    leaving: list[Future[None]] = field(default_factory=list)


class Routes:
    """All routes of a rank whose memory has this `layout`.

    `open`, `close`, `time_writes`, `use`, `disconnect` and `end` are for any thread and raise PeerLost when the mover
    has ended; `used` and `write` need its turn.
    """

    def __init__(self, mover: Mover, transports: dict[str, Transport], layout: KVLayout) -> None:
        self._mover, self._transports, self._layout = mover, transports, layout
        self._peers: dict[str, _Peer] = {}
        self._opener = ThreadPoolExecutor(1, thread_name_prefix="slipstream-open")

    # ------------------------------------------------------------------------------------------- any thread

    def open(self, peer: str, theirs: Exports, transport: str, moves: tuple[HeadMove, ...]) -> Future[Route]:
        """Opens one rank of a peer. Fails with RouteUnavailable (or PeerLost), with the reason."""
        future: Future[Route] = Future()
        self._mover.ask(lambda: self._open(peer, theirs, transport, moves, future))
        return future

    def close(self, route: Route) -> Future[None]:
        """Gives up a route that is not in use."""
        future: Future[None] = Future()

        def close() -> None:
            peer = self._peers.get(route.peer)
            if peer is not None and route in peer.opened:
                peer.opened.remove(route)
                peer.used = None if peer.used is None else tuple(used for used in peer.used if used is not route)
                self._close(route)
            future.set_result(None)

        self._mover.ask(close)
        return future

    def time_writes(self, route: Route, runs: Runs, count: int) -> Future[list[float]]:
        """Writes the same runs `count` times, one after the other; the seconds each took. Fails with PeerLost or
        ValueError."""
        future: Future[list[float]] = Future()
        self._mover.ask(lambda: self._time(route, runs, count, [], future))
        return future

    def use(self, peer: str, routes: Sequence[Route]) -> None:
        """From now on these routes are `used` for this peer."""
        self._mover.ask(lambda: self._use(peer, tuple(routes)))

    def disconnect(self, peer: str) -> Future[None]:
        """Closes all routes to a peer; done when none of its tickets is under way."""
        future: Future[None] = Future()
        self._mover.ask(lambda: self._disconnect(peer, future))
        return future

    def end(self) -> None:
        """Disconnects everybody, opens no more, and blocks until that is so."""
        self._opener.shutdown(wait=True, cancel_futures=True)
        everyone: Future[list[Future[None]]] = Future()

        def part() -> None:
            leaving: list[Future[None]] = []
            for name in list(self._peers):
                leaving.append(Future())
                self._disconnect(name, leaving[-1])
            everyone.set_result(leaving)

        self._mover.ask(part)
        for future in everyone.result():
            future.result()

    # ------------------------------------------------------------------------------------------- with the mover's turn

    def used(self, peer: str) -> tuple[Route, ...] | None:
        """The routes of a peer that jobs take: empty where this rank has nothing to send, None where there is none."""
        known = self._peers.get(peer)
        return None if known is None else known.used

    def write(self, route: Route, runs: Runs, after: Any, ended: Ended) -> None:
        """Starts a ticket. Raises ValueError or PeerLost when nothing was started."""
        peer = self._peers.get(route.peer)
        if peer is None:
            raise PeerLost(f"the link to {route.peer} has ended")

        def over(error: str | None) -> None:
            peer.tickets -= 1
            try:
                ended(error)
            finally:
                if peer.tickets == 0:
                    _left(peer)

        self._mover.write(route.transport, route.remote, runs, after, over)
        peer.tickets += 1

    def _open(
        self, name: str, theirs: Exports, transport_name: str, moves: tuple[HeadMove, ...], future: Future[Route]
    ) -> None:
        transport = self._transports.get(transport_name)
        if transport is None:
            future.set_exception(RouteUnavailable(f"this rank has no transport {transport_name!r}"))
            return
        peer = self._peers.setdefault(name, _Peer())
        detail = {d.transport: d.detail for d in theirs.descriptions}.get(transport_name, b"")

        def attempt() -> None:
            try:
                remote = transport.open(theirs, detail)
            except Exception as error:
                future.set_exception(error if isinstance(error, TransferError) else RouteUnavailable(words(error)))
                return
            self._mover.ask(lambda: opened(remote))

        def opened(remote: Remote) -> None:
            if self._peers.get(name) is not peer:
                transport.close(remote)
                future.set_exception(PeerLost(f"the link to {name} ended while its memory was being opened"))
                return
            layout = msgspec.structs.replace(self._layout, first_head=theirs.first_head, kv_heads=theirs.heads)
            try:
                maps = tuple(PageMap(self._layout, layout, move.heads) for move in moves)
            except ValueError as error:
                transport.close(remote)
                future.set_exception(RouteUnavailable(str(error)))
                return
            route = Route(name, transport_name, theirs, remote, moves, maps)
            peer.opened.append(route)
            future.set_result(route)

        if not transport.open_blocks:
            attempt()
            return
        try:
            self._opener.submit(attempt).add_done_callback(
                lambda task: future.set_exception(PeerLost(CLOSED)) if task.cancelled() else None
            )
        except RuntimeError:
            future.set_exception(PeerLost(CLOSED))

    def _use(self, name: str, routes: tuple[Route, ...]) -> None:
        peer = self._peers.get(name) if routes else self._peers.setdefault(name, _Peer())
        if peer is not None:
            peer.used = tuple(route for route in routes if route in peer.opened)

    def _time(self, route: Route, runs: Runs, left: int, seconds: list[float], future: Future[list[float]]) -> None:
        started = time.perf_counter()

        def ended(error: str | None) -> None:
            seconds.append(time.perf_counter() - started)
            if error is not None:
                future.set_exception(PeerLost(error))
            elif left > 1:
                self._time(route, runs, left - 1, seconds, future)
            else:
                future.set_result(seconds)

        try:
            self.write(route, runs, None, ended)
        except Exception as error:
            future.set_exception(error if isinstance(error, (ValueError, TransferError)) else PeerLost(words(error)))

    def _disconnect(self, name: str, future: Future[None]) -> None:
        peer = self._peers.pop(name, None)
        if peer is None:
            future.set_result(None)
            return
        peer.leaving.append(future)
        for route in list(peer.opened):
            self._close(route)
        if peer.tickets == 0:
            _left(peer)

    def _close(self, route: Route) -> None:
        try:
            self._transports[route.transport].close(route.remote)
        except Exception:
            logger.exception("a route to %s could not be closed in order", route.peer)


def _left(peer: _Peer) -> None:
    for future in peer.leaving:
        future.set_result(None)
    peer.leaving.clear()


def words(error: Exception) -> str:
    """Of a failed start. Transports raise the errors below; anything else is a fault, and logged as one."""
    if isinstance(error, (ValueError, TransferError, OSError, msgspec.MsgspecError)):
        return str(error)
    logger.error("a transport failed", exc_info=error)
    return f"the transport failed: {type(error).__name__}: {error}"
