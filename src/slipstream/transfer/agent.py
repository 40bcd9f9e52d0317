"""Moves KV pages for one rank: the mover thread and what may be asked of it.

The engine submits CopyJobs; the mover turns their page lists into byte runs (`copies`), lets the transport of each
route write them as one ticket, and reports each job once, when all its tickets have ended. It sleeps on one selector:
its own bell for what other threads ask, and the descriptors of the transports for what has happened to tickets. While
it sleeps, whoever submits a short job starts it. Nothing is retried here. A failed job is reported when nothing of it
can still arrive; until then its pages, at both ends, stay taken.

Routes are opened and measured by the preflight (`peer`), one for each pair of ranks that share heads.
"""

from __future__ import annotations

import logging
import selectors
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import msgspec

from slipstream.config import TransferConfig
from slipstream.errors import PeerLost, RouteUnavailable, TransferError
from slipstream.kv.layout import KVLayout
from slipstream.transfer.copies import HeadMove, HeadRange, head_moves
from slipstream.transfer.job import CopyJob, HostMemory, ProbeMemory, Route, runs_of
from slipstream.transfer.order import AUTOMATIC, RDMA
from slipstream.transfer.route import (
    Ranking,
    machine_id,
    process_id,
    rank,
    unavailable,
    usable_nics,
)
from slipstream.transfer.transports import load_all
from slipstream.transfer.transports.base import (
    Context,
    Description,
    Exports,
    Region,
    Remote,
    Runs,
    Transport,
    inline_bytes,
)
from slipstream.transfer.transports.bell import Bell
from slipstream.transfer.transports.local import Neighbourhood

logger = logging.getLogger(__name__)

INLINE_PAGES = 256  # in longer jobs the list is worth the mover's waking


@dataclass(slots=True, eq=False)
class _Peer:
    """A peer as the mover sees it."""

    name: str
    opened: list[Route] = field(default_factory=list)
    used: tuple[Route, ...] | None = None  # empty where this rank has nothing to send to this peer
    tickets: int = 0
    leaving: list[Future[None]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Write:
    """One ticket under way, and who is told of its end."""

    peer: _Peer
    ended: Callable[[str | None], None]


class TransferAgent:
    """The KV memory of one rank, and its ways to and from others.

    `on_done(job, error)` is called exactly once for each submitted job, on the mover thread or within `submit`; `error`
    is None when every byte is visible to the peer. It must not block. `ranks` are the head ranges of all ranks of this
    worker, by default this one alone. `host` is the address that the tcp transport listens on. `neighbours` joins
    agents of one process.
    `load` makes the transports of these names, or says why not.

    All methods may be called from any thread; none but `connect`, `disconnect`, `source_gone` and `close` blocks. After
    `close` they raise PeerLost or do nothing.
    """

    def __init__(
        self,
        region: Region,
        layout: KVLayout,
        config: TransferConfig,
        *,
        on_done: Callable[[CopyJob, str | None], None],
        rank: int = 0,
        ranks: Sequence[HeadRange] | None = None,
        host: str = "127.0.0.1",
        neighbours: Neighbourhood | None = None,
        memory: ProbeMemory | None = None,
        load: Callable[[Sequence[str], Context], tuple[dict[str, Transport], dict[str, str]]] = load_all,
    ) -> None:
        self.region, self.layout, self.config, self.rank = region, layout, config, rank
        self.name = uuid.uuid4().hex
        self.memory: ProbeMemory = memory or HostMemory(region)
        self._ranks = list(ranks or [HeadRange(layout.first_head, layout.kv_heads)])
        self._on_done = on_done
        context = Context(region, config, self.name, host, neighbours)
        wanted: list[str] = list(AUTOMATIC) if config.transport == "auto" else [config.transport]
        self._transports, self._refused = load(wanted, context)
        self._exports = self._describe()
        self._lock = threading.Lock()
        self._admitted: dict[str, set[str]] = {}
        self._cutting: dict[str, list[Future[None]]] = {}
        self._commands: deque[Callable[[], None]] = deque()
        self._peers: dict[str, _Peer] = {}
        self._writes: dict[tuple[str, int], _Write] = {}
        self._written: set[str] = set()  # transports that got a write since they were last polled
        self._turn = threading.Lock()  # whoever holds it does the mover's work: the mover, while it does not sleep
        self._bell = Bell()
        self._closed = False
        self._running = True
        self._opener = ThreadPoolExecutor(1, thread_name_prefix="slipstream-open")
        self._thread = threading.Thread(target=self._run, name="slipstream-mover", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------- as a destination

    def exports(self) -> Exports:
        """How peers reach this rank's memory; they also have to be admitted."""
        return self._exports

    def admit(self, peer: str, theirs: Sequence[Exports]) -> None:
        """Lets the ranks of `peer` open this memory."""
        names = {exports.agent for exports in theirs}
        with self._lock:
            self._admitted.setdefault(peer, set()).update(names)
        for name in names:
            for transport in self._transports.values():
                transport.admit(name)

    def source_gone(self, peer: str) -> bool:
        """Ends what `admit` began, and blocks until no write of `peer` can still arrive; True when that is proven.

        A dead process, or a living one that answers, is proven gone within milliseconds. With `shm`, a process that is
        alive but stopped is waited for as long as that lasts. False only when this agent was closed meanwhile.
        """
        with self._lock:
            names = self._admitted.pop(peer, set())
            cuts = [transport.cut_off(name) for name in names for transport in self._transports.values()]
            waited = self._cutting.setdefault(peer, [])
            waited += cuts
            futures = list(waited)
        try:
            for future in futures:
                future.result()
        except CancelledError:
            return False
        with self._lock:
            self._cutting[peer] = [future for future in self._cutting.get(peer, []) if not future.done()]
            if not self._cutting[peer]:
                del self._cutting[peer]
        return True

    # ------------------------------------------------------------------------------------------- as a source

    def submit(self, job: CopyJob) -> None:
        """Starts a copy, here and now where that takes no time to speak of and the mover sleeps; else queues it.

        What is over at once, for being small, wrong or behind `close`, is reported on this thread.
        """
        if self._started_here(job):
            return
        try:
            self._ask(lambda: self._begin(job))
        except PeerLost as error:
            self._report(job, error.message)

    def _started_here(self, job: CopyJob) -> bool:
        """Does the mover's work if it is not at it, so that nobody has to be woken."""
        if len(job.source_pages) > INLINE_PAGES or not self._turn.acquire(blocking=False):
            return False
        try:
            peer = self._peers.get(job.peer)
            if self._commands or not self._running or peer is None or not peer.used:
                return False
            size = len(job.source_pages) * self.region.page_bytes
            if any(size > inline_bytes(self._transports[route.transport]) for route in peer.used):
                return False
            alone = not self._writes
            self._begin(job)
            if alone:
                self._collect_written()
        finally:
            self._turn.release()
        return True

    def candidates(self, theirs: Exports) -> Ranking:
        """The transports to try for one rank of a peer. Raises RouteUnavailable when there is none."""
        return rank(self._exports, theirs, self._transports, self._refused, self.config.transport)

    def moves_to(self, theirs: Sequence[Exports]) -> dict[int, tuple[HeadMove, ...]]:
        """What this rank sends: destination rank -> moves. `theirs` are all ranks of the peer, in order."""
        moves = head_moves(self._ranks, [HeadRange(exports.first_head, exports.heads) for exports in theirs])
        mine = [move for move in moves if move.source_rank == self.rank]
        return {
            destination: tuple(move for move in mine if move.destination_rank == destination)
            for destination in sorted({move.destination_rank for move in mine})
        }

    def open_route(self, peer: str, theirs: Exports, transport: str, moves: tuple[HeadMove, ...]) -> Future[Route]:
        """Opens one rank of a peer. Fails with RouteUnavailable (or PeerLost), with the reason."""
        future: Future[Route] = Future()
        self._ask(lambda: self._open(peer, theirs, transport, moves, future))
        return future

    def close_route(self, route: Route) -> Future[None]:
        """Gives up a route that is not in use."""
        future: Future[None] = Future()

        def close() -> None:
            self._close_route(route)
            future.set_result(None)

        self._ask(close)
        return future

    def time_writes(self, route: Route, runs: Runs, count: int) -> Future[list[float]]:
        """Writes the same runs `count` times, one after the other; the seconds each took. For preflights.

        Fails with PeerLost or ValueError.
        """
        future: Future[list[float]] = Future()
        self._ask(lambda: self._time(route, runs, count, [], future))
        return future

    def use(self, peer: str, routes: Sequence[Route]) -> None:
        """From now on, jobs for `peer` go over these routes; without any, this rank has nothing to send to it."""
        self._ask(lambda: self._use(peer, tuple(routes)))

    def connect(self, peer: str, theirs: Sequence[Exports]) -> list[Route]:
        """Opens the best transport that opens, without a preflight, to all ranks that need this one; blocks.

        Raises RouteUnavailable with all reasons.
        """
        routes: list[Route] = []
        for destination, moves in self.moves_to(theirs).items():
            ranking = self.candidates(theirs[destination])
            rejected = dict(ranking.rejected)
            for name in ranking.candidates:
                try:
                    routes.append(self.open_route(peer, theirs[destination], name, moves).result())
                    break
                except TransferError as error:
                    rejected[name] = error.message
            else:
                raise RouteUnavailable(unavailable(self.config.transport, rejected))
        self.use(peer, routes)
        return routes

    def disconnect(self, peer: str) -> None:
        """Closes all routes to `peer`; blocks until its jobs have been reported, and so nothing reads their pages.

        To be called when the link to the peer has ended. A living peer has stopped receiving by then; one that is
        alive but stopped protects its own memory before it is used again (`source_gone`).
        """
        future: Future[None] = Future()
        try:
            self._ask(lambda: self._disconnect(peer, future))
        except PeerLost:
            self._thread.join()
            return
        future.result()

    def close(self) -> None:
        """Fails what is in flight, closes all routes, ends all threads. Afterwards the memory may go."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._opener.shutdown(wait=True, cancel_futures=True)
        everyone: Future[list[Future[None]]] = Future()

        def part() -> None:
            leaving: list[Future[None]] = []
            for name in list(self._peers):
                leaving.append(Future())
                self._disconnect(name, leaving[-1])
            everyone.set_result(leaving)

        self._ask(part)
        for future in everyone.result():
            future.result()
        self._ask(self._stop)
        self._thread.join()
        self._bell.close()

    # ------------------------------------------------------------------------------------------- the mover thread

    def _ask(self, command: Callable[[], None]) -> None:
        """Has the mover do this. Raises PeerLost when the agent is closed."""
        with self._lock:
            if not self._running:
                raise PeerLost("the transfer agent of this worker is closed")
            self._commands.append(command)
        self._bell.ring()

    def _stop(self) -> None:
        with self._lock:
            self._running = False

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._bell.fileno(), selectors.EVENT_READ, None)
            for transport in self._transports.values():
                selector.register(transport.fileno(), selectors.EVENT_READ, transport)
            while self._running:
                ready = selector.select()
                with self._turn:
                    for key, _ in ready:
                        if key.data is None:
                            self._bell.hush()
                            self._obey()
                        else:
                            self._collect(key.data)
        for transport in self._transports.values():
            transport.shutdown()

    def _obey(self) -> None:
        while self._commands:
            command = self._commands.popleft()
            try:
                command()
            except Exception:
                logger.exception("the transfer agent failed at a command")
        self._collect_written()

    def _collect_written(self) -> None:
        """Saves a turn of the selector."""
        written, self._written = self._written, set()
        for name in written:
            self._collect(self._transports[name])

    def _collect(self, transport: Transport) -> None:
        for completion in transport.poll():
            write = self._writes.pop((transport.name, completion.ticket), None)
            if write is None:
                logger.error("%s reported ticket %d, which is not under way", transport.name, completion.ticket)
                continue
            write.peer.tickets -= 1
            try:
                write.ended(completion.error)
            except Exception:
                logger.exception("the transfer agent failed at the end of a copy")
            if write.peer.tickets == 0:
                self._left(write.peer)

    def _write(self, route: Route, runs: Runs, after: Any, ended: Callable[[str | None], None]) -> None:
        """Raises ValueError or PeerLost when nothing was started."""
        ticket = self._transports[route.transport].write(route.remote, runs, after)
        peer = self._peers[route.peer]
        peer.tickets += 1
        self._writes[route.transport, ticket] = _Write(peer, ended)
        self._written.add(route.transport)

    # jobs

    def _begin(self, job: CopyJob) -> None:
        peer = self._peers.get(job.peer)
        if peer is None or peer.used is None:
            self._report(job, f"there is no route to {job.peer}")
            return
        try:
            plan = [(route, runs_of(job, route, self.layout, self.region.pages)) for route in peer.used]
        except ValueError as error:
            self._report(job, str(error))
            return
        if not plan or len(plan[0][1].length) == 0:
            self._report(job, None)
            return
        if job.times is not None:
            job.times.begun = time.monotonic()
            job.times.bytes = sum(int(runs.length.sum()) for _, runs in plan)
            job.times.transport = plan[0][0].transport
        left, errors = len(plan), list[str]()

        def ended(error: str | None) -> None:
            nonlocal left
            left -= 1
            if error is not None:
                errors.append(error)
            if left == 0:
                self._report(job, errors[0] if errors else None)

        for route, runs in plan:
            try:
                self._write(route, runs, job.after, ended)
            except (ValueError, TransferError) as error:
                ended(str(error))

    def _report(self, job: CopyJob, error: str | None) -> None:
        if job.times is not None:
            job.times.ended = time.monotonic()
        self._on_done(job, error)

    # routes

    def _open(
        self, name: str, theirs: Exports, transport_name: str, moves: tuple[HeadMove, ...], future: Future[Route]
    ) -> None:
        peer = self._peers.setdefault(name, _Peer(name))
        transport = self._transports[transport_name]
        detail = {d.transport: d.detail for d in theirs.descriptions}.get(transport_name, b"")

        def attempt() -> None:
            try:
                remote = transport.open(theirs, detail)
            except (TransferError, OSError, ValueError, msgspec.MsgspecError) as error:
                future.set_exception(error if isinstance(error, TransferError) else RouteUnavailable(str(error)))
                return
            self._ask(lambda: opened(remote))

        def opened(remote: Remote) -> None:
            if self._peers.get(name) is not peer:
                transport.close(remote)
                future.set_exception(PeerLost(f"the link to {name} ended while its memory was being opened"))
                return
            layout = msgspec.structs.replace(self.layout, first_head=theirs.first_head, kv_heads=theirs.heads)
            route = Route(name, transport_name, theirs, remote, layout, moves)
            peer.opened.append(route)
            future.set_result(route)

        if not transport.open_blocks:
            attempt()
            return
        try:
            self._opener.submit(attempt).add_done_callback(
                lambda task: future.set_exception(PeerLost("the agent was closed")) if task.cancelled() else None
            )
        except RuntimeError:
            future.set_exception(PeerLost("the transfer agent of this worker is closed"))

    def _close_route(self, route: Route) -> None:
        peer = self._peers.get(route.peer)
        if peer is not None and route in peer.opened:
            peer.opened.remove(route)
            peer.used = None if peer.used is None else tuple(used for used in peer.used if used is not route)
            self._transports[route.transport].close(route.remote)

    def _use(self, name: str, routes: tuple[Route, ...]) -> None:
        peer = self._peers.get(name) if routes else self._peers.setdefault(name, _Peer(name))
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
            if route.peer not in self._peers:
                raise PeerLost(f"the link to {route.peer} has ended")
            self._write(route, runs, None, ended)
        except (ValueError, TransferError) as error:
            future.set_exception(error)

    def _disconnect(self, name: str, future: Future[None]) -> None:
        peer = self._peers.pop(name, None)
        if peer is None:
            future.set_result(None)
            return
        peer.leaving.append(future)
        for route in list(peer.opened):
            self._transports[route.transport].close(route.remote)
        if peer.tickets == 0:
            self._left(peer)

    def _left(self, peer: _Peer) -> None:
        for future in peer.leaving:
            future.set_result(None)
        peer.leaving.clear()

    def _describe(self) -> Exports:
        region, layout = self.region, self.layout
        return Exports(
            rank=self.rank,
            first_head=layout.first_head,
            heads=layout.kv_heads,
            kind=region.kind,
            device=region.device,
            bytes=region.bytes,
            page_bytes=region.page_bytes,
            pages=region.pages,
            probe_offset=region.probe_offset,
            probe_bytes=region.bytes - region.probe_offset,
            machine=machine_id(),
            process=process_id(),
            agent=self.name,
            descriptions=[Description(name, transport.export()) for name, transport in self._transports.items()],
            refused=dict(self._refused),
            rdma=any(name in self._transports for name in RDMA) and bool(usable_nics()),
        )
