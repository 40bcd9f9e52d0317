"""The router with real sockets and toy workers: requests are served, whatever comes and goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from slipstream.config import RouterConfig
from slipstream.errors import RequestError
from slipstream.router import Router
from slipstream.types import Request, Tokens
from tests.unit.toy_worker import ToyWorker, toy_answer, toy_request


class Client:
    """A sink that keeps what it gets and complains about what no sink should get."""

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

    async def answer(self) -> list[int]:
        async with asyncio.timeout(10):
            await self.ended.wait()
        assert self.wrong == []
        if self.failure is not None:
            raise self.failure
        return self.ids


async def until(condition: Callable[[], object], what: str = "") -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.002)


class Cluster:
    """A router and its toys; everything is taken down at the end, and the router's books must be right then."""

    def __init__(self) -> None:
        self.toys: list[ToyWorker] = []
        self.routers: list[Router] = []

    async def toy(self, role: Any = "both", **settings: Any) -> ToyWorker:
        toy = await ToyWorker(role, **settings).start()
        self.toys.append(toy)
        return toy

    async def router(self, *toys: ToyWorker, heartbeat_s: float = 0.05, ready: bool = True, **config: Any) -> Router:
        router = Router(RouterConfig(**config), heartbeat_s=heartbeat_s)
        self.routers.append(router)
        await router.start()
        for toy in toys:
            router.add_worker(toy.url)
        if ready:
            assert await router.wait_ready(10)
            await until(lambda: all(toy.linked for toy in toys))
        return router

    async def pair(self, **config: Any) -> tuple[Router, ToyWorker, ToyWorker]:
        p, d = await self.toy("prefill"), await self.toy("decode")
        return await self.router(p, d, **config), p, d

    def send(self, request: Request, router: Router | None = None) -> Client:
        client = Client()
        (router or self.routers[0]).submit(request, client)
        return client

    async def settled(self) -> None:
        """All books are right and empty."""
        for router in self.routers:
            await until(lambda router=router: not router.audit().requests)
            assert router.audit().problems == []
        await until(lambda: all(toy.idle for toy in self.toys))

    async def close(self) -> None:
        for router in self.routers:
            await router.stop()
            assert router.audit().problems == []
        for toy in self.toys:
            await toy.kill()


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    it = Cluster()
    yield it
    await it.close()


async def test_a_pair_serves_a_request(cluster: Cluster) -> None:
    router, p, d = await cluster.pair()
    request = toy_request("r", max_tokens=5)
    client = cluster.send(request)
    assert await client.answer() == toy_answer(request)
    assert client.finish == "length"
    assert [m.cached_tokens for m in client.messages] == [0, None, None, None, None]
    assert [s.decode_at for s in p.submitted] == [d.info.wire]
    assert d.submitted == []
    await cluster.settled()
