"""CPU time that the router takes for a Tokens message and for a placement.

    python -m tests.unit.bench_router

The router is a real one, linked to toy workers. Tokens are handed to it as decoded messages of 64 sequences each (one
engine step), and as encoded frames, decoding included; a sink that only counts takes them. Placements are made for a
prompt of 1,000 tokens among 2 and 32 workers, without known prefixes and with all of it known everywhere.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from tests.unit.toy_cluster import Cluster, toy_cluster
from tests.unit.toy_worker import toy_request

from slipstream import wire
from slipstream.errors import RequestError
from slipstream.kv.prefix import block_keys, root_key
from slipstream.router import Router
from slipstream.router.place import Prompt
from slipstream.types import Tokens

SEQUENCES = 64
STEPS = 2000


class Counter:
    """The cheapest sink."""

    def __init__(self) -> None:
        self.count = 0

    def tokens(self, t: Tokens) -> None:
        self.count += 1

    def error(self, e: RequestError) -> None:
        """The end of the benchmark finds the requests under way."""


def cpu_us(work: Callable[[], object], per: int) -> float:
    began = time.process_time()
    work()
    return (time.process_time() - began) / per * 1e6


async def tokens(cluster: Cluster) -> None:
    toy = await cluster.toy("both", max_sequences=1000)
    router = await cluster.router(toy, heartbeat_s=60.0)
    toy.hold("queued")
    sink = Counter()
    for i in range(SEQUENCES):
        router.submit(toy_request(f"request-{i}", max_tokens=10 * STEPS), sink)
    steps = [
        wire.StepOutput(tokens=[Tokens(f"request-{i}", 0, index, [index]) for i in range(SEQUENCES)])
        for index in range(2 * STEPS)
    ]
    frames = [wire.encode(step)[4:] for step in steps[STEPS:]]
    worker = router._fleet.linked()[0]
    decode = wire.Decoder(wire.ToRouter)

    def decoded() -> None:
        for step in steps[:STEPS]:
            router.worker_message(worker, step)

    def encoded() -> None:
        for frame in frames:
            router.worker_message(worker, decode(frame))

    count = STEPS * SEQUENCES
    print(f"tokens: {cpu_us(decoded, count):.2f} us a message, {cpu_us(encoded, count):.2f} us with decoding")
    assert sink.count == 2 * count


def placements(router: Router, count: int) -> float:
    choose = router._lives._assign.choose

    def work() -> None:
        for _ in range(count):
            choose(Prompt(PROMPT))

    return cpu_us(work, count)


PROMPT = list(range(1000))


async def placing(cluster: Cluster, workers: int) -> None:
    ps = [await cluster.toy("prefill", name=f"p{i}", page_tokens=16) for i in range(workers // 2)]
    ds = [await cluster.toy("decode", name=f"d{i}", page_tokens=16) for i in range(workers // 2)]
    router = await cluster.router(*ps, *ds, heartbeat_s=60.0)
    unknown = placements(router, 300)
    for toy in ps + ds:
        toy._unsaid = block_keys(PROMPT, 16, root_key(toy.info.fingerprint))
        toy._publish()
    await asyncio.sleep(0.2)
    known = placements(router, 300)
    print(f"placement among {workers} workers: {unknown:.0f} us, {known:.0f} us with prefixes known")


async def main() -> None:
    async with toy_cluster() as cluster:
        await tokens(cluster)
    for workers in (2, 32):
        async with toy_cluster() as cluster:
            await placing(cluster, workers)


if __name__ == "__main__":
    asyncio.run(main())
