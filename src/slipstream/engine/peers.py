"""Links between workers, as seen by one of them.

As a source, a worker opens one link to each decode worker that a router names, at the latest when a request needs it
and at the earliest when a router says Meet: Hello, Welcome, fingerprints compared, route chosen and proven by its
preflight. As a destination, it answers the links that others open. Handoff messages go straight to the engine loop.

The end of a link is the end of the peer's process or of the way to it. The ranks then close their routes, which returns
only when nothing of them can be in flight, and only then the engine is told that the peer is lost. Each link has a name
of its own for its routes: a copy that was meant for an earlier link to the same peer finds no route.

Nothing of it waits without end. A source pings its destinations: one that answers nothing, and one to which a copy
does not end, loses its link, so that its requests continue elsewhere. If a copy holds up the closing of the routes, the
engine hears of the loss before it; that copy's pages stay taken, at both ends, until it has ended or this process has.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import msgspec

from slipstream import wire
from slipstream.engine.core import EngineCore
from slipstream.engine.loop import Event, Post
from slipstream.errors import LayoutMismatch, PeerLost, SlipstreamError
from slipstream.stream import Link
from slipstream.transfer import peer as handshake
from slipstream.transfer.order import better
from slipstream.transfer.rank import Rank
from slipstream.transfer.transports.base import Exports

logger = logging.getLogger(__name__)

HELLO_S = 10.0
RETRY_S = 1.0
LAST_RETRY_S = 30.0
BEAT_S = 1.0  # between two pings
SILENT_S = 30.0  # without any answer, before a destination is taken for lost
CLOSE_ROUTES_S = 5.0  # for the copies of a lost link to end, before its requests are given up

_from_destination = wire.Decoder(wire.FromDestination)


class Peers:
    """All links of one worker to other workers. Lives on the IO thread's event loop; `link` is for any thread.

    `ranks` are those of this worker. `post` has events applied to the engine's core; `take_way(peer, way)` is called
    there before anything of a new link, whose routes the ranks know as `way`; `on_routes` is called when the set of
    routes changed. `oldest_copy(way)` is the number of the oldest copy under way there, None when none is; a link on
    which it is the same one for `copy_timeout_s` ends (0: none does).
    """

    def __init__(
        self,
        info: wire.WorkerInfo,
        ranks: Sequence[Rank],
        wanted_transport: str,
        post: Post,
        take_way: Callable[[str, str], None],
        on_routes: Callable[[], None],
        *,
        oldest_copy: Callable[[str], int | None] = lambda way: None,
        copy_timeout_s: float = 0.0,
    ) -> None:
        self._oldest_copy, self._copy_timeout_s = oldest_copy, copy_timeout_s
        self._closing_routes: list[str] = []  # those whose link has ended, the oldest first
        self._info = info
        self._ranks = ranks
        self._wanted_transport = wanted_transport
        self._kind = ranks[0].exports.kind
        self._take_way = take_way
        self._numbers = itertools.count(1)
        self._post = post
        self._on_routes = on_routes
        self._opening: dict[str, asyncio.Task[str]] = {}  # wire address -> peer id
        self._links: dict[tuple[str, bool], Link] = {}  # (peer id, I am the source) -> link
        self._wanted: dict[str, frozenset[str]] = {}  # router id -> wire addresses of workers to be linked to
        self._kept: set[str] = set()  # those of them that `_keep` looks after
        self._served: dict[str, asyncio.Event] = {}  # peer id -> set when the link that this source opened is done with
        self._keepers: set[asyncio.Task[None]] = set()
        self._readers: set[asyncio.Task[None]] = set()
        self._closing = False
        self._routes: dict[str, list[wire.RouteReport]] = {}  # peer id -> a report for each pair of ranks
        self._unreached: dict[str, wire.RouteReport] = {}  # wire address -> why there is no route to it
        self._gone: dict[str, str] = {}  # peer id -> why the last link that it opened has ended

    def link(self, peer: str, *, as_source: bool) -> Link | None:
        """The link to a live peer. The engine hears of the loss of one by its reader; nobody else has to be told."""
        return self._links.get((peer, as_source))

    @property
    def links(self) -> list[Link]:
        """All that are open, to and from other workers."""
        return list(self._links.values())

    @property
    def routes(self) -> list[wire.RouteReport]:
        """All proven routes, and for each address that could not be reached a report with its `error`."""
        return [*itertools.chain.from_iterable(self._routes.values()), *self._unreached.values()]

    def met(self, address: str) -> str | None:
        """The id of the worker at `address` if it is linked now."""
        task = self._opening.get(address)
        done = task is not None and task.done() and not task.cancelled() and task.exception() is None
        return task.result() if task is not None and done else None

    def meet(self, router: str, addresses: Sequence[str]) -> None:
        """Keeps links to these workers open while this router wants them; they replace those it named before."""
        self._wanted[router] = frozenset(addresses)
        for address in set(addresses) - self._kept:
            self._kept.add(address)
            self._start(self._keepers, self._keep(address))

    def forget_router(self, router: str) -> None:
        self._wanted.pop(router, None)

    async def _keep(self, address: str) -> None:
        said, pause = "", RETRY_S
        while any(address in wanted for wanted in self._wanted.values()):
            try:
                await self.open(address)
                said, pause = "", RETRY_S
            except SlipstreamError as error:
                if error.message == said:
                    pause = min(2 * pause, LAST_RETRY_S)
                else:
                    said, pause = error.message, RETRY_S
                    logger.warning("no route to %s: %s", address, said)
            await asyncio.sleep(pause)
        self._kept.discard(address)
        self._unreached.pop(address, None)

    async def open(self, address: str) -> str:
        """The id of the worker at `address`, linked and with a proven route. Raises SlipstreamError."""
        task = self._opening.get(address)
        if task is None:
            task = asyncio.create_task(self._open(address))
            self._opening[address] = task
            task.add_done_callback(partial(self._opened, address))
        return await asyncio.shield(task)

    def _opened(self, address: str, task: asyncio.Task[str]) -> None:
        self._unreached.pop(address, None)
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or error is not None:
            self._opening.pop(address, None)
        if error is not None and address in self._kept:
            self._unreached[address] = wire.RouteReport(peer=address, transport="none", error=str(error))
            self._on_routes()

    async def _open(self, address: str) -> str:
        try:
            link = await Link.connect(address, _from_destination)
        except (OSError, TimeoutError, ValueError, OverflowError) as error:
            raise PeerLost(f"cannot reach the decode worker at {address}: {error or 'timed out'}") from error
        try:
            peer, way, reports = await self._introduce(link)
        except SlipstreamError as error:
            link.close(error.message)
            raise
        except BaseException:
            link.close()
            raise
        self._links[peer.id, True] = link
        self._routes[peer.id] = reports
        for report in reports:
            self._say(peer, report)
        self._on_routes()
        self._post(lambda core: self._take_way(peer.id, way))
        self._start(self._readers, self._read_destination(link, address, peer.id, way))
        return peer.id

    def _say(self, peer: wire.WorkerInfo, report: wire.RouteReport) -> None:
        several = peer.tp_size > 1 or self._info.tp_size > 1
        logger.info(
            "route to %s%s: %s, %.1f GB/s, %.0f us%s",
            peer.name,
            f", rank {report.source_rank} to rank {report.destination_rank}" if several else "",
            report.transport,
            report.gb_per_s,
            report.latency_us,
            "".join(f"; not {name}: {reason}" for name, reason in self._better(report).items()),
        )

    def _better(self, report: wire.RouteReport) -> dict[str, str]:
        """Why the transports that rank before the chosen one were not taken; those for GPUs only where there is one."""
        known = better(report.transport, report.rejected, report.rdma)
        return {name: reason for name, reason in known.items() if self._kind == "cuda" or name != "cuda_ipc"}

    async def _introduce(self, link: Link) -> tuple[wire.WorkerInfo, str, list[wire.RouteReport]]:
        hello = wire.Hello(
            kind="worker", id=self._info.id, version=self._info.version, info=self._info, regions=self._regions()
        )
        link.send(hello)
        try:
            async with asyncio.timeout(HELLO_S):
                answer = await link.receive()
        except TimeoutError as error:
            raise PeerLost(f"{link.label} did not answer Hello within {HELLO_S:.0f} s") from error
        if isinstance(answer, wire.Rejected):
            raise LayoutMismatch(answer.message)
        if not isinstance(answer, wire.Welcome):
            raise PeerLost(link.lost_because or f"{link.label} answered Hello with {type(answer).__name__}")
        link.label = f"{answer.info.name} ({answer.info.http})"
        try:
            exports = decode_exports(answer.regions)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise PeerLost(f"the regions of {link.label} cannot be read: {error}") from error
        way = f"{answer.info.id}/{next(self._numbers)}"
        reports = await handshake.open_as_source(link, self._ranks, way, exports, wanted=self._wanted_transport)
        return answer.info, way, [msgspec.structs.replace(report, peer=answer.info.name) for report in reports]

    async def _read_destination(self, link: Link, address: str, peer: str, way: str) -> None:
        heard = asyncio.Event()

        def take(messages: Sequence[wire.Message]) -> Sequence[wire.Message]:
            heard.set()
            said = [message for message in messages if not isinstance(message, wire.Pong)]
            if said:
                self._post(*(partial(EngineCore.from_destination, peer_id=peer, message=message) for message in said))
            return ()

        link.divert(take)
        self._start(self._keepers, self._beat(link, way, heard))
        while await link.receive() is not None:
            pass
        if self._closing:
            logger.debug("decode worker gone, since this worker ends: %s", link.label)
        elif link.farewell is not None:
            logger.info("decode worker gone: %s", link.lost_because)
        else:
            logger.warning("decode worker lost: %s", link.lost_because)
        await self._destination_lost(peer, way)
        self._opening.pop(address, None)  # behind the loss: whoever opens anew finds it settled

    async def _beat(self, link: Link, way: str, heard: asyncio.Event) -> None:
        """Ends a link on which nothing is heard any more, or a copy does not end. Counts beats, not seconds, so that a
        worker that was itself held up does not blame its peers."""
        silent = still = 0
        oldest = None
        while not link.closing:
            heard.clear()
            link.send(wire.Ping(n=silent))
            await asyncio.sleep(BEAT_S)
            silent = 0 if heard.is_set() else silent + 1
            before, oldest = oldest, self._oldest_copy(way)
            still = still + 1 if oldest is not None and oldest == before else 0
            reason = ""
            if silent * BEAT_S >= SILENT_S:
                reason = f"{link.label} has answered nothing for {SILENT_S:.0f} s"
            elif 0 < self._copy_timeout_s <= still * BEAT_S:
                reason = f"a copy to {link.label} has not ended for {still * BEAT_S:.0f} s (--step-timeout-s)"
            if reason:
                link.lost_because = reason
                link.abort()
                return

    def closing_route(self) -> str | None:
        """The routes of a lost link that have been closing for longest. From any thread."""
        return next(iter(self._closing_routes), None)

    # ------------------------------------------------------------------------------------------- as a destination

    async def accept(self, link: Link, hello: wire.Hello) -> None:
        """Serves a link that another worker opened, until it ends."""
        theirs: list[Exports] = []
        problem = self._mismatch(hello)
        if not problem:
            try:
                theirs = decode_exports(hello.regions)
            except (msgspec.MsgspecError, RecursionError) as error:
                problem = f"the regions of {link.label} cannot be read: {error}"
        if problem:
            logger.warning("refused %s: %s", link.label, problem)
            link.send(wire.Rejected(code=LayoutMismatch.code, message=problem))
            link.close()
            return
        assert hello.info is not None
        peer = hello.info.id
        link.label = f"{hello.info.name} ({hello.info.http})"
        await self._end_former(peer)
        ended = self._served[peer] = asyncio.Event()
        self._links[peer, False] = link
        # Admitted before it is told so: it may open our memory the moment it reads Welcome.
        probes = handshake.DestinationProbes(link, self._ranks, peer)
        try:
            await probes.begin(theirs)
            link.send(wire.Welcome(info=self._info, regions=self._regions()))
            link.divert(partial(self._from_source, peer, link))
            while (message := await link.receive()) is not None:
                await probes.handle(message)
        finally:
            await probes.close()
            because = link.lost_because or f"{link.label}: this worker ends"
            again = self._gone.get(peer) == because  # it tries anew what it was refused, and fails as before
            self._gone[peer] = because
            level = logging.DEBUG if self._closing or again else logging.INFO
            logger.log(level, "prefill worker gone: %s", because)
            await self._source_lost(peer)
            self._served.pop(peer, None)
            ended.set()

    def _from_source(self, peer: str, link: Link, messages: Sequence[wire.Message]) -> Sequence[wire.Message]:
        """Gives what is of handoffs to the engine; returns what is of preflights."""
        probing: list[wire.Message] = []
        events: list[Event] = []
        for message in messages:
            if isinstance(message, wire.Ping):
                link.send(wire.Pong(n=message.n))
            elif isinstance(message, wire.Probe):
                probing.append(message)
            else:
                events.append(partial(EngineCore.from_source, peer_id=peer, message=message))
        if events:
            self._post(*events)
            self._post(EngineCore.catch_up)  # what they leave to do, behind the answers
        return probing

    async def _end_former(self, peer: str) -> None:
        """A source that connects anew has lost its link, though its end may not have been seen here yet.

        The engine must hear of that loss, with its proof that no write is under way, before anything from the new link.
        """
        while (ended := self._served.get(peer)) is not None:
            former = self._links.get((peer, False))
            if former is not None:
                former.abort()
            await ended.wait()

    def _mismatch(self, hello: wire.Hello) -> str:
        if hello.protocol != wire.PROTOCOL:
            return (
                f"protocol version differs: this worker speaks {wire.PROTOCOL}, {hello.id} speaks {hello.protocol}. "
                "Run the same slipstream version everywhere."
            )
        if hello.info is None:
            return "a worker's Hello must carry its info"
        return mismatch(self._info, hello.info)

    async def _destination_lost(self, peer: str, way: str) -> None:
        self._links.pop((peer, True), None)
        self._routes.pop(peer, None)
        self._closing_routes.append(way)
        closed = asyncio.ensure_future(handshake.disconnect(self._ranks, way))
        await asyncio.wait([closed], timeout=CLOSE_ROUTES_S)
        if not closed.done():
            logger.error(
                "a copy over the routes %s runs on %g s after their link has ended; its pages stay taken, its request "
                "continues elsewhere", way, CLOSE_ROUTES_S,
            )  # fmt: skip
        self._post(partial(EngineCore.destination_lost, peer_id=peer))
        self._on_routes()
        try:
            await closed
        finally:
            self._closing_routes.remove(way)

    async def _source_lost(self, peer: str) -> None:
        self._links.pop((peer, False), None)
        if await handshake.source_gone(self._ranks, peer):  # otherwise this worker is ending itself
            self._post(partial(EngineCore.source_lost, peer_id=peer))

    def _regions(self) -> list[msgspec.Raw]:
        return [msgspec.Raw(msgspec.msgpack.encode(rank.exports)) for rank in self._ranks]

    @staticmethod
    def _start(tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def say_goodbye(self, reason: str) -> None:
        """Ends all links and opens no more."""
        self._closing = True
        self._wanted.clear()
        for task in self._keepers:
            task.cancel()
        for link in self._links.values():
            link.close(reason)

    async def close(self) -> None:
        """Returns when what the ends of all links ask for has been done."""
        await asyncio.gather(*self._keepers, *self._readers, return_exceptions=True)


def decode_exports(regions: Sequence[msgspec.Raw]) -> list[Exports]:
    return [msgspec.msgpack.decode(region, type=Exports) for region in regions]


def mismatch(mine: wire.WorkerInfo, theirs: wire.WorkerInfo) -> str:
    """Why two workers cannot exchange KV pages, in one sentence with the remedy; empty when they can."""
    if mine.fingerprint == theirs.fingerprint:
        return ""
    return (
        f"KV layouts differ: {mine.name} has {mine.fingerprint_text}; {theirs.name} has {theirs.fingerprint_text}. "
        "Start both with the same model, --dtype and --page-tokens."
    )
