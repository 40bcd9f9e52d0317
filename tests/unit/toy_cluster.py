"""A router among toy workers, and clients that check what they are told.

    async with toy_cluster() as cluster:
        router, p, d = await cluster.pair()
        client = cluster.send(toy_request("r"))
        assert await client.answer() == ...

When the block ends, the router is stopped, its books must be right and empty, and all toys are killed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

from tests.unit.toy_worker import ToyWorker

from slipstream.config import RouterConfig
from slipstream.errors import RequestError
from slipstream.router import Router, WorkerView
from slipstream.types import Request, Role, Tokens

PATIENCE_S = 60  # nothing in these tests takes a second; this is for a machine that is busy with something else


class Client:
    """A sink that keeps what it gets and notes what no sink should get."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.messages: list[Tokens] = []
        self.failure: RequestError | None = None
        self.finish: str | None = None
        self.wrong: list[str] = []
        self.ended = asyncio.Event()

    def tokens(self, t: Tokens) -> None:
        if self.ended.is_set():
            self.wrong.append(f"tokens after the end: {t}")
        if t.index != len(self.ids):
            self.wrong.append(f"index {t.index} after {len(self.ids)} tokens")
        self.ids += t.token_ids
        self.messages.append(t)
        if t.finish is not None:
            self.finish = t.finish
            self.ended.set()

    def error(self, e: RequestError) -> None:
        if self.ended.is_set():
            self.wrong.append(f"error after the end: {e}")
        self.failure = e
        self.ended.set()

    async def end(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self.ended.wait()
        assert self.wrong == []

    async def answer(self) -> list[int]:
        """The tokens of the finished request; raises its error."""
        await self.end()
        if self.failure is not None:
            raise self.failure
        return self.ids


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - what is waited for is another task's doing, with no event to it
            await asyncio.sleep(0.002)


class Cluster:
    """Toys and routers of one test."""

    def __init__(self) -> None:
        self.toys: list[ToyWorker] = []
        self.routers: list[Router] = []

    async def toy(self, role: Role = "both", **settings: Any) -> ToyWorker:
        toy = await ToyWorker(role, **settings).start()
        self.toys.append(toy)
        return toy

    async def restart(self, toy: ToyWorker) -> ToyWorker:
        """Another process of the same role at the same URL."""
        return await self.toy(toy.info.role, port=toy.port, name=toy.name, step_s=toy.step_s)

    async def router(self, *toys: ToyWorker, heartbeat_s: float = 0.05, **config: Any) -> Router:
        """A started router that has linked to the toys and knows their routes."""
        router = Router(RouterConfig(**config), heartbeat_s=heartbeat_s)
        self.routers.append(router)
        await router.start()
        for toy in toys:
            router.add_worker(toy.url)
        await self.met(toys)
        return router

    async def met(self, toys: Iterable[ToyWorker]) -> None:
        """Waits until the toys are linked to the router and every pair has a route."""
        toys = list(toys)
        sources = [toy for toy in toys if toy.info.role != "decode" and toy.reports_routes]
        destinations = sum(toy.info.role != "prefill" for toy in toys)
        await until(lambda: all(view(self.routers[0], toy).state == "live" for toy in toys))
        for toy in sources:
            wanted = destinations - (toy.info.role != "prefill")
            await until(lambda toy=toy, wanted=wanted: len(view(self.routers[0], toy).routes) >= wanted)

    async def pair(self, **config: Any) -> tuple[Router, ToyWorker, ToyWorker]:
        p, d = await self.toy("prefill"), await self.toy("decode")
        return await self.router(p, d, **config), p, d

    async def two_pairs(self, **config: Any) -> tuple[Router, list[ToyWorker], list[ToyWorker]]:
        ps = [await self.toy("prefill", name=f"p{i}") for i in range(2)]
        ds = [await self.toy("decode", name=f"d{i}") for i in range(2)]
        return await self.router(*ps, *ds, **config), ps, ds

    def send(self, request: Request) -> Client:
        client = Client()
        self.routers[0].submit(request, client)
        return client

    async def settled(self) -> None:
        """Waits until nothing is under way anywhere, and looks into the books."""
        for router in self.routers:
            await until(lambda router=router: not router.audit().requests)
            assert router.audit().problems == []
        await until(lambda: all(toy.idle for toy in self.toys))

    async def close(self) -> None:
        for router in self.routers:
            await router.stop()
            assert router.audit().requests == []
            assert router.audit().problems == []
        for toy in self.toys:
            await toy.kill()


def view(router: Router, toy: ToyWorker) -> WorkerView:
    return next(shown for shown in router.workers() if shown.url == toy.url)


@asynccontextmanager
async def toy_cluster() -> AsyncIterator[Cluster]:
    cluster = Cluster()
    try:
        yield cluster
    finally:
        await cluster.close()
