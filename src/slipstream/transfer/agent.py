"""Moves KV pages for one rank: what the engine, the preflight and the links may ask of it.

The engine submits CopyJobs; their page lists become byte runs (`copies`), the transport of each route writes them as
one ticket, and each job is reported once, when all its tickets have ended. The mover (`transfer.mover`) drives the
transports; a short job is started by whoever submits it while the mover sleeps. Nothing is retried here. A failed job
is reported when nothing of it can still arrive; until then its pages, at both ends, stay taken.

Routes are opened and measured by the preflight (`peer`), one for each pair of ranks that share heads.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial

from slipstream.config import TransferConfig
from slipstream.errors import PeerLost, RouteUnavailable, TransferError
from slipstream.kv.layout import KVLayout
from slipstream.transfer.copies import HeadMove, HeadRange, head_moves
from slipstream.transfer.job import Behind, CopyJob, HostMemory, ProbeMemory, Route, runs_of
from slipstream.transfer.mover import Mover
from slipstream.transfer.order import AUTOMATIC, RDMA
from slipstream.transfer.route import Ranking, machine_id, process_id, rank, unavailable, usable_nics
from slipstream.transfer.routes import Routes, words
from slipstream.transfer.transports import load_all
from slipstream.transfer.transports.base import (
    Context,
    Description,
    Exports,
    Region,
    Runs,
    Transport,
    copies_in_poll,
    inline_bytes,
    ripen,
)
from slipstream.transfer.transports.local import Neighbourhood

logger = logging.getLogger(__name__)

INLINE_PAGES = 256  # in longer jobs the list is worth the mover's waking
INLINE_WRITES = 4  # behind so many nothing begins at once, and queueing more may have to wait for the device


class TransferAgent:
    """The KV memory of one rank, and its ways to and from others.

    `on_done(job, error)` is called exactly once for each submitted job, on the mover thread or within a `submit`;
    `error` is None when every byte is visible to the peer. It must not block; what it raises is logged. `ranks` are the
    head ranges of all ranks of this worker, by default this one alone. `host` is the address that the tcp transport
    listens on. `neighbours` joins agents of one process. `load` makes the transports of these names, or says why not.

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
        self._closed = False
        self._mover = Mover(self._transports)
        self._routes = Routes(self._mover, self._transports, layout)

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

    def submit(self, *jobs: CopyJob) -> None:
        """Starts copies, here and now where that takes no time to speak of and the mover sleeps; queues the others.

        What is over at once, for being small, wrong or behind `close`, is reported on this thread.
        """
        left = deque(jobs)
        self._mover.instead(lambda: self._begin_here(left))
        if not left:
            return
        try:
            self._mover.ask(*(partial(self._begin, job) for job in left))
        except PeerLost as error:
            for job in left:
                self._report(job, error.message)

    def ripe(self, after: Behind) -> None:
        """A step is over (`after.seen` says so) that jobs may wait for. Never waits."""

        def tell() -> None:
            ripen(self._transports.values(), after.event)

        if not self._mover.instead(lambda: tell() is None):
            with contextlib.suppress(PeerLost):  # closed meanwhile
                self._mover.ask(tell)

    def look(self) -> bool:
        """Looks whether copies that waited for a step have ended; what has is reported on this thread. Never waits.

        True when some are still under way, and nobody else is at them.
        """
        return self._mover.instead(self._mover.look) and self._mover.under_way > 0

    def _begin_here(self, jobs: deque[CopyJob]) -> bool:
        """Begins those that are short for all their routes, up to the first that is not, so that nobody has to be woken
        for them."""
        while jobs and self._begun_here(jobs[0]):
            jobs.popleft()
        return True

    def _begun_here(self, job: CopyJob) -> bool:
        routes = self._routes.used(job.peer)
        under_way, pages = self._mover.under_way, len(job.source_pages)
        if not routes or under_way >= INLINE_WRITES or pages > INLINE_PAGES:
            return False
        size = pages * self.region.page_bytes
        if any(size > inline_bytes(self._transports[route.transport]) for route in routes):
            return False
        self._begin(job)
        if under_way == 0 and any(copies_in_poll(self._transports[route.transport]) for route in routes):
            self._mover.collect_written()
        return True

    def _begin(self, job: CopyJob) -> None:
        """With the mover's turn: starts all tickets of a job. Whoever has submitted it waits for its report, so what
        raises is reported."""
        routes = self._routes.used(job.peer)
        if routes is None:
            self._report(job, f"there is no route to {job.peer}")
            return
        try:
            plan = [(route, runs_of(job, route, self.region.pages)) for route in routes]
        except Exception as error:
            self._report(job, words(error))
            return
        if not plan or len(plan[0][1].length) == 0:
            self._report(job, None)
            return
        if job.times is not None:
            job.times.begun = time.monotonic()
            job.times.bytes = sum(runs.total for _, runs in plan)
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
                self._routes.write(route, runs, job.after and job.after.event, ended)
            except Exception as error:
                ended(words(error))
        if job.after is not None and job.after.seen:
            ripen(self._transports.values(), job.after.event)

    def _report(self, job: CopyJob, error: str | None) -> None:
        if job.times is not None:
            job.times.end(time.monotonic(), job.after)
        try:
            self._on_done(job, error)
        except Exception:
            logger.exception("the end of a copy could not be reported")

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
        return self._routes.open(peer, theirs, transport, moves)

    def close_route(self, route: Route) -> Future[None]:
        """Gives up a route that is not in use."""
        return self._routes.close(route)

    def time_writes(self, route: Route, runs: Runs, count: int) -> Future[list[float]]:
        """Writes the same runs `count` times, one after the other; the seconds each took. For preflights.

        Fails with PeerLost or ValueError.
        """
        return self._routes.time_writes(route, runs, count)

    def use(self, peer: str, routes: Sequence[Route]) -> None:
        """From now on, jobs for `peer` go over these routes; without any, this rank has nothing to send to it."""
        self._routes.use(peer, routes)

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

    def pulse(self, answer: Callable[[], None]) -> None:
        """Has the mover call `answer`, which it does at once unless it is stuck. Raises PeerLost behind `close`."""
        self._mover.ask(answer)

    def disconnect(self, peer: str) -> None:
        """Closes all routes to `peer`; blocks until its jobs have been reported, and so nothing reads their pages.

        To be called when the link to the peer has ended. A living peer has stopped receiving by then; one that is
        alive but stopped protects its own memory before it is used again (`source_gone`).
        """
        try:
            future = self._routes.disconnect(peer)
        except PeerLost:
            self._mover.join()
            return
        future.result()

    def close(self) -> None:
        """Fails what is in flight, closes all routes, ends all threads. Afterwards the memory may go."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._routes.end()
        self._mover.stop()

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
