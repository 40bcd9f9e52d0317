"""The router with real sockets and toy workers: requests are served, workers come and go, refusals are clear."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from tests.unit.toy_cluster import Cluster, toy_cluster, until, view
from tests.unit.toy_worker import toy_answer, toy_request

from slipstream.config import RouterConfig
from slipstream.errors import (
    ConfigError,
    ContextTooLong,
    DeadlineExceeded,
    InvalidRequest,
    NoWorkers,
    QueueFull,
)
from slipstream.router import Router, fleet, remote
from slipstream.router.fetch import normalize
from slipstream.router.metrics import RouterMetrics
from slipstream.types import Role, Tokens


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with toy_cluster() as it:
        yield it


# ---------------------------------------------------------------------------------------------------- serving


async def test_a_pair_serves_a_request(cluster: Cluster) -> None:
    _, p, d = await cluster.pair()
    request = toy_request("r", max_tokens=5)
    client = cluster.send(request)
    assert await client.answer() == toy_answer(request)
    assert client.finish == "length"
    assert [m.cached_tokens for m in client.messages] == [0, None, None, None, None]
    assert [s.decode_at for s in p.submitted] == [d.info.wire]
    assert d.submitted == []
    await cluster.settled()


async def test_the_load_counts_every_request_once_queued_or_running(cluster: Cluster) -> None:
    router, p, _ = await cluster.pair()

    def load() -> dict[str, float]:
        text = generate_latest(router.metrics_registry).decode()
        found = re.findall(r'^slipstream_router_load{state="(\w+)"} ([0-9.]+)', text, re.M)
        return {state: float(count) for state, count in found}

    assert load() == {"queued": 0, "running": 0}
    p.hold("queued")
    clients = [cluster.send(toy_request(f"r{n}")) for n in range(3)]
    assert sum(load().values()) == 3  # at once, whatever the workers have reported
    await until(lambda: len(p.submitted) == 3)
    status = router._fleet.workers[p.url].status
    assert status is not None
    status.waiting = 2
    assert load() == {"queued": 2, "running": 1}
    status.waiting = 20  # of other routers too
    assert load() == {"queued": 3, "running": 0}
    p.release()
    for client in clients:
        await client.answer()
    assert load() == {"queued": 0, "running": 0}
    await cluster.settled()


async def test_a_request_of_one_token_ends_at_its_prefill_worker(cluster: Cluster) -> None:
    await cluster.pair()
    request = toy_request("r", max_tokens=1)
    assert await cluster.send(request).answer() == toy_answer(request)
    await cluster.settled()


async def test_a_worker_for_both_serves_alone(cluster: Cluster) -> None:
    toy = await cluster.toy("both")
    await cluster.router(toy)
    request = toy_request("r")
    assert await cluster.send(request).answer() == toy_answer(request)
    assert toy.submitted[0].decode_at is None
    await cluster.settled()


async def test_many_requests_at_once_are_spread_over_equal_workers(cluster: Cluster) -> None:
    _, ps, ds = await cluster.two_pairs()
    requests = [toy_request(f"r{i}", prompt=[i, 1, 2]) for i in range(40)]
    clients = [cluster.send(request) for request in requests]
    for request, client in zip(requests, clients, strict=True):
        assert await client.answer() == toy_answer(request)
    assert [len(p.submitted) for p in ps] == [20, 20]
    decodes = [s.decode_at for p in ps for s in p.submitted]
    assert sorted(decodes.count(d.info.wire) for d in ds) == [20, 20]
    await cluster.settled()


async def test_the_request_of_the_caller_is_not_changed(cluster: Cluster) -> None:
    await cluster.pair()
    request = toy_request("r")
    await cluster.send(request).answer()
    assert request == toy_request("r")


async def test_a_known_prefix_draws_its_requests_to_the_worker_that_holds_it(cluster: Cluster) -> None:
    router, ps, _ = await cluster.two_pairs()
    prefix = list(range(100, 140))
    await cluster.send(toy_request("first", prompt=[*prefix, 1])).answer()
    (holder,) = [p for p in ps if p.submitted]
    await until(lambda: view(router, holder).prefix_keys == 10)
    clients = [cluster.send(toy_request(f"r{i}", prompt=[*prefix, 2, i])) for i in range(3)]
    for client in clients:
        await client.answer()
    assert len(holder.submitted) == 4
    assert [client.messages[0].cached_tokens for client in clients] == [40, 40, 40]
    await cluster.settled()


async def test_a_receiver_that_raises_ends_only_its_own_request(cluster: Cluster) -> None:
    router, p, _ = await cluster.pair()

    class Broken:
        def tokens(self, t: Tokens) -> None:
            raise RuntimeError("this receiver is broken")

        def error(self, e: Exception) -> None:
            raise AssertionError("no call follows")

    router.submit(toy_request("broken", max_tokens=50), Broken())
    request = toy_request("sound", max_tokens=20)
    assert await cluster.send(request).answer() == toy_answer(request)
    await until(lambda: any(abort.request == "broken" for abort in p.aborted))
    await cluster.settled()


# ---------------------------------------------------------------------------------------------------- coming and going


async def test_workers_may_start_after_the_router_that_names_them(cluster: Cluster) -> None:
    p, d = await cluster.toy("prefill"), await cluster.toy("decode")
    await p.kill()
    await d.kill()
    await cluster.router(prefill=(p.url,), decode=(d.url,), worker_wait_s=20.0)
    client = cluster.send(request := toy_request("r"))
    await asyncio.sleep(0.1)
    await cluster.restart(d)
    await cluster.restart(p)
    assert await client.answer() == toy_answer(request)
    await cluster.settled()


async def test_a_worker_that_is_loading_is_asked_again(cluster: Cluster) -> None:
    toy = await cluster.toy("both")
    toy.loading = True
    router = Router(RouterConfig(both=(toy.url,)))
    cluster.routers.append(router)
    await router.start()
    await until(lambda: view(router, toy).problem == "it is loading its model")
    assert not router.ready
    assert router.model_card() is None
    toy.loading = False
    assert await router.wait_ready(60)
    card = router.model_card()
    assert card is not None
    assert (card.name, card.max_model_len) == ("toy", 100_000)


async def test_a_worker_that_joins_takes_its_share(cluster: Cluster) -> None:
    router, p, d = await cluster.pair()
    late = await cluster.toy("prefill", name="late")
    router.add_worker(late.url)
    await cluster.met([p, late, d])
    for i in range(4):
        await cluster.send(toy_request(f"r{i}", prompt=[i])).answer()
    assert len(p.submitted) == len(late.submitted) == 2
    await cluster.settled()


async def test_registering_a_url_again_changes_nothing(cluster: Cluster) -> None:
    router, p, _ = await cluster.pair()
    before = p.info.id
    for _ in range(3):
        assert router.add_worker(p.url + "/").url == p.url
    assert len(router.workers()) == 2
    assert view(router, p).id == before


async def test_a_drained_worker_finishes_what_it_has_and_leaves(cluster: Cluster) -> None:
    router, ps, ds = await cluster.two_pairs()
    ds[0].hold("decode")
    ds[1].hold("decode")
    request = toy_request("r")
    client = cluster.send(request)
    await until(lambda: router.audit().stages["decode"] == 1)
    (d,) = [d for d in ds if d.tasks]
    (other,) = [x for x in ds if x is not d]
    other.release()
    assert router.remove_worker(d.url).state == "leaving"
    await cluster.send(toy_request("later")).answer()
    await until(lambda: d.drained)
    assert d.url in [shown.url for shown in router.workers()]
    d.release()
    assert await client.answer() == toy_answer(request)
    await until(lambda: d.url not in [shown.url for shown in router.workers()])
    assert all(s.decode_at == other.info.wire for p in ps for s in p.submitted if s.request.id == "later")
    await cluster.settled()


async def test_a_worker_removed_without_drain_has_its_requests_continued(cluster: Cluster) -> None:
    router, _, ds = await cluster.two_pairs()
    for d in ds:
        d.hold("decode")
    client = cluster.send(request := toy_request("r"))
    await until(lambda: router.audit().stages["decode"] == 1)
    (d,) = [d for d in ds if d.tasks]
    router.remove_worker(d.info.id, drain=False)
    for toy in ds:
        toy.release()
    assert await client.answer() == toy_answer(request)
    assert client.messages[-1].attempt == 1
    assert d.url not in [shown.url for shown in router.workers()]
    await cluster.settled()


async def test_a_draining_worker_gets_nothing_new(cluster: Cluster) -> None:
    router, ps, _ = await cluster.two_pairs()
    ps[0].drained = True
    ps[0]._publish()
    await until(lambda: view(router, ps[0]).state == "draining")
    for i in range(4):
        await cluster.send(toy_request(f"r{i}")).answer()
    assert ps[0].submitted == []


async def test_prefill_workers_are_told_to_meet_new_decode_workers_before_any_request(cluster: Cluster) -> None:
    router, p, d = await cluster.pair()
    late = await cluster.toy("decode", name="late")
    router.add_worker(late.url)
    await cluster.met([p, d, late])
    assert p.met[-1] == sorted([d.info.wire, late.info.wire])
    assert d.met == []
    routes = view(router, p).routes
    assert {(route.peer, route.transport) for route in routes} == {("decode", "fake"), ("late", "fake")}


async def test_requests_wait_for_the_route_of_a_new_pair(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "MEET_GRACE_S", 600.0)
    p, d = await cluster.toy("prefill"), await cluster.toy("decode")
    p.reports_routes = False
    router = await cluster.router(p, d)
    assert not router.ready
    client = cluster.send(request := toy_request("r"))
    await until(lambda: p._routes)
    assert router.audit().stages["waiting"] == 1
    p.reports_routes = True
    p._publish()
    assert await client.answer() == toy_answer(request)
    await cluster.settled()


# ---------------------------------------------------------------------------------------------------- roles


async def test_prefill_borrows_a_decode_worker_when_none_is_left(cluster: Cluster) -> None:
    router, p, d = await cluster.pair()
    await p.kill()
    await until(lambda: view(router, p).state == "connecting")
    request = toy_request("r")
    assert await cluster.send(request).answer() == toy_answer(request)
    assert d.submitted[0].decode_at is None
    assert b'slipstream_router_borrowed_total{role="prefill"} 1.0' in generate_latest(router.metrics_registry)


async def test_decode_borrows_the_prefill_worker_when_none_is_left(cluster: Cluster) -> None:
    router, p, d = await cluster.pair()
    await d.kill()
    await until(lambda: view(router, d).state == "connecting")
    request = toy_request("r")
    assert await cluster.send(request).answer() == toy_answer(request)
    assert p.submitted[0].decode_at is None
    assert router.ready


async def test_strict_roles_borrow_nobody(cluster: Cluster) -> None:
    router, _, d = await cluster.pair(strict_roles=True, worker_wait_s=0.05)
    await d.kill()
    await until(lambda: view(router, d).state == "connecting")
    assert not router.ready
    with pytest.raises(NoWorkers, match="1 decode connecting, 1 prefill live"):
        await cluster.send(toy_request("r")).answer()


async def test_a_role_that_nobody_has_had_yet_is_waited_for_before_it_is_borrowed(cluster: Cluster) -> None:
    p = await cluster.toy("prefill")
    router = await cluster.router(p, worker_wait_s=600.0)
    assert not router.ready
    client = cluster.send(request := toy_request("r"))
    assert router.audit().stages["waiting"] == 1
    router._fleet._patience_s = 0.0  # the wait is over
    assert await client.answer() == toy_answer(request)
    assert router.ready


async def test_a_role_given_to_the_router_overrides_the_workers_own(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = await cluster.toy("both"), await cluster.toy("both")
    router = await cluster.router(prefill=(a.url,), decode=(b.url,))
    await until(lambda: len(view(router, a).routes) == 1)
    await cluster.send(toy_request("r")).answer()
    assert (len(a.submitted), len(b.submitted)) == (1, 0)
    assert a.submitted[0].decode_at == b.info.wire
    assert "it is used as decode" in caplog.text
    with pytest.raises(ConfigError, match="registered as prefill already"):
        router.add_worker(a.url, "decode")


# ---------------------------------------------------------------------------------------------------- refusals


async def test_workers_with_different_kv_layouts_are_never_paired(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    p, d = await cluster.toy("prefill"), await cluster.toy("decode", name="odd", layout="toy page_tokens=64")
    router = await cluster.router(worker_wait_s=0.05)
    for toy in (p, d):
        router.add_worker(toy.url)
    await until(lambda: p.linked and d.linked and len(router.workers()[1].problems) == 1)
    assert not router.ready
    (problem,) = view(router, p).problems
    assert problem == view(router, d).problems[0]
    assert "prefill has toy page_tokens=4; odd has toy page_tokens=64" in problem
    assert problem in caplog.text
    assert p.met == []
    with pytest.raises(NoWorkers, match=r"KV layout differs: .*page_tokens=4; odd has toy page_tokens=64"):
        await cluster.send(toy_request("r")).answer()


async def test_a_worker_of_another_model_is_refused(cluster: Cluster) -> None:
    router, p, _ = await cluster.pair()
    other = await cluster.toy("decode", served_name="another")
    router.add_worker(other.url)
    await until(lambda: view(router, other).state == "refused")
    assert "'another'" in view(router, other).problem
    assert "'toy'" in view(router, other).problem
    await cluster.send(toy_request("r")).answer()
    assert all(other.info.wire not in peers for peers in p.met)


async def test_a_worker_with_other_weights_under_the_same_name_is_refused(cluster: Cluster) -> None:
    router, _, _ = await cluster.pair()
    other = await cluster.toy("both", weights="fine-tuned")
    router.add_worker(other.url)
    await until(lambda: view(router, other).state == "refused")
    assert "other weights" in view(router, other).problem
    assert "fine-tuned" in view(router, other).problem
    assert other.submitted == []


async def test_a_worker_that_joined_and_says_goodbye_is_forgotten(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    toy = await cluster.toy("both", name="guest")
    router = await cluster.router()
    router.add_worker(toy.url, joins=True)
    await cluster.met([toy])
    await toy.leave()
    await until(lambda: router.workers() == [])
    assert "guest left: guest said goodbye: this worker ends" in caplog.text
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("role", ["both", None])
@pytest.mark.parametrize("joined_before", [False, True])
async def test_a_worker_that_the_operator_named_is_waited_for_after_its_goodbye(
    cluster: Cluster, role: Role | None, joined_before: bool
) -> None:
    toy = await cluster.toy("both")
    router = await cluster.router()
    if joined_before:
        router.add_worker(toy.url, joins=True)
        assert view(router, toy).joins
    router.add_worker(toy.url, role)
    assert not view(router, toy).joins
    assert await router.wait_ready(60)
    await toy.leave()
    await until(lambda: not router.ready)
    assert [shown.url for shown in router.workers()] == [toy.url]
    await cluster.restart(toy)
    assert await router.wait_ready(60)


@pytest.mark.parametrize("joins", [True, False])
async def test_the_former_address_of_a_worker_that_is_back_is_waited_for_if_it_was_named(
    cluster: Cluster, joins: bool
) -> None:
    old = await cluster.toy("both", name="nomad")
    router = await cluster.router()
    router.add_worker(old.url, joins=joins)
    await cluster.met([old])
    await old.kill()
    await until(lambda: view(router, old).state == "connecting")
    new = await cluster.toy("both", name="nomad")
    router.add_worker(new.url, joins=True)
    await cluster.met([new])
    assert {shown.url for shown in router.workers()} == ({new.url} if joins else {old.url, new.url})


async def test_a_router_that_follows_another_keeps_its_workers_as_those_that_joined(cluster: Cluster) -> None:
    toy = await cluster.toy("both")
    router = Router(RouterConfig(both=(toy.url,)), heartbeat_s=0.05)
    cluster.routers.append(router)
    await router.start(joins=True)
    await cluster.met([toy])
    assert view(router, toy).joins
    await toy.leave()
    await until(lambda: router.workers() == [])


async def test_a_worker_that_joined_and_is_gone_without_a_word_is_forgotten_and_one_that_was_named_is_not(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "FORGET_S", 600.0)
    guest, named, both_ways = [await cluster.toy("both", name=name) for name in ("guest", "named", "both-ways")]
    router = await cluster.router(named)
    router.add_worker(guest.url, joins=True)
    router.add_worker("http://127.0.0.1:1", joins=True)  # it ended before it was linked
    router.add_worker(both_ways.url, joins=True)
    router.add_worker(both_ways.url)
    await cluster.met([guest, named, both_ways])
    monkeypatch.setattr(fleet, "FORGET_S", 0.3)
    await until(lambda: len(router.workers()) == 3)  # linked ones stay, however long ago they joined
    assert view(router, guest).state == "live"
    for toy in (guest, named, both_ways):
        await toy.kill()
    await until(lambda: len(router.workers()) == 2)
    assert {shown.url for shown in router.workers()} == {named.url, both_ways.url}
    monkeypatch.setattr(fleet, "FORGET_S", 600.0)
    await cluster.restart(guest)
    router.add_worker(guest.url, joins=True)
    assert await router.wait_ready(60)


@pytest.mark.parametrize(("status", "warned"), [("loading", False), ("ended", False), ("failed: no memory", True)])
async def test_a_worker_that_loads_or_ends_is_waited_for_without_a_warning(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, status: str, warned: bool
) -> None:
    caplog.set_level("INFO")

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 503 x\r\n\r\n" + msgspec.json.encode({"status": status}))
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    router = await cluster.router()
    async with server:
        router.add_worker(url, "both")
        await until(lambda: router.workers()[0].problem)
    said = "not linked, trying again" if warned else f"waiting for a worker at {url}: it is"
    assert said in caplog.text
    assert warned == any(record.levelno >= logging.WARNING for record in caplog.records)


async def test_what_cannot_be_sent_leaves_no_charge(cluster: Cluster) -> None:
    router, _, _ = await cluster.pair()
    request = toy_request("r")
    request.sampling = msgspec.structs.replace(request.sampling, top_k=1 << 70)
    with pytest.raises(OverflowError):
        cluster.send(request)
    assert router.audit().problems == []
    await cluster.send(toy_request("next")).answer()
    await cluster.settled()


@pytest.mark.parametrize("url", ["http://[::1:1", "http://\u2100.x:80", "http://" + 70 * "a" + ".x:80", "http://x:y"])
async def test_an_address_that_is_none_is_refused(cluster: Cluster, url: str) -> None:
    router = await cluster.router()
    with pytest.raises(ConfigError, match="is not a worker's address"):
        router.add_worker(url)


async def test_the_reason_of_a_worker_that_rejects_the_router_is_shown(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "REFUSED_RETRY_S", 0.1)
    toy = await cluster.toy("both")
    toy.rejects = "protocol version differs: 1 and 2"
    router = await cluster.router()
    router.add_worker(toy.url)
    await until(lambda: view(router, toy).state == "refused")
    assert "protocol version differs: 1 and 2" in view(router, toy).problem
    toy.rejects = ""
    assert await router.wait_ready(60)


async def test_one_process_under_two_urls_is_taken_once(cluster: Cluster) -> None:
    toy = await cluster.toy("both")
    router = await cluster.router(toy)
    twin = toy.url.replace("127.0.0.1", "localhost")
    router.add_worker(twin)
    await until(lambda: router.workers()[1].state == "refused")
    assert "same process" in router.workers()[1].problem


async def test_an_address_that_is_no_worker_is_explained(cluster: Cluster) -> None:
    toy = await cluster.toy("both")
    router = await cluster.router()
    router.add_worker(f"http://{toy.info.wire}")
    await until(lambda: router.workers()[0].problem)
    assert router.workers()[0].state == "connecting"
    for wrong in ("ftp://a:1", "http://", "127.0.0.1", "http://a:99999"):
        with pytest.raises(ConfigError, match="HOST:PORT"):
            router.add_worker(wrong)
    with pytest.raises(ConfigError, match="Registered are"):
        router.remove_worker("nobody")


async def test_a_worker_that_ends_while_it_is_asked_is_said_to_have_ended(cluster: Cluster) -> None:
    async def end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()  # with a reset, as a process ends that has not read all

    router = await cluster.router()
    async with await asyncio.start_server(end, "127.0.0.1", 0) as server:
        router.add_worker("http://{}:{}".format(*server.sockets[0].getsockname()))
        await until(lambda: router.workers()[0].problem == "it ended while it was asked")
        assert router.workers()[0].state == "connecting"


def test_addresses_are_brought_to_one_form() -> None:
    assert normalize("127.0.0.1:80") == normalize("http://127.0.0.1:80/x") == "http://127.0.0.1:80"
    assert normalize("http://[::1]:80") == "http://[::1]:80"
    for text in ("http://h:0", "http://\x00:5", "http://:5", "h", "https://h:5"):
        with pytest.raises(ConfigError, match="a worker's address"):
            normalize(text)


async def test_more_requests_than_admitted_are_refused(cluster: Cluster) -> None:
    _, p, _ = await cluster.pair(max_queue=2)
    p.hold("queued")
    clients = [cluster.send(toy_request(f"r{i}")) for i in range(2)]
    with pytest.raises(QueueFull, match="max_queue=2"):
        cluster.send(toy_request("r2"))
    p.release()
    for client in clients:
        await client.answer()
    await cluster.send(toy_request("r2")).answer()


async def test_an_id_in_use_is_refused(cluster: Cluster) -> None:
    _, p, _ = await cluster.pair()
    p.hold("queued")
    cluster.send(toy_request("r"))
    with pytest.raises(InvalidRequest, match="'r' is in use"):
        cluster.send(toy_request("r"))


async def test_the_context_is_that_of_the_smallest_worker(cluster: Cluster) -> None:
    p, d = await cluster.toy("prefill"), await cluster.toy("decode", max_model_len=10)
    router = await cluster.router(p, d)
    card = router.model_card()
    assert card is not None
    assert card.max_model_len == 10
    await cluster.send(toy_request("fits", prompt=[1] * 6, max_tokens=4)).answer()
    with pytest.raises(ContextTooLong, match="together 11"):
        cluster.send(toy_request("does not", prompt=[1] * 7, max_tokens=4))


async def test_a_request_without_workers_waits_and_is_answered(cluster: Cluster) -> None:
    router = await cluster.router(worker_wait_s=0.05)
    client = cluster.send(toy_request("r"))
    assert router.audit().stages["waiting"] == 1
    with pytest.raises(NoWorkers, match="Registered workers: none"):
        await client.answer()
    await cluster.settled()


async def test_without_patience_a_request_without_workers_is_refused_at_once(cluster: Cluster) -> None:
    await cluster.router(worker_wait_s=0)
    with pytest.raises(NoWorkers):
        cluster.send(toy_request("r"))
    await cluster.settled()


# ---------------------------------------------------------------------------------------------------- ends


@pytest.mark.parametrize("stage", ["queued", "prefill", "commit", "adopt", "decode"])
async def test_an_aborted_request_ends_at_both_workers_and_tells_its_client_nothing(
    cluster: Cluster, stage: str
) -> None:
    router, p, d = await cluster.pair()
    (p if stage in ("queued", "prefill", "commit") else d).hold(stage)
    client = cluster.send(toy_request("r"))
    await (p if stage in ("queued", "prefill", "commit") else d).reached(stage)
    heard = len(client.messages)
    router.abort("r")
    router.abort("r")
    p.release()
    d.release()
    await cluster.settled()
    await until(lambda: p.aborted and d.aborted)
    assert len(client.messages) == heard
    assert not client.ended.is_set()
    assert await cluster.send(request := toy_request("r")).answer() == toy_answer(request)


async def test_a_request_whose_end_the_front_has_found_is_finished_and_not_given_up(cluster: Cluster) -> None:
    router, p, d = await cluster.pair()
    d.hold("decode")
    cluster.send(toy_request("r"))
    await d.reached("decode")
    router.abort("r", "stop")
    d.release()
    await until(lambda: p.aborted and d.aborted)
    text = generate_latest(router.metrics_registry)
    assert b'slipstream_router_finished_total{reason="stop"} 1.0' in text
    assert b"slipstream_router_aborted_total 0.0" in text
    await cluster.settled()


async def test_an_abort_while_waiting_ends_the_request(cluster: Cluster) -> None:
    router = await cluster.router(worker_wait_s=0.05)
    client = cluster.send(toy_request("r"))
    router.abort("r")
    await asyncio.sleep(0.1)
    assert not client.ended.is_set()
    await cluster.settled()


@pytest.mark.parametrize("stage", ["queued", "commit", "decode"])
async def test_a_request_that_takes_too_long_ends_with_a_deadline(cluster: Cluster, stage: str) -> None:
    _, p, d = await cluster.pair(request_timeout_s=0.2)
    (d if stage == "decode" else p).hold(stage)
    with pytest.raises(DeadlineExceeded, match=r"0\.2 s"):
        await cluster.send(toy_request("r")).answer()
    await until(lambda: p.aborted and d.aborted)
    await cluster.settled()


async def test_a_stopped_router_answers_what_is_under_way(cluster: Cluster) -> None:
    router, p, d = await cluster.pair()
    p.hold("queued")
    client = cluster.send(toy_request("r"))
    await p.reached("queued")
    await router.stop()
    with pytest.raises(NoWorkers, match="shutting down"):
        await client.answer()
    with pytest.raises(NoWorkers, match="shutting down"):
        cluster.send(toy_request("s"))
    await until(lambda: not p.linked and not d.linked)


# ---------------------------------------------------------------------------------------------------- what it shows


async def test_the_fleet_is_described_as_plain_data(cluster: Cluster) -> None:
    router, p, d = await cluster.pair()
    shown = router.describe()
    assert shown["ready"] is True
    assert shown["router"] == router.id
    assert shown["model"] == {"name": "toy", "model": "toy", "max_model_len": 100_000}
    assert [(w["role"], w["state"], w["url"]) for w in shown["workers"]] == [
        ("prefill", "live", p.url),
        ("decode", "live", d.url),
    ]
    assert shown["workers"][0]["routes"][0]["gb_per_s"] == 1.0


async def test_metrics_count_what_happened(cluster: Cluster) -> None:
    router, p, _ = await cluster.pair()
    await cluster.send(toy_request("r", prompt=range(8))).answer()
    await cluster.send(toy_request("s", prompt=range(8))).answer()
    p.hold("queued")
    cluster.send(toy_request("t"))
    text = generate_latest(router.metrics_registry).decode()
    for line in (
        'slipstream_router_placements_total{decode="decode",prefill="prefill"} 3.0',
        'slipstream_router_finished_total{reason="length"} 2.0',
        "slipstream_router_prefix_hit_tokens_total 7.0",
        "slipstream_router_prompt_tokens_total 19.0",
        'slipstream_router_requests{stage="prefill"} 1.0',
        'slipstream_router_workers{state="live"} 2.0',
        "slipstream_router_queue_wait_seconds_count 3.0",
    ):
        assert line in text


def test_every_metric_is_documented() -> None:
    registry = CollectorRegistry()
    RouterMetrics(registry, dict, dict)
    text = (Path(__file__).parents[2] / "docs/metrics.md").read_text()
    names = {line.split()[2] for line in generate_latest(registry).decode().splitlines() if line.startswith("# HELP")}
    names = {name for name in names if not name.endswith("_created")}
    assert len(names) > 10
    assert {name for name in names if name not in text} == set()


async def test_two_routers_share_workers_without_knowing_of_each_other(cluster: Cluster) -> None:
    first, p, d = await cluster.pair()
    second = Router(RouterConfig())
    cluster.routers.append(second)
    await second.start()
    for toy in (p, d):
        second.add_worker(toy.url)
    assert await second.wait_ready(60)
    request = toy_request("r")
    client = cluster.send(request)
    await second.stop()
    assert await client.answer() == toy_answer(request)
    assert first.id != second.id


async def test_nothing_is_logged_as_an_error_while_all_is_well(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        await cluster.pair()
        for i in range(5):
            await cluster.send(toy_request(f"r{i}")).answer()
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []
