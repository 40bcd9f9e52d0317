"""One rank of a worker, as the preflight and the links see it: its memory, and its routes to ranks of others.

A worker has one of these for each of its tensor-parallel ranks. `RankHere` stands before the transfer agent of this
process; a rank in a process of its own is asked the same over that process's control channel (`ranks.control`). So who
holds the link needs not know where a rank lives. Arguments and results are plain data.
"""

from __future__ import annotations

import asyncio
import statistics
from typing import Protocol

import msgspec
import numpy as np

from slipstream.errors import PeerLost, RouteUnavailable, TransferError
from slipstream.transfer import pattern
from slipstream.transfer.agent import Route, TransferAgent
from slipstream.transfer.copies import HeadMove
from slipstream.transfer.route import Ranking
from slipstream.transfer.transports.base import Exports, Runs

WRITE_S = 10.0
BANDWIDTH_WRITES = 4
BANDWIDTH_S = 2e-3  # what a timed write should take at least, so that starting it does not count
MOST_REPEATS = 256
LATENCY_WRITES = 8
LATENCY_BYTES = 4096


class Sent(msgspec.Struct, frozen=True):
    """A pattern of `bytes` bytes was written, in blocks of `block`."""

    bytes: int
    block: int


class Figures(msgspec.Struct, frozen=True):
    """What a route was measured at."""

    gb_per_s: float
    latency_us: float


class Area(msgspec.Struct, frozen=True):
    """Where a preflight may write, in bytes from the start of the region; no `bytes`: nowhere, for the reason given."""

    offset: int
    bytes: int
    error: str = ""


class Rank(Protocol):
    """All methods raise PeerLost when the rank's process is gone.

    `arrival` guards the first half of the probe area, which peers write into; `departure` the second, which this rank's
    own preflights read from. Both belong to the event loop of whoever asks.
    """

    @property
    def exports(self) -> Exports: ...

    @property
    def arrival(self) -> asyncio.Lock: ...

    @property
    def departure(self) -> asyncio.Lock: ...

    # as a destination

    async def admit(self, peer: str, theirs: list[Exports]) -> None:
        """Lets the ranks of `peer` open this memory."""
        ...

    async def source_gone(self, peer: str) -> bool:
        """Ends what `admit` began; True when it is proven that no write of `peer` can still arrive."""
        ...

    async def blank(self) -> Area:
        """Blanks the half of the probe area that a peer may write into."""
        ...

    async def check(self, bytes: int, block: int, seed: int) -> str:
        """What is wrong with the pattern in the probe area; empty when nothing is."""
        ...

    # as a source

    async def candidates(self, theirs: Exports) -> Ranking:
        """The transports to try for one rank of a peer. Raises RouteUnavailable when there is none."""
        ...

    async def open(self, peer: str, theirs: Exports, transport: str, moves: list[HeadMove]) -> None:
        """Opens a route to one rank of `peer`. Raises RouteUnavailable with the reason."""
        ...

    async def send_pattern(self, peer: str, rank: int, area: Area, seed: int) -> Sent:
        """Writes a pattern into the probe area of a rank of `peer`. Raises RouteUnavailable when that fails."""
        ...

    async def measure(self, peer: str, rank: int, area: Area, seed: int) -> Figures:
        """Times the same writes, and small ones. Raises RouteUnavailable when that fails."""
        ...

    async def give_up(self, peer: str, rank: int) -> None:
        """Closes a route that is not in use."""
        ...

    async def use(self, peer: str) -> None:
        """From now on copies for `peer` go over the routes that are open; there may be none that this rank needs."""
        ...

    async def disconnect(self, peer: str) -> None:
        """Closes all routes to `peer`; returns when its copies have been reported, and so nothing reads their pages."""
        ...


class RankHere:
    """The rank whose transfer agent is in this process."""

    def __init__(self, agent: TransferAgent) -> None:
        self.agent = agent
        self.arrival = asyncio.Lock()
        self.departure = asyncio.Lock()
        self._routes: dict[str, dict[int, Route]] = {}

    @property
    def exports(self) -> Exports:
        return self.agent.exports()

    async def admit(self, peer: str, theirs: list[Exports]) -> None:
        self.agent.admit(peer, theirs)

    async def source_gone(self, peer: str) -> bool:
        return await asyncio.to_thread(self.agent.source_gone, peer)

    async def blank(self) -> Area:
        start, size, guards = self._arrivals
        if size - 2 * guards < 64:
            return Area(0, 0, f"its probe area has only {size} bytes")
        await asyncio.to_thread(self.agent.memory.write, start, np.full(size, pattern.BLANK, np.uint8))
        return Area(start + guards, size - 2 * guards)

    async def check(self, bytes: int, block: int, seed: int) -> str:
        start, size, guards = self._arrivals
        if not 0 < block <= bytes <= size - 2 * guards:
            return f"{bytes} bytes in blocks of {block} do not fit the area"

        def look() -> str:
            return pattern.check(self.agent.memory.read(start, bytes + 2 * guards), guards, seed, block)

        return await asyncio.to_thread(look)

    @property
    def _arrivals(self) -> tuple[int, int, int]:
        """(start, size, guards) of the half that peers write into; a guard zone lies at either end."""
        region = self.agent.region
        size = self._half // 64 * 64
        return region.probe_offset, size, pattern.GUARD if size >= 4 * pattern.GUARD else 0

    @property
    def _half(self) -> int:
        return (self.agent.region.bytes - self.agent.region.probe_offset) // 2

    async def candidates(self, theirs: Exports) -> Ranking:
        return self.agent.candidates(theirs)

    async def open(self, peer: str, theirs: Exports, transport: str, moves: list[HeadMove]) -> None:
        route = await asyncio.wrap_future(self.agent.open_route(peer, theirs, transport, tuple(moves)))
        self._routes.setdefault(peer, {})[theirs.rank] = route

    async def send_pattern(self, peer: str, rank: int, area: Area, seed: int) -> Sent:
        route = self._route(peer, rank)
        runs, size, block = await self._pattern_runs(route, area, seed)
        start = int(self.agent.region.probe_offset + self._half)
        await asyncio.to_thread(lambda: self.agent.memory.write(start, pattern.pattern(seed, size)))
        await self._time(route, runs, 1)
        return Sent(size, block)

    async def measure(self, peer: str, rank: int, area: Area, seed: int) -> Figures:
        route = self._route(peer, rank)
        runs, size, _ = await self._pattern_runs(route, area, seed)
        gb_per_s = await self._bandwidth(route, runs, size)
        start = self.agent.region.probe_offset + self._half
        one = Runs(*(np.array([value], np.int64) for value in (start, area.offset, min(LATENCY_BYTES, size))))
        latencies = await self._time(route, one, LATENCY_WRITES)
        return Figures(gb_per_s, statistics.median(latencies) * 1e6)

    async def _pattern_runs(self, route: Route, area: Area, seed: int) -> tuple[Runs, int, int]:
        """The scattered runs of a pattern, its bytes, and the bytes of a block."""
        region = self.agent.region
        size = min(area.bytes, self._half) // 64 * 64
        block = pattern.block_size(size, min(region.page_bytes, route.exports.page_bytes))
        inside = await asyncio.to_thread(pattern.scatter, seed, size, block)
        start = region.probe_offset + self._half
        return Runs(inside.source + start, inside.destination + area.offset, inside.length), size, block

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
            return await asyncio.wait_for(asyncio.wrap_future(self.agent.time_writes(route, runs, count)), WRITE_S)
        except TimeoutError as error:
            raise PeerLost(f"a preflight write over {route.transport} did not end within {WRITE_S:.0f} s") from error
        except (TransferError, ValueError) as error:
            raise RouteUnavailable(f"the preflight's copy failed: {error}") from error

    def _route(self, peer: str, rank: int) -> Route:
        try:
            return self._routes[peer][rank]
        except KeyError:
            raise PeerLost(f"the link to {peer} has ended") from None

    async def give_up(self, peer: str, rank: int) -> None:
        route = self._routes.get(peer, {}).pop(rank, None)
        if route is not None:
            await asyncio.wrap_future(self.agent.close_route(route))

    async def use(self, peer: str) -> None:
        self.agent.use(peer, list(self._routes.get(peer, {}).values()))

    async def disconnect(self, peer: str) -> None:
        self._routes.pop(peer, None)
        await asyncio.to_thread(self.agent.disconnect, peer)
