"""What a worker answers to whoever connects to its message port: routers, peers, strangers."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
from tests.unit.tiny_models import tiny_model

from slipstream import wire
from slipstream.config import EngineConfig, TransferConfig, WorkerConfig
from slipstream.engine.metrics import WorkerMetrics
from slipstream.engine.server import WorkerServer
from slipstream.engine.worker import Worker
from slipstream.stream import Link
from slipstream.types import Request, SamplingParams

to_router = wire.Decoder(wire.ToRouter)
to_source = wire.Decoder(wire.FromDestination)
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    model = tiny_model(tmp_path_factory.mktemp("model"), "llama")
    engine = EngineConfig(model=str(model), dtype="float32", kv_tokens=1024, threads=1)
    with Worker(engine, WorkerConfig(role="both", name="w"), TransferConfig()) as worker:
        yield worker


@pytest.fixture
async def router(worker: Worker) -> AsyncIterator[Link]:
    link = await Link.connect(worker.info.wire, to_router)
    link.send(wire.Hello(kind="router", id="r"))
    assert isinstance(await link.receive(), wire.Welcome)
    yield link
    link.close()
    await asyncio.sleep(0.05)


async def answers(link: Link, kind: type[wire.Message]) -> Any:
    """The next message of this kind; others are passed over."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            message = await link.receive()
            assert message is not None, link.lost_because
            if isinstance(message, kind):
                return message


def request(name: str, tokens: int = 4, **sampling: Any) -> Request:
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=tokens, **sampling)
    return Request(id=name, prompt_ids=[5, 6, 7, 8], sampling=params)


def http(worker: Worker, path: str) -> Any:
    with urllib.request.urlopen(worker.info.http + path, timeout=PATIENCE_S) as answer:
        return json.loads(answer.read())


async def pages_come_back(worker: Worker) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        audit = await asyncio.to_thread(http, worker, "/audit")
        assert audit["problems"] == []
        if audit["free"] + audit["cached"] == audit["total"]:
            return
        assert time.monotonic() < deadline, f"pages are still held: {audit}"
        await asyncio.sleep(0.05)


async def test_a_request_is_answered_with_numbered_tokens_and_one_finish(router: Link) -> None:
    router.send(wire.Submit(request=request("a", tokens=5)))
    got: list[Any] = []
    while not got or got[-1].finish is None:
        got += [t for t in (await answers(router, wire.StepOutput)).tokens if t.request == "a"]
    assert [t.index for t in got] == [0, 1, 2, 3, 4]
    assert [t.finish for t in got] == [None, None, None, None, "length"]


async def test_a_decode_worker_that_cannot_be_reached_fails_the_request_at_once(router: Link) -> None:
    router.send(wire.Submit(request=request("b"), decode_at="127.0.0.1:9"))
    failed = await answers(router, wire.Failed)
    assert (failed.request, failed.code, failed.retriable) == ("b", "worker_lost", True)
    assert "127.0.0.1:9" in failed.message


async def test_a_worker_that_a_router_wants_met_in_vain_is_reported_with_the_reason(router: Link) -> None:
    router.send(wire.Meet(peers=["127.0.0.1:9"]))
    reports: list[wire.RouteReport] = []
    while not reports:
        reports = (await answers(router, wire.Status)).routes
    assert reports[0].peer == "127.0.0.1:9"
    assert "cannot reach" in reports[0].error
    router.send(wire.Meet(peers=[]))
    while reports:
        reports = (await answers(router, wire.Status)).routes


async def test_another_layout_is_refused_at_hello_with_both_values(worker: Worker) -> None:
    other = msgspec.structs.replace(
        worker.info, id="other", name="other", fingerprint="x", fingerprint_text="page_tokens=64"
    )
    link = await Link.connect(worker.info.wire, to_source)
    link.send(wire.Hello(kind="worker", id="other", info=other))
    refusal = await answers(link, wire.Rejected)
    assert refusal.code == "layout_mismatch"
    assert "page_tokens=16" in refusal.message
    assert "page_tokens=64" in refusal.message
    assert await link.receive() is None


@pytest.mark.parametrize("kind", ["router", "worker"])
async def test_another_protocol_version_is_refused_at_hello(worker: Worker, kind: str) -> None:
    link = await Link.connect(worker.info.wire, wire.Decoder(wire.ToRouter))
    link.send(wire.Hello(kind=kind, id="old", protocol=99, info=worker.info))
    refusal = await answers(link, wire.Rejected)
    assert "99" in refusal.message
    assert await link.receive() is None


@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\x05\x00\x00\x00hello", wire.encode(wire.Ping(n=1))],
    ids=["http", "huge frame", "no msgpack", "no hello"],
)
async def test_strangers_are_cut_off_and_the_worker_goes_on(worker: Worker, data: bytes, router: Link) -> None:
    host, _, port = worker.info.wire.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    writer.write_eof()
    async with asyncio.timeout(PATIENCE_S):
        assert await reader.read() == b""
    writer.close()
    router.send(wire.Ping(n=7))
    assert (await answers(router, wire.Pong)).n == 7


async def test_a_router_that_goes_takes_its_requests_along(worker: Worker) -> None:
    link = await Link.connect(worker.info.wire, to_router)
    link.send(wire.Hello(kind="router", id="gone"))
    link.send(wire.Submit(request=request("c", tokens=900)))
    await answers(link, wire.StepOutput)
    link.abort()
    await pages_come_back(worker)


async def test_a_source_that_connects_anew_replaces_its_former_link(worker: Worker) -> None:
    source = msgspec.structs.replace(worker.info, id="s", name="s")
    hello = wire.Hello(kind="worker", id="s", info=source)
    first = await Link.connect(worker.info.wire, to_source)
    first.send(hello)
    await answers(first, wire.Welcome)
    offer = wire.Offer(
        xfer=1, request="d", attempt=0, prompt_len=20, block_keys=[b"k" * 16], pages_needed=2, max_tokens=4
    )
    first.send(offer)
    await answers(first, wire.Grant)
    second = await Link.connect(worker.info.wire, to_source)
    second.send(hello)
    await answers(second, wire.Welcome)
    assert await first.receive() is None
    second.send(offer)
    grant = await answers(second, wire.Grant)
    second.send(wire.Released(xfer=1, generation=grant.generation))
    second.close()
    await pages_come_back(worker)


def test_two_workers_cannot_share_a_port(worker: Worker) -> None:
    from slipstream.errors import ConfigError

    port = int(worker.info.http.rpartition(":")[2])
    second = Worker(EngineConfig(model="nothing"), WorkerConfig(port=port), TransferConfig())
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1 port {port}"):
        second.start()


async def test_a_request_that_the_engine_cannot_take_is_answered(router: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("a fault nobody thought of")

    with monkeypatch.context() as patch:
        patch.setattr("slipstream.engine.core.EngineCore.submit", broken)
        router.send(wire.Submit(request=request("e")))
        failed = await answers(router, wire.Failed)
    assert (failed.request, failed.code, failed.retriable) == ("e", "engine_failure", False)
    assert "a fault nobody thought of" in failed.message
    router.send(wire.Submit(request=request("f", tokens=1)))
    assert (await answers(router, wire.StepOutput)).tokens[0].request == "f"


def test_two_threads_may_end_a_worker_at_once() -> None:
    for _ in range(10):
        server = WorkerServer("127.0.0.1", 0, 0, 1.0, WorkerMetrics())
        server.start()
        with ThreadPoolExecutor(4) as pool:
            for ended in [pool.submit(server.stop) for _ in range(4)]:
                ended.result()


async def test_a_worker_that_is_told_to_stop_says_so_and_finishes_what_it_has(tmp_path) -> None:
    engine = EngineConfig(model=str(tiny_model(tmp_path, "llama")), dtype="float32", kv_tokens=1024, threads=1)
    config = WorkerConfig(role="both", name="leaving", heartbeat_s=60.0)  # no heartbeat tells it
    with Worker(engine, config, TransferConfig()) as worker:
        link = await Link.connect(worker.info.wire, to_router)
        link.send(wire.Hello(kind="router", id="r"))
        assert isinstance(await link.receive(), wire.Welcome)
        link.send(wire.Submit(request=request("long", tokens=400)))
        await answers(link, wire.StepOutput)
        stopping = asyncio.create_task(asyncio.to_thread(worker.stop, PATIENCE_S))
        finish, told = None, False
        async with asyncio.timeout(PATIENCE_S):
            while finish is None or not told:
                message = await link.receive()
                assert message is not None, (finish, told)
                if isinstance(message, wire.Status):
                    told = told or message.draining
                elif isinstance(message, wire.StepOutput):
                    finish = message.tokens[-1].finish
        assert finish == "length"
        await stopping
        link.close()
