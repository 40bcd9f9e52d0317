"""The preflight between Welcome and the first Offer: proves and measures a route before a request needs it.

For each pair of ranks that share heads, the source opens the best candidate and asks for the destination's probe area
(ProbeOpen); the destination, which serves one preflight at a time, blanks it and grants it. The source writes a seeded
pattern, scattered, with the transport that pages will use; the destination compares its own memory with what has to be
there (ProbeWritten, ProbeResult). Then the source times the same writes, for bandwidth, and single small ones, for
latency, and frees the area. A candidate that does not open, does not verify or breaks is rejected with its reason and
the next one is tried.

The probe area of each rank has two halves: peers write into the first; the second is what this rank's own preflights
send, so that two workers may probe each other at the same time. Nothing here blocks the event loop, and nothing here
touches memory: the ranks do (`transfer.rank`), whichever process they live in.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from slipstream import wire
from slipstream.errors import PeerLost, RouteUnavailable, TransferError
from slipstream.stream import Link
from slipstream.transfer.copies import HeadMove, HeadRange, head_moves
from slipstream.transfer.rank import Area, Figures, Rank
from slipstream.transfer.route import unavailable
from slipstream.transfer.transports.base import Exports

Answer = TypeVar("Answer", bound=wire.Message)

ANSWER_S = 10.0


async def open_as_source(
    link: Link, ranks: Sequence[Rank], peer: str, theirs: Sequence[Exports], *, wanted: str = "auto"
) -> list[wire.RouteReport]:
    """Finds, proves and measures the routes from our ranks to all ranks of `peer`, and takes them into use.

    Reads from the link itself: to be awaited after Welcome, before anybody else reads. Returns one report for each pair
    of ranks that share heads. Raises RouteUnavailable with every reason when a pair has no route, PeerLost when the
    link ends; the caller then closes the link, and all routes to the peer are closed. `wanted` is the transport that
    was asked for.
    """
    preflight = _Preflight(link, peer, wanted)
    try:
        reports = [
            await preflight.find(ranks[source], theirs[destination], moves)
            for (source, destination), moves in moves_between([rank.exports for rank in ranks], theirs).items()
        ]
        for rank in ranks:
            await rank.use(peer)
    except BaseException:
        await asyncio.shield(disconnect(ranks, peer))
        raise
    return reports


def moves_between(mine: Sequence[Exports], theirs: Sequence[Exports]) -> dict[tuple[int, int], list[HeadMove]]:
    """What each of our ranks sends to each of theirs: (source rank, destination rank) -> heads.

    Raises RouteUnavailable when our ranks do not hold what theirs need, or either side's ranks are not in order.
    """
    for side, ranks in (("this worker", mine), ("the peer", theirs)):
        if [exports.rank for exports in ranks] != list(range(len(ranks))):
            raise RouteUnavailable(f"the ranks of {side} come as {[exports.rank for exports in ranks]}")
    try:
        moves = head_moves(*([HeadRange(e.first_head, e.heads) for e in ranks] for ranks in (mine, theirs)))
    except ValueError as error:
        raise RouteUnavailable(f"the ranks of the two workers hold different heads: {error}") from error
    pairs: dict[tuple[int, int], list[HeadMove]] = {}
    for move in moves:
        pairs.setdefault((move.source_rank, move.destination_rank), []).append(move)
    return pairs


async def disconnect(ranks: Sequence[Rank], peer: str) -> None:
    """Closes the routes of all ranks to `peer`; a rank whose process is gone has none."""
    for ended in await asyncio.gather(*(rank.disconnect(peer) for rank in ranks), return_exceptions=True):
        if isinstance(ended, BaseException) and not isinstance(ended, PeerLost):
            raise ended


async def source_gone(ranks: Sequence[Rank], peer: str) -> bool:
    """True when it is proven for every rank's memory that no rank of `peer` can still write into it."""
    proofs = await asyncio.gather(*(rank.source_gone(peer) for rank in ranks), return_exceptions=True)
    for proof in proofs:
        if isinstance(proof, BaseException) and not isinstance(proof, PeerLost):
            raise proof
    return all(proof is True for proof in proofs)


class _Preflight:
    """The source's side for one peer."""

    def __init__(self, link: Link, peer: str, wanted: str) -> None:
        self._link, self._peer, self._wanted = link, peer, wanted
        self._numbers = itertools.count(1)

    async def find(self, rank: Rank, theirs: Exports, moves: list[HeadMove]) -> wire.RouteReport:
        """Opens the best route between two ranks that passes. Raises RouteUnavailable, PeerLost."""
        ranking = await rank.candidates(theirs)
        rejected = dict(ranking.rejected)
        for name in ranking.candidates:
            try:
                await rank.open(self._peer, theirs, name, moves)
            except TransferError as error:
                rejected[name] = error.message
                continue
            try:
                async with rank.departure:
                    figures = await self._prove(rank, theirs)
            except RouteUnavailable as error:
                rejected[name] = error.message
                await rank.give_up(self._peer, theirs.rank)
                continue
            return wire.RouteReport(
                peer=self._peer,
                transport=name,
                gb_per_s=figures.gb_per_s,
                latency_us=figures.latency_us,
                source_rank=rank.exports.rank,
                destination_rank=theirs.rank,
                rejected=rejected,
                rdma=rank.exports.rdma and theirs.rdma,
            )
        raise RouteUnavailable(unavailable(self._wanted, rejected))

    async def _prove(self, rank: Rank, theirs: Exports) -> Figures:
        """Figures of a route that delivers what it should. Raises RouteUnavailable when it does not."""
        probe = next(self._numbers)
        grant = await self._ask(wire.ProbeOpen(probe=probe, destination_rank=theirs.rank), wire.ProbeGrant)
        if grant.error:
            raise RouteUnavailable(f"the peer refused the preflight: {grant.error}")
        # When it ends in any other way, a write may be in flight still: the area is freed by the end of the link.
        try:
            figures = await self._write_and_time(rank, theirs, grant)
        except RouteUnavailable:
            self._link.send(wire.ProbeClose(probe=probe))
            raise
        self._link.send(wire.ProbeClose(probe=probe))
        return figures

    async def _write_and_time(self, rank: Rank, theirs: Exports, grant: wire.ProbeGrant) -> Figures:
        seed, area = secrets.randbits(31), Area(grant.offset, grant.bytes)
        sent = await rank.send_pattern(self._peer, theirs.rank, area, seed)
        written = wire.ProbeWritten(probe=grant.probe, seed=seed, bytes=sent.bytes, block=sent.block)
        result = await self._ask(written, wire.ProbeResult)
        if result.error:
            raise RouteUnavailable(f"the preflight's bytes did not arrive as sent: {result.error}")
        return await rank.measure(self._peer, theirs.rank, area, seed)

    async def _ask(self, message: wire.Message, kind: type[Answer]) -> Answer:
        self._link.send(message)
        try:
            answer = await asyncio.wait_for(self._link.receive(), ANSWER_S)
        except TimeoutError as error:
            raise PeerLost(f"{self._link.label} did not answer {type(message).__name__} in {ANSWER_S:.0f} s") from error
        if answer is None:
            raise PeerLost(self._link.lost_because or f"{self._link.label} closed the link")
        if not isinstance(answer, kind):
            raise PeerLost(
                f"{self._link.label} answered {type(message).__name__} with {type(answer).__name__}; "
                "it does not speak this protocol"
            )
        return answer


class DestinationProbes:
    """The destination's side of one link, for all ranks of this worker.

    `begin` admits the peer to all of them, `close` ends that. `handle` is given every message of the link and says
    whether it was one of the preflight's; it never waits long.
    """

    def __init__(self, link: Link, ranks: Sequence[Rank], peer: str) -> None:
        self._link, self._ranks, self._peer = link, ranks, peer
        self._tasks: set[asyncio.Task[None]] = set()
        self._holding: tuple[int, Rank] | None = None  # the probe that an area is granted to, and whose that is

    async def begin(self, theirs: Sequence[Exports]) -> None:
        """Lets all ranks of the peer open the memory of ours; to be awaited before it is told so."""
        for rank in self._ranks:
            await rank.admit(self._peer, list(theirs))

    async def handle(self, message: wire.Message) -> bool:
        match message:
            case wire.ProbeOpen():
                self._start(self._grant(message))
            case wire.ProbeWritten():
                self._start(self._verify(message))
            case wire.ProbeClose():
                self._release(message.probe)
            case _:
                return False
        return True

    async def close(self) -> None:
        """The link has ended. An area that was granted stays taken until no write of the peer can arrive."""
        if self._holding is None:
            for task in self._tasks:
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._holding is not None:
            probe, rank = self._holding
            with contextlib.suppress(PeerLost):
                await rank.source_gone(self._peer)
            self._release(probe)

    async def _grant(self, message: wire.ProbeOpen) -> None:
        probe, number = message.probe, message.destination_rank
        if not 0 <= number < len(self._ranks):
            self._refuse(probe, f"there is no rank {number} here; this worker has {len(self._ranks)}")
            return
        if self._holding is not None:
            self._refuse(probe, f"probe {self._holding[0]} of this link is not closed")
            return
        rank = self._ranks[number]
        await rank.arrival.acquire()
        self._holding = (probe, rank)
        try:
            area = await rank.blank()
        except PeerLost as error:
            area = Area(0, 0, error.message)
        if area.error:
            self._release(probe)
            self._refuse(probe, area.error)
        else:
            self._link.send(wire.ProbeGrant(probe=probe, offset=area.offset, bytes=area.bytes))

    def _refuse(self, probe: int, error: str) -> None:
        self._link.send(wire.ProbeGrant(probe=probe, error=error))

    async def _verify(self, message: wire.ProbeWritten) -> None:
        probe, rank = self._holding or (None, None)
        if rank is None or message.probe != probe:
            error = f"probe {message.probe} was not granted"
        else:
            try:
                error = await rank.check(message.bytes, message.block, message.seed)
            except PeerLost as lost:
                error = lost.message
        self._link.send(wire.ProbeResult(probe=message.probe, error=error))

    def _release(self, probe: int) -> None:
        if self._holding is not None and self._holding[0] == probe:
            rank, self._holding = self._holding[1], None
            rank.arrival.release()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
