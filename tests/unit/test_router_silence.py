"""A worker that lives and answers nothing: it keeps what it has for a while, then its requests continue elsewhere."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator

import pytest
from prometheus_client import generate_latest
from tests.unit.test_router_faults import AT_DECODE, AT_PREFILL, held_at, release
from tests.unit.toy_cluster import PATIENCE_S, Cluster, toy_cluster, until, view
from tests.unit.toy_worker import ToyWorker, toy_answer, toy_request

SILENCE_S = 0.5  # ten heartbeats of these routers


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with toy_cluster() as it:
        yield it


def involved(ps: list[ToyWorker], ds: list[ToyWorker]) -> tuple[ToyWorker, ToyWorker]:
    """The pair that has the one request."""
    p = next(p for p in ps if p.submitted)
    return p, next(d for d in ds if d.info.wire == p.submitted[-1].decode_at)


@pytest.mark.parametrize("stage", AT_PREFILL + AT_DECODE)
async def test_a_request_at_a_silent_decode_worker_continues_elsewhere(cluster: Cluster, stage: str) -> None:
    router, ps, ds = await cluster.two_pairs(worker_silence_s=SILENCE_S)
    request, client = await held_at(cluster, stage, ps, ds)
    _, silent = involved(ps, ds)
    silent.mute = True
    await until(lambda: view(router, silent).state == "unhealthy")
    assert client.failure is None
    release(*[toy for toy in ps + ds if toy is not silent])
    if stage in AT_PREFILL:
        silent.hold("adopt", "decode")
    assert await client.answer() == toy_answer(request)
    assert client.messages[-1].attempt == 1
    await until(lambda: view(router, silent).state != "unhealthy")
    assert b'slipstream_router_given_up_workers_total{worker="d' in generate_latest(router.metrics_registry)
    silent.mute = False
    release(silent)
    await until(lambda: view(router, silent).state == "live")
    await cluster.settled()


@pytest.mark.parametrize("stage", AT_PREFILL)
async def test_a_request_at_a_silent_prefill_worker_continues_elsewhere(cluster: Cluster, stage: str) -> None:
    router, ps, ds = await cluster.two_pairs(worker_silence_s=SILENCE_S)
    request, client = await held_at(cluster, stage, ps, ds)
    silent, _ = involved(ps, ds)
    silent.mute = True
    await until(lambda: view(router, silent).state not in ("live", "unhealthy"))
    release(*[toy for toy in ps + ds if toy is not silent])
    assert await client.answer() == toy_answer(request)
    silent.mute = False
    release(silent)  # it says what it had to say of an attempt that is over: nobody listens
    await until(lambda: view(router, silent).state == "live")
    await cluster.settled()
    assert len(client.ids) == request.sampling.max_tokens


async def test_requests_at_others_do_not_notice(cluster: Cluster) -> None:
    router, ps, ds = await cluster.two_pairs(worker_silence_s=SILENCE_S)
    request, client = await held_at(cluster, "decode", ps, ds)
    holder = involved(ps, ds)[1]
    (silent,) = [d for d in ds if d is not holder]
    silent.mute = True
    await until(lambda: view(router, silent).state not in ("live", "unhealthy"))
    silent.mute = False
    release(*ds)
    assert await client.answer() == toy_answer(request)
    assert client.messages[-1].attempt == 0
    await cluster.settled()


async def test_without_a_bound_a_silent_worker_keeps_what_it_has(cluster: Cluster) -> None:
    router, ps, ds = await cluster.two_pairs(worker_silence_s=0)
    request, client = await held_at(cluster, "decode", ps, ds)
    slow = involved(ps, ds)[1]
    slow.mute = True
    await until(lambda: router._fleet.by_id(slow.info.id).missed > 30)  # pyright: ignore[reportOptionalMemberAccess]
    release(*ds)
    assert await client.answer() == toy_answer(request)
    assert client.messages[-1].attempt == 0


async def test_one_that_answers_just_in_time_is_not_given_up(cluster: Cluster) -> None:
    router, ps, ds = await cluster.two_pairs(worker_silence_s=10 * SILENCE_S)
    request, client = await held_at(cluster, "decode", ps, ds)
    slow = involved(ps, ds)[1]
    for _ in range(2):
        slow.mute = True
        await until(lambda: view(router, slow).state == "unhealthy")
        slow.mute = False
        await until(lambda: view(router, slow).state == "live")
    release(*ds)
    assert await client.answer() == toy_answer(request)
    assert client.messages[-1].attempt == 0
    assert await cluster.send(toy_request("next")).answer()


async def test_one_that_never_answered_this_router_is_silent_after_the_same_time(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router that is started again, and a worker that was stopped before that."""
    monkeypatch.setattr("slipstream.router.remote.ANSWER_S", 0.1)
    router, _, _ = await cluster.pair(worker_silence_s=SILENCE_S)
    deaf = socket.create_server(("127.0.0.1", 0))  # as a stopped process: the kernel connects, nobody answers
    url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
    router.add_worker(url)
    await until(lambda: router._fleet.workers[url].state == "silent")
    assert router._fleet.workers[url].unanswered_s >= SILENCE_S
    deaf.close()
    await until(lambda: router._fleet.workers[url].state == "connecting")


@pytest.mark.parametrize("later", [0, 1], ids=["together", "one a beat later"])
@pytest.mark.parametrize("host", ["", "elsewhere"], ids=["here", "on another machine"])
@pytest.mark.parametrize("stage", AT_DECODE)
async def test_what_two_silent_workers_had_is_not_given_from_one_to_the_other(
    cluster: Cluster, stage: str, host: str, later: int
) -> None:
    """With a bound of as few beats as these, both are lost before they are unhealthy by the common rule."""
    p = await cluster.toy("prefill")
    ds = [await cluster.toy("decode", name=f"d{i}", host=host) for i in range(2)]
    bounds = {"worker_silence_s": 0 if host else 0.2, "worker_wait_s": PATIENCE_S, "strict_roles": True}
    router = await cluster.router(p, *ds, **bounds)
    request, client = await held_at(cluster, stage, [p], ds)
    holder = involved([p], ds)[1]
    (other,) = [d for d in ds if d is not holder]
    remote = router._fleet.workers[holder.url]
    holder.mute = holder.loading = True  # and not linked again
    await until(lambda: remote.missed >= later)
    other.mute = other.loading = True
    await until(lambda: client.failure or all(router._fleet.workers[d.url].link is None for d in ds))
    assert client.failure is None
    assert router.audit().requests[0].stage == "waiting"
    other.mute = other.loading = False
    release(*ds)
    assert await client.answer() == toy_answer(request)
    assert client.messages[-1].attempt == 1
    holder.mute = holder.loading = False
    await cluster.settled()
