"""A worker and a peer that hangs: its requests are given up within a bound, and no page is used again too early."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.proc.programs import Program, Server
from tests.proc.test_worker_links import answers, http, to_router
from tests.unit.tiny_models import tiny_model

from slipstream import wire
from slipstream.config import EngineConfig, TransferConfig, WorkerConfig
from slipstream.engine import peers
from slipstream.engine.worker import Worker
from slipstream.stream import Link
from slipstream.types import Request, SamplingParams

STEP_TIMEOUT_S = 2.0
KV_TOKENS = 1024


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "llama", tokenizer=True)


@pytest.fixture
def source(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    """A prefill worker in this process that is quick to lose patience with its peers."""
    monkeypatch.setattr(peers, "BEAT_S", 0.1)
    monkeypatch.setattr(peers, "SILENT_S", 2.0)
    monkeypatch.setattr(peers, "CLOSE_ROUTES_S", 0.5)
    engine = EngineConfig(
        model=str(model), dtype="float32", kv_tokens=KV_TOKENS, threads=1, step_timeout_s=STEP_TIMEOUT_S
    )
    worker = Worker(engine, WorkerConfig(role="prefill", name="p"), TransferConfig(transport="tcp"))
    worker.start()
    yield worker
    worker.stop()


@pytest.fixture
def destination(model: Path) -> Iterator[tuple[Program, str]]:
    """A decode worker in a process of its own, and where it takes messages."""
    options = ("--role", "decode", "--dtype", "float32", "--kv-tokens", str(KV_TOKENS), "--threads", "1")
    program = Program("worker", str(model), *options, "--transport", "tcp", "--wire-port", "0")
    url = program.says(r"is ready after .* (http://[\d.:]+),")[1]
    try:
        yield program, Server(url).get("/worker_info")[1]["wire"]
    finally:
        program.process.kill()
        program.process.wait()


@pytest.fixture
async def router(source: Worker) -> AsyncIterator[Link]:
    link = await Link.connect(source.info.wire, to_router)
    link.send(wire.Hello(kind="router", id="r"))
    assert isinstance(await link.receive(), wire.Welcome)
    yield link
    link.close()
    await asyncio.sleep(0.05)


def submission(name: str, decode_at: str, start: int = 5) -> wire.Submit:
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=8)
    prompt = [start + i % 50 for i in range(200)]
    return wire.Submit(request=Request(id=name, prompt_ids=prompt, sampling=params), decode_at=decode_at)


async def linked(router: Link, destination: str) -> None:
    """A request has been handed over: link and route are there."""
    router.send(submission("first", destination))
    await tokens_of(router, "first")


async def tokens_of(router: Link, name: str) -> Any:
    while True:
        for tokens in (await answers(router, wire.StepOutput)).tokens:
            if tokens.request == name:
                return tokens


async def settled(worker: Worker) -> None:
    async with asyncio.timeout(20):
        while True:
            audit = await asyncio.to_thread(http, worker, "/audit")
            assert audit["problems"] == []
            if audit["free"] + audit["cached"] == audit["total"]:
                return
            await asyncio.sleep(0.05)


async def test_a_destination_that_is_stopped_fails_the_request_and_frees_the_sources_pages(
    source: Worker, router: Link, destination: tuple[Program, str]
) -> None:
    program, address = destination
    await linked(router, address)
    await settled(source)
    os.kill(program.process.pid, signal.SIGSTOP)
    router.send(submission("r", address, start=9))
    failed = await answers(router, wire.Failed)
    assert (failed.request, failed.retriable, failed.code) == ("r", True, "worker_lost")
    await settled(source)
    assert source.info.name == "p", "the source itself goes on"
    router.send(wire.Submit(request=submission("here", "", start=20).request))
    assert (await tokens_of(router, "here")).index == 0


async def test_a_destination_that_answers_slowly_keeps_its_link(
    source: Worker, router: Link, destination: tuple[Program, str], caplog: pytest.LogCaptureFixture
) -> None:
    program, address = destination
    await linked(router, address)
    for number in range(2):
        os.kill(program.process.pid, signal.SIGSTOP)
        await asyncio.sleep(0.7)
        router.send(submission(f"r{number}", address, start=9 + number))
        os.kill(program.process.pid, signal.SIGCONT)
        await tokens_of(router, f"r{number}")
        await settled(source)
    assert "lost" not in caplog.text


async def test_a_copy_that_never_ends_gives_the_request_up_and_keeps_its_pages(
    source: Worker, router: Link, destination: tuple[Program, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, address = destination
    await linked(router, address)
    await settled(source)
    stuck: list[Any] = []
    agent = source._copies._agent
    assert agent is not None
    monkeypatch.setattr(agent, "submit", stuck.append)
    router.send(submission("r", address, start=9))
    failed = await answers(router, wire.Failed)
    assert (failed.request, failed.retriable) == ("r", True)
    assert stuck
    audit = await asyncio.to_thread(http, source, "/audit")
    assert audit["free"] + audit["cached"] < audit["total"], "a copy may still read these pages"
    monkeypatch.undo()
    for job in stuck:
        source._copies.here(job, "it has ended after all")
    await settled(source)


async def test_routes_that_cannot_be_closed_end_the_worker(
    source: Worker, router: Link, destination: tuple[Program, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program, address = destination
    await linked(router, address)
    agent = source._copies._agent
    assert agent is not None
    let_go = threading.Event()
    monkeypatch.setattr(agent, "disconnect", lambda peer: let_go.wait())
    program.process.kill()
    assert await asyncio.to_thread(source.wait) is False
    assert "of a lost peer runs on" in str(source._failure)
    let_go.set()


async def test_a_worker_that_hangs_in_a_shared_process_ends_its_links_and_leaves_the_process_alone(
    source: Worker, router: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    router.send(wire.Submit(request=submission("first", "").request))  # how long a step takes here is known from then
    await tokens_of(router, "first")
    await settled(source)
    let_go = threading.Event()
    loop = source._loop
    assert loop is not None
    honest: Callable[..., Any] = loop._runner.collect

    def for_ever() -> Any:
        let_go.wait()
        return honest()

    monkeypatch.setattr(loop._runner, "collect", for_ever)
    try:
        router.send(wire.Submit(request=submission("r", "", start=9).request))
        async with asyncio.timeout(60):
            while await router.receive() is not None:
                pass
        assert await asyncio.to_thread(source.wait) is False
        assert "prefill step" in str(source._failure)
        await asyncio.to_thread(source.stop)
        assert loop._thread.is_alive(), "what is stuck stays, with all that it uses"
    finally:
        let_go.set()
    await asyncio.to_thread(loop.stop)
