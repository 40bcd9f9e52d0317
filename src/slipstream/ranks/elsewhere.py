"""A rank of this worker in a process of its own, as links and preflights see it: a `transfer.rank.Rank`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from slipstream.transfer.copies import HeadMove
from slipstream.transfer.rank import Area, Figures, Sent
from slipstream.transfer.route import Ranking
from slipstream.transfer.transports.base import Exports


class RankElsewhere:
    """A rank in a process of its own. `call(verb, *arguments)` has that process carry out the method."""

    def __init__(self, exports: Exports, call: Callable[..., Future[Any]]) -> None:
        self.exports = exports
        self.arrival, self.departure = asyncio.Lock(), asyncio.Lock()
        self._call = call

    async def _ask(self, verb: str, *arguments: Any) -> Any:
        return await asyncio.wrap_future(self._call(verb, *arguments))

    async def admit(self, peer: str, theirs: list[Exports]) -> None:
        await self._ask("admit", peer, theirs)

    async def source_gone(self, peer: str) -> bool:
        return await self._ask("source_gone", peer)

    async def blank(self) -> Area:
        return await self._ask("blank")

    async def check(self, bytes: int, block: int, seed: int) -> str:
        return await self._ask("check", bytes, block, seed)

    async def candidates(self, theirs: Exports) -> Ranking:
        return await self._ask("candidates", theirs)

    async def open(self, peer: str, theirs: Exports, transport: str, moves: list[HeadMove]) -> None:
        await self._ask("open", peer, theirs, transport, moves)

    async def send_pattern(self, peer: str, rank: int, area: Area, seed: int) -> Sent:
        return await self._ask("send_pattern", peer, rank, area, seed)

    async def measure(self, peer: str, rank: int, area: Area, seed: int) -> Figures:
        return await self._ask("measure", peer, rank, area, seed)

    async def give_up(self, peer: str, rank: int) -> None:
        await self._ask("give_up", peer, rank)

    async def use(self, peer: str) -> None:
        await self._ask("use", peer)

    async def disconnect(self, peer: str) -> None:
        await self._ask("disconnect", peer)
