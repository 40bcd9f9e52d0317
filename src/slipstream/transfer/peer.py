"""The preflight between Welcome and the first Offer: proves and measures a route before a request needs it.

For each pair of ranks that share heads, the source opens the best candidate and asks for the destination's probe area
(ProbeOpen); the destination, which serves one preflight at a time, blanks it and grants it. The source writes a seeded
pattern, scattered, with the transport that pages will use; the destination compares its own memory with what has to be
there (ProbeWritten, ProbeResult). Then the source times the same writes, for bandwidth, and single small ones, for
latency, and frees the area. A candidate that does not open, does not verify or breaks is rejected with its reason and
the next one is tried.

The probe area has two halves: peers write into the first; the second is what this rank's own preflights send, so that
two workers may probe each other at the same time. Nothing here blocks the event loop: copies are the mover's, patterns
are made and compared in threads.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import statistics
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import numpy as np

from slipstream import wire
from slipstream.errors import PeerLost, RouteUnavailable, TransferError
from slipstream.stream import Link
from slipstream.transfer import pattern
from slipstream.transfer.agent import Route, TransferAgent
from slipstream.transfer.copies import HeadMove
from slipstream.transfer.route import unavailable
from slipstream.transfer.transports.base import Exports, Runs

Answer = TypeVar("Answer", bound=wire.Message)

ANSWER_S = 10.0
BANDWIDTH_WRITES = 4
BANDWIDTH_S = 2e-3  # what a timed write should take at least, so that starting it does not count
MOST_REPEATS = 256
LATENCY_WRITES = 8
LATENCY_BYTES = 4096


async def open_as_source(link: Link, agent: TransferAgent, peer: str, theirs: Sequence[Exports]) -> wire.RouteReport:
    """Finds, proves and measures the routes to all ranks of `peer` that need this one, and takes them into use.

    Reads from the link itself: to be awaited after Welcome, before anybody else reads. Returns the report of the
    slowest pair. Raises RouteUnavailable with every reason when a pair has no route, PeerLost when the link ends; the
    caller then closes the link, and all routes to the peer are closed.
    """
    preflight = _Preflight(link, agent, peer)
    try:
        async with agent.departure:
            found = [
                await preflight.find(theirs[destination], moves)
                for destination, moves in agent.moves_to(theirs).items()
            ]
    except BaseException:
        await asyncio.shield(asyncio.to_thread(agent.disconnect, peer))
        raise
    agent.use(peer, [route for route, _ in found])
    reports = [report for _, report in found]
    if not reports:
        return wire.RouteReport(peer=peer, transport="none", source_rank=agent.rank)
    return min(reports, key=lambda report: report.gb_per_s)


class _Preflight:
    """The source's side for one peer."""

    def __init__(self, link: Link, agent: TransferAgent, peer: str) -> None:
        self._link, self._agent, self._peer = link, agent, peer
        self._numbers = itertools.count(1)

    async def find(self, theirs: Exports, moves: tuple[HeadMove, ...]) -> tuple[Route, wire.RouteReport]:
        """The best route to one rank that passes. Raises RouteUnavailable, PeerLost."""
        agent = self._agent
        ranking = agent.candidates(theirs)
        rejected = dict(ranking.rejected)
        for name in ranking.candidates:
            try:
                route = await asyncio.wrap_future(agent.open_route(self._peer, theirs, name, moves))
            except TransferError as error:
                rejected[name] = error.message
                continue
            try:
                gb_per_s, latency_us = await self._prove(route)
            except RouteUnavailable as error:
                rejected[name] = error.message
                await asyncio.wrap_future(agent.close_route(route))
                continue
            return route, wire.RouteReport(
                peer=self._peer,
                transport=name,
                gb_per_s=gb_per_s,
                latency_us=latency_us,
                source_rank=agent.rank,
                destination_rank=theirs.rank,
                rejected=rejected,
            )
        raise RouteUnavailable(unavailable(agent.config.transport, rejected))

    async def _prove(self, route: Route) -> tuple[float, float]:
        """GB/s and microseconds of a route that delivers what it should. Raises RouteUnavailable when it does not."""
        probe = next(self._numbers)
        grant = await self._ask(wire.ProbeOpen(probe=probe, destination_rank=route.exports.rank), wire.ProbeGrant)
        if grant.error:
            raise RouteUnavailable(f"the peer refused the preflight: {grant.error}")
        # When it ends in any other way, a write may be in flight still: the area is freed by the end of the link.
        try:
            figures = await self._write_and_time(route, probe, grant)
        except RouteUnavailable:
            self._link.send(wire.ProbeClose(probe=probe))
            raise
        self._link.send(wire.ProbeClose(probe=probe))
        return figures

    async def _write_and_time(self, route: Route, probe: int, grant: wire.ProbeGrant) -> tuple[float, float]:
        agent, region = self._agent, self._agent.region
        half = (region.bytes - region.probe_offset) // 2
        size = min(grant.bytes, half) // 64 * 64
        block = pattern.block_size(size, min(region.page_bytes, route.exports.page_bytes))
        seed = secrets.randbits(31)
        start = region.probe_offset + half
        await asyncio.to_thread(lambda: agent.memory.write(start, pattern.pattern(seed, size)))
        inside = await asyncio.to_thread(pattern.scatter, seed, size, block)
        runs = Runs(inside.source + start, inside.destination + grant.offset, inside.length)
        await self._time(route, runs, 1)
        result = await self._ask(wire.ProbeWritten(probe=probe, seed=seed, bytes=size, block=block), wire.ProbeResult)
        if result.error:
            raise RouteUnavailable(f"the preflight's bytes did not arrive as sent: {result.error}")
        gb_per_s = await self._bandwidth(route, runs, size)
        small = min(LATENCY_BYTES, size)
        one = Runs(*(np.array([value], np.int64) for value in (start, grant.offset, small)))
        latencies = await self._time(route, one, LATENCY_WRITES)
        return gb_per_s, statistics.median(latencies) * 1e6

    async def _bandwidth(self, route: Route, runs: Runs, size: int) -> float:
        """GB/s of the same writes, repeated in one job until it takes long enough to show the rate of the link."""
        repeats, took = 1, 0.0
        while True:
            many = Runs(*(np.tile(column, repeats) for column in (runs.source, runs.destination, runs.length)))
            seconds = await self._time(route, many, BANDWIDTH_WRITES if took else 2)
            took = statistics.median(seconds)
            if took >= BANDWIDTH_S / 2 or repeats == MOST_REPEATS:
                return repeats * size / took / 1e9
            repeats = min(MOST_REPEATS, repeats * max(2, round(BANDWIDTH_S / max(took, 1e-6))))

    async def _time(self, route: Route, runs: Runs, count: int) -> list[float]:
        try:
            return await asyncio.wait_for(asyncio.wrap_future(self._agent.time_writes(route, runs, count)), ANSWER_S)
        except TimeoutError as error:
            raise PeerLost(f"a preflight write over {route.transport} did not end within {ANSWER_S:.0f} s") from error
        except (TransferError, ValueError) as error:
            raise RouteUnavailable(f"the preflight's copy failed: {error}") from error

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
    """The destination's side of one link. Admits the peer; `close` ends that.

    `handle` is given every message of the link and says whether it was one of the preflight's; it never waits long.
    """

    def __init__(self, link: Link, agent: TransferAgent, peer: str, theirs: Sequence[Exports]) -> None:
        self._link, self._agent, self._peer = link, agent, peer
        self._tasks: set[asyncio.Task[None]] = set()
        self._holding: int | None = None  # the probe that the area is granted to
        agent.admit(peer, theirs)

    async def handle(self, message: wire.Message) -> bool:
        match message:
            case wire.ProbeOpen():
                self._start(self._grant(message.probe))
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
            await asyncio.to_thread(self._agent.source_gone, self._peer)
            self._release(self._holding)

    @property
    def _area(self) -> tuple[int, int, int]:
        """(start, size, guards) of the half that peers write into; a guard zone lies at either end."""
        region = self._agent.region
        size = (region.bytes - region.probe_offset) // 2 // 64 * 64
        return region.probe_offset, size, pattern.GUARD if size >= 4 * pattern.GUARD else 0

    async def _grant(self, probe: int) -> None:
        start, size, guards = self._area
        if size - 2 * guards < 64:
            self._link.send(wire.ProbeGrant(probe=probe, error=f"its probe area has only {size} bytes"))
            return
        if self._holding is not None:
            self._link.send(wire.ProbeGrant(probe=probe, error=f"probe {self._holding} of this link is not closed"))
            return
        await self._agent.arrival.acquire()
        self._holding = probe
        blank = np.full(size, pattern.BLANK, np.uint8)
        await asyncio.to_thread(self._agent.memory.write, start, blank)
        self._link.send(wire.ProbeGrant(probe=probe, offset=start + guards, bytes=size - 2 * guards))

    async def _verify(self, message: wire.ProbeWritten) -> None:
        start, size, guards = self._area
        if message.probe != self._holding:
            error = f"probe {message.probe} was not granted"
        elif not (0 < message.block <= message.bytes <= size - 2 * guards):
            error = f"{message.bytes} bytes in blocks of {message.block} do not fit the area"
        else:
            error = await asyncio.to_thread(self._look, start, message.bytes + 2 * guards, guards, message)
        self._link.send(wire.ProbeResult(probe=message.probe, error=error))

    def _look(self, start: int, size: int, guards: int, message: wire.ProbeWritten) -> str:
        return pattern.check(self._agent.memory.read(start, size), guards, message.seed, message.block)

    def _release(self, probe: int) -> None:
        if self._holding == probe:
            self._holding = None
            self._agent.arrival.release()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
