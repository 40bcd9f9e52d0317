"""The router when workers die, links are cut, and workers say what they should not: each request ends once, rightly."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest
from prometheus_client import generate_latest
from tests.unit.toy_cluster import Client, Cluster, toy_cluster, until, view
from tests.unit.toy_worker import ToyWorker, toy_answer, toy_request, toy_token

from slipstream import wire
from slipstream.errors import EngineFailure, InvalidRequest, NoWorkers, QueueFull, WorkerLost
from slipstream.types import FinishReason, Request, Tokens

AT_PREFILL = ("queued", "prefill", "commit")
AT_DECODE = ("adopt", "decode")


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with toy_cluster() as it:
        yield it


async def held_at(cluster: Cluster, stage: str, ps: list[ToyWorker], ds: list[ToyWorker]) -> tuple[Request, Client]:
    """A request that stands at `stage`, at one of the workers, and the router has heard all that was said before it."""
    for toy in ps + ds:
        toy.hold(stage)
    request = toy_request("r", max_tokens=6)
    client = cluster.send(request)
    await until(lambda: any(toy._counts[stage] for toy in ps + ds))
    heard = {"commit": "handoff", "adopt": "handoff", "decode": "decode"}.get(stage, "prefill")
    await until(lambda: cluster.routers[0].audit().stages[heard] == 1)
    return request, client


def busy(toys: list[ToyWorker]) -> ToyWorker:
    """The one that has the request."""
    (found,) = [toy for toy in toys if toy.tasks or toy.reservations]
    return found


def release(*toys: ToyWorker) -> None:
    for toy in toys:
        toy.release()


# ---------------------------------------------------------------------------------------------------- deaths


@pytest.mark.parametrize("stage", AT_PREFILL + AT_DECODE)
async def test_a_prefill_worker_dies_and_the_answer_is_whole(cluster: Cluster, stage: str) -> None:
    _, ps, ds = await cluster.two_pairs()
    request, client = await held_at(cluster, stage, ps, ds)
    victim = next(p for p in ps if p.submitted)
    await victim.kill()
    await until(lambda: not view(cluster.routers[0], victim).name or view(cluster.routers[0], victim).state != "live")
    release(*ps, *ds)
    assert await client.answer() == toy_answer(request)
    adopted_before = stage == "decode"
    assert client.messages[-1].attempt == (0 if adopted_before else 1)
    await cluster.settled()


@pytest.mark.parametrize("stage", AT_PREFILL[1:] + AT_DECODE)
async def test_a_decode_worker_dies_and_the_answer_is_whole(cluster: Cluster, stage: str) -> None:
    router, ps, ds = await cluster.two_pairs()
    request, client = await held_at(cluster, stage, ps, ds)
    victim = busy(ds)
    await victim.kill()
    await until(lambda: view(router, victim).state != "live")
    release(*ps, *ds)
    assert await client.answer() == toy_answer(request)
    assert client.messages[-1].attempt == 1
    await cluster.settled()


async def test_the_decode_worker_of_a_queued_request_dies(cluster: Cluster) -> None:
    router, ps, ds = await cluster.two_pairs()
    request, client = await held_at(cluster, "queued", ps, ds)
    (submit,) = [s for p in ps for s in p.submitted]
    (victim,) = [d for d in ds if d.info.wire == submit.decode_at]
    await victim.kill()
    await until(lambda: view(router, victim).state != "live")
    release(*ps)
    assert await client.answer() == toy_answer(request)
    await cluster.settled()


@pytest.mark.parametrize("stage", AT_PREFILL + AT_DECODE)
async def test_the_only_pair_loses_its_decode_worker_and_goes_on_alone(cluster: Cluster, stage: str) -> None:
    router, p, d = await cluster.pair()
    request, client = await held_at(cluster, stage, [p], [d])
    await d.kill()
    release(p)
    assert await client.answer() == toy_answer(request)
    assert p.submitted[-1].decode_at is None
    assert router.audit().problems == []
    await cluster.settled()


async def test_both_workers_die_and_the_client_is_told(cluster: Cluster) -> None:
    _, p, d = await cluster.pair(worker_wait_s=0.1)
    _, client = await held_at(cluster, "commit", [p], [d])
    await asyncio.gather(p.kill(), d.kill())
    with pytest.raises(WorkerLost, match=r"after 1 tokens, and (no other could go on|it had been given)"):
        await client.answer()
    await cluster.settled()


async def test_both_workers_die_and_their_successors_finish_the_answer(cluster: Cluster) -> None:
    _, p, d = await cluster.pair(worker_wait_s=20.0, resubmissions=2)
    request, client = await held_at(cluster, "decode", [p], [d])
    await asyncio.gather(p.kill(), d.kill())
    await asyncio.gather(cluster.restart(p), cluster.restart(d))
    assert await client.answer() == toy_answer(request)
    await cluster.settled()


async def test_a_request_is_continued_as_often_as_allowed_and_not_once_more(cluster: Cluster) -> None:
    toys = [await cluster.toy("both", name=f"w{i}") for i in range(3)]
    router = await cluster.router(*toys, resubmissions=1)
    for toy in toys:
        toy.hold("decode")
    client = cluster.send(toy_request("r", max_tokens=3))
    for count in (1, 2):
        await until(lambda count=count: sum(len(toy.submitted) for toy in toys) == count)
        await until(lambda: any(toy._counts["decode"] and toy.tasks for toy in toys))
        victim = busy(toys)
        await victim.kill()
        await until(lambda victim=victim: view(router, victim).state != "live")
    with pytest.raises(WorkerLost, match="given to others 1 times before, which --resubmissions sets; send it again"):
        await client.answer()
    assert b'slipstream_router_failures_total{code="worker_lost"} 1.0' in generate_latest(router.metrics_registry)
    await cluster.settled()


async def test_nothing_is_continued_when_that_is_forbidden(cluster: Cluster) -> None:
    _, ps, ds = await cluster.two_pairs(resubmissions=0)
    _, client = await held_at(cluster, "decode", ps, ds)
    await busy(ds).kill()
    with pytest.raises(WorkerLost, match="decode worker"):
        await client.answer()
    await cluster.settled()


async def test_a_continued_request_tells_its_worker_what_the_client_has(cluster: Cluster) -> None:
    _, p, d = await cluster.pair()
    request, client = await held_at(cluster, "decode", [p], [d])
    await d.kill()
    release(p)
    await client.answer()
    again = p.submitted[-1].request
    assert (again.attempt, again.output_ids) == (1, toy_answer(request)[:1])
    assert again.prompt_ids == request.prompt_ids
    assert again.sampling == request.sampling
    assert [m.cached_tokens for m in client.messages if m.cached_tokens is not None] == [0]


async def test_a_worker_restarted_at_the_same_url_is_another_worker(cluster: Cluster) -> None:
    router, p, d = await cluster.pair()
    request, client = await held_at(cluster, "decode", [p], [d])
    await d.kill()
    release(p)
    successor = await cluster.restart(d)
    assert await client.answer() == toy_answer(request)
    await cluster.met([p, successor])
    assert view(router, successor).id == successor.info.id != d.info.id
    assert view(router, successor).prefix_keys == 0
    assert successor.aborted == []
    later = toy_request("later")
    assert await cluster.send(later).answer() == toy_answer(later)
    assert p.submitted[-1].decode_at == successor.info.wire
    await cluster.settled()


async def test_a_restarted_prefill_worker_is_told_whom_to_meet(cluster: Cluster) -> None:
    router, p, d = await cluster.pair()
    await p.kill()
    successor = await cluster.restart(p)
    await cluster.met([successor, d])
    assert successor.met == [[d.info.wire]]
    assert router.ready
    request = toy_request("r")
    assert await cluster.send(request).answer() == toy_answer(request)
    assert [s.decode_at for s in successor.submitted] == [d.info.wire]


# ---------------------------------------------------------------------------------------------------- cut links


async def test_a_cut_link_is_a_lost_worker_that_comes_back(cluster: Cluster) -> None:
    router, p, d = await cluster.pair()
    request, client = await held_at(cluster, "decode", [p], [d])
    d.cut_routers()
    release(p)
    assert await client.answer() == toy_answer(request)
    d.release()
    await until(lambda: view(router, d).state == "live")
    assert view(router, d).id == d.info.id
    await until(lambda: any((a.request, a.attempt) == ("r", 0) for a in d.aborted))
    await cluster.met([p, d])
    later = toy_request("later")
    assert await cluster.send(later).answer() == toy_answer(later)
    await cluster.settled()


async def test_a_silent_worker_on_another_machine_is_lost_after_three_heartbeats(cluster: Cluster) -> None:
    p, d = await cluster.toy("prefill"), await cluster.toy("decode", host="elsewhere")
    router = await cluster.router(p, d)
    request, client = await held_at(cluster, "decode", [p], [d])
    d.mute = True
    await until(lambda: view(router, d).state != "live")
    release(p)
    assert await client.answer() == toy_answer(request)
    d.mute = False
    d.release()
    await until(lambda: view(router, d).state == "live")
    await cluster.settled()


async def test_a_silent_worker_on_this_machine_gets_nothing_new_and_keeps_what_it_has(cluster: Cluster) -> None:
    router, ps, ds = await cluster.two_pairs()
    request, client = await held_at(cluster, "decode", ps, ds)
    slow = busy(ds)
    slow.mute = True
    await until(lambda: view(router, slow).state == "unhealthy")
    assert "heartbeats" in view(router, slow).problem
    release(*[d for d in ds if d is not slow])
    for i in range(4):
        await cluster.send(toy_request(f"later{i}")).answer()
    assert all(s.decode_at != slow.info.wire for p in ps for s in p.submitted if s.request.id != "r")
    slow.release()
    assert await client.answer() == toy_answer(request)
    assert client.messages[-1].attempt == 0
    slow.mute = False
    await until(lambda: view(router, slow).state == "live")
    assert view(router, slow).problem == ""


# ---------------------------------------------------------------------------------------------------- Failed


def failed(code: str, *, retriable: bool, attempt: int = 0, message: str = "it went wrong") -> wire.Failed:
    return wire.Failed(request="r", attempt=attempt, code=code, message=message, retriable=retriable)


async def test_a_failure_that_cannot_be_retried_reaches_the_client_by_its_code(cluster: Cluster) -> None:
    _, p, d = await cluster.pair()
    _, client = await held_at(cluster, "prefill", [p], [d])
    p.say(failed("invalid_value", retriable=False, message="token 7 is out of range"))
    with pytest.raises(InvalidRequest, match="token 7"):
        await client.answer()
    release(p)
    p._drop(("r", 0))
    await until(lambda: d.aborted)
    await cluster.settled()


async def test_a_failure_that_can_be_retried_is_retried_on_other_workers(cluster: Cluster) -> None:
    _, ps, ds = await cluster.two_pairs()
    request, client = await held_at(cluster, "prefill", ps, ds)
    culprit = next(p for p in ps if p.submitted)
    culprit.say(failed("queue_full", retriable=True))
    release(*ps)
    assert await client.answer() == toy_answer(request)
    assert len(culprit.submitted) == 1
    culprit._drop(("r", 0))
    await cluster.settled()


async def test_a_pair_that_failed_is_not_used_again_for_the_request(cluster: Cluster) -> None:
    _, ps, ds = await cluster.two_pairs(resubmissions=3)
    request, client = await held_at(cluster, "prefill", ps, ds)
    for attempt in range(3):
        await until(lambda attempt=attempt: sum(len(p.submitted) for p in ps) == attempt + 1)
        owner = next(p for p in ps if p.submitted and p.submitted[-1].request.attempt == attempt)
        owner.say(failed("transfer_failed", retriable=True, attempt=attempt))
        owner._drop(("r", attempt))
    release(*ps)
    assert await client.answer() == toy_answer(request)
    pairs = {(p.name, s.decode_at) for p in ps for s in p.submitted}
    assert len(pairs) == 4
    await cluster.settled()


async def test_the_last_failure_is_the_answer_when_there_is_no_other_worker(cluster: Cluster) -> None:
    toy = await cluster.toy("both")
    await cluster.router(toy)
    toy.hold("queued")
    client = cluster.send(toy_request("r"))
    for attempt in range(2):
        await until(lambda attempt=attempt: len(toy.submitted) == attempt + 1)
        toy.say(failed("queue_full", retriable=True, attempt=attempt))
        toy._drop(("r", attempt))
    with pytest.raises(QueueFull, match="it went wrong"):
        await client.answer()
    await cluster.settled()


async def test_a_prefill_worker_that_sees_the_death_first_does_not_cost_the_second_chance(cluster: Cluster) -> None:
    router, p, d = await cluster.pair()
    request, client = await held_at(cluster, "prefill", [p], [d])
    d.mute = True  # its link still stands while its peer speaks of it already
    p.say(failed("worker_lost", retriable=True))
    p._drop(("r", 0))
    await until(lambda: router.audit().requests[0].attempt == 2)
    await until(lambda: len(p.submitted) == 2)
    assert p.submitted[-1].decode_at != d.info.wire
    await d.kill()
    release(p)
    assert await client.answer() == toy_answer(request)
    assert client.messages[-1].attempt == 1


async def test_a_failure_after_the_handover_is_not_the_requests(cluster: Cluster) -> None:
    _, p, d = await cluster.pair()
    request, client = await held_at(cluster, "decode", [p], [d])
    p.say(failed("worker_lost", retriable=True))
    p.say(failed("internal_error", retriable=False))
    p.say(wire.StepOutput(tokens=[]))
    await asyncio.sleep(0.05)
    release(d)
    assert await client.answer() == toy_answer(request)
    assert client.messages[-1].attempt == 0


# ---------------------------------------------------------------------------------------------------- token numbers


def step(
    index: int, ids: list[int], attempt: int = 0, request: str = "r", finish: FinishReason | None = None
) -> wire.StepOutput:
    return wire.StepOutput(tokens=[Tokens(request, attempt, index, ids, finish=finish)])


async def test_repeated_tokens_are_delivered_once(cluster: Cluster) -> None:
    _, p, d = await cluster.pair()
    request, client = await held_at(cluster, "decode", [p], [d])
    right = toy_answer(request)
    d.say(step(0, right[:1]))
    d.say(step(0, right[:3]))
    d.say(step(1, right[1:3]))
    await until(lambda: client.ids == right[:3])
    release(d)
    assert await client.answer() == right


async def test_a_gap_in_a_workers_tokens_ends_the_request_with_an_error(cluster: Cluster) -> None:
    _, p, d = await cluster.pair()
    request, client = await held_at(cluster, "decode", [p], [d])
    right = toy_answer(request)
    d.say(step(1, right[1:2]))
    d.say(step(3, right[3:4]))
    with pytest.raises(EngineFailure, match="tokens 2 to 2"):
        await client.answer()
    assert client.ids == right[:2]
    await until(lambda: d.aborted and p.aborted)
    await cluster.settled()


async def test_a_gap_at_the_prefill_worker_ends_the_request_with_an_error(cluster: Cluster) -> None:
    _, p, d = await cluster.pair()
    _, client = await held_at(cluster, "prefill", [p], [d])
    p.say(step(1, [5]))
    with pytest.raises(EngineFailure, match="tokens 0 to 0"):
        await client.answer()
    await cluster.settled()


async def test_tokens_of_the_decode_worker_wait_for_the_first_token(cluster: Cluster) -> None:
    router, p, d = await cluster.pair()
    request, client = await held_at(cluster, "prefill", [p], [d])
    right = toy_answer(request)
    p.mute = True  # the Pong comes behind the first token
    d.say(wire.Adopted(request="r", attempt=0))
    d.say(step(1, right[1:2]))
    d.say(step(2, right[2:]))
    await until(lambda: router.audit().requests[0].stage == "decode")
    d.say(step(6, [], finish="length"))
    await asyncio.sleep(0.02)
    assert client.ids == []
    p.say(step(0, right[:1]))
    assert await client.answer() == right
    p._drop(("r", 0))
    await cluster.settled()


async def test_a_first_token_that_never_comes_is_a_gap(cluster: Cluster) -> None:
    _, p, _ = await cluster.pair()
    p.sends_first_token = False
    with pytest.raises(EngineFailure, match="tokens 0 to 0"):
        await cluster.send(toy_request("r")).answer()
    await cluster.settled()


@pytest.mark.parametrize("end", ["kill", "cut"])
async def test_a_first_token_lost_with_its_worker_is_made_again(cluster: Cluster, end: str) -> None:
    router, ps, ds = await cluster.two_pairs()
    request, client = await held_at(cluster, "commit", ps, ds)
    victim = next(p for p in ps if p.submitted)
    (d,) = [d for d in ds if d.reservations]
    life = router._lives.under_way()[0]
    life.delivered.clear()  # as if the first token had been on the way
    client.ids.clear()
    d.say(wire.Adopted(request="r", attempt=0))
    await until(lambda: life.stage == "decode")
    if end == "kill":
        await victim.kill()
        await until(lambda: view(router, victim).state != "live")
    else:
        link = router._fleet.find(victim.url).link
        victim.cut_routers()
        await until(lambda: all(worker.link is not link for worker in router._fleet.linked()))
        await until(lambda: view(router, victim).state == "live")
    assert life.attempt == 0
    d.say(step(1, toy_answer(request)[1:2]))
    release(*ps, *ds)
    assert await client.answer() == toy_answer(request)
    assert client.messages[-1].attempt == 1
    await cluster.settled()


async def test_a_request_refused_by_a_decode_worker_that_drains_goes_to_a_busier_one(cluster: Cluster) -> None:
    p, *ds = [
        await cluster.toy("prefill"),
        await cluster.toy("decode", name="d0"),
        await cluster.toy("decode", name="d1"),
    ]
    router = await cluster.router(p, *ds)
    for d in ds:
        d.hold("decode")
    other = cluster.send(toy_request("other"))
    await until(lambda: router.audit().stages["decode"] == 1)
    (full,) = [d for d in ds if d.tasks]
    (empty,) = [d for d in ds if d is not full]
    p.hold("prefill")
    client = cluster.send(request := toy_request("r"))
    await p.reached("prefill", 2)
    assert p.submitted[-1].decode_at == empty.info.wire
    p._drop(("r", 0))
    p.say(failed("no_workers", retriable=True, message="the decode worker is draining"))
    await p.reached("prefill", 3)
    assert view(router, empty).state == "live"  # its own word that it drains has not come yet
    assert p.submitted[-1].decode_at == full.info.wire
    release(p, *ds)
    assert await client.answer() == toy_answer(request)
    await other.answer()
    await cluster.settled()


async def test_late_tokens_of_an_earlier_attempt_and_of_strangers_are_ignored(cluster: Cluster) -> None:
    router, ps, ds = await cluster.two_pairs()
    request, client = await held_at(cluster, "decode", ps, ds)
    dead = busy(ds)
    dead.cut_routers()
    (other,) = [d for d in ds if d is not dead]
    await other.reached("decode")
    await until(lambda: view(router, dead).state == "live")
    dead.say(step(1, [111]))
    dead.say(step(1, [222], attempt=1))
    dead.say(step(0, [333], request="unknown"))
    dead.say(wire.Adopted(request="r", attempt=0))
    dead.say(wire.Adopted(request="unknown", attempt=0))
    await until(lambda: {a.request for a in dead.aborted} >= {"r", "unknown"})
    release(*ds)
    assert await client.answer() == toy_answer(request)
    assert b"slipstream_router_stale_tokens_total 2.0" in generate_latest(router.metrics_registry)
    await cluster.settled()


async def test_a_worker_that_sends_nonsense_is_cut_off(cluster: Cluster) -> None:
    router, ps, ds = await cluster.two_pairs()
    request, client = await held_at(cluster, "decode", ps, ds)
    culprit = busy(ds)
    culprit.say(wire.Welcome(info=culprit.info))
    release(*ds)
    assert await client.answer() == toy_answer(request)
    await until(lambda: view(router, culprit).state == "live")


# ---------------------------------------------------------------------------------------------------- storm


class Storm:
    """Requests, aborts, deaths, restarts and cut links, in an order drawn from a seed."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.cluster = cluster
        self.random = random.Random(seed)
        self.alive: list[ToyWorker] = []
        self.dead: list[ToyWorker] = []
        self.sent: list[tuple[Request, Client]] = []
        self.aborted: set[str] = set()

    async def start(self, **config: float) -> None:
        roles = ("prefill", "prefill", "decode", "decode", "both")
        self.alive = [await self.cluster.toy(role, name=f"{role}{i}") for i, role in enumerate(roles)]
        await self.cluster.router(*self.alive, **config)

    def request(self) -> Request:
        pick = self.random
        prompt = [pick.randrange(3) for _ in range(pick.randrange(1, 30))]
        return toy_request(f"r{len(self.sent)}", prompt=prompt, max_tokens=pick.randrange(1, 12))

    async def trouble(self) -> None:
        what = self.random.random()
        if what < 0.35 and len(self.alive) > 1:
            victim = self.alive.pop(self.random.randrange(len(self.alive)))
            self.dead.append(victim)
            await victim.kill()
        elif what < 0.75 and self.dead:
            self.alive.append(await self.cluster.restart(self.dead.pop(0)))
        elif what < 0.9:
            self.random.choice(self.alive).cut_routers()
        else:
            self.random.choice(self.alive).cut()

    async def blow(self, count: int) -> None:
        router = self.cluster.routers[0]
        while len(self.sent) < count:
            for _ in range(self.random.randrange(1, 8)):
                request = self.request()
                self.sent.append((request, self.cluster.send(request)))
            if self.random.random() < 0.3:
                request, client = self.random.choice(self.sent[-20:])
                if not client.ended.is_set():
                    router.abort(request.id)
                    self.aborted.add(request.id)
            if self.random.random() < 0.15:
                await self.trouble()
            await asyncio.sleep(self.random.choice((0, 0, 0, 0.001, 0.005)))
            assert [p for p in router.audit().problems if "although" not in p] == []
        while self.dead:
            self.alive.append(await self.cluster.restart(self.dead.pop()))


def is_beginning(ids: list[int], request: Request) -> bool:
    return ids == [toy_token(request.prompt_ids, i) for i in range(len(ids))]


@pytest.mark.parametrize("seed", range(6))
async def test_in_a_storm_every_request_ends_once_with_the_right_tokens(cluster: Cluster, seed: int) -> None:
    storm = Storm(cluster, seed)
    await storm.start(worker_wait_s=60.0, resubmissions=1000)
    await storm.blow(300)
    for request, client in storm.sent:
        if request.id in storm.aborted:
            assert not client.ended.is_set()
            assert is_beginning(client.ids, request)
        else:
            assert await client.answer() == toy_answer(request)
    await cluster.settled()


@pytest.mark.parametrize("seed", range(6, 9))
async def test_in_a_storm_with_one_second_chance_every_request_has_its_answer_or_its_error(
    cluster: Cluster, seed: int
) -> None:
    storm = Storm(cluster, seed)
    await storm.start(worker_wait_s=0.5, resubmissions=1)
    await storm.blow(300)
    whole = 0
    for request, client in storm.sent:
        if request.id in storm.aborted:
            continue
        await client.end()
        assert is_beginning(client.ids, request)
        if client.failure is None:
            assert client.ids == toy_answer(request)
            whole += 1
        else:
            assert isinstance(client.failure, WorkerLost | NoWorkers)
    assert whole > 200
    await cluster.settled()
