"""Ends of ranks: a killed follower or leader ends its worker and nothing else; what fails alike is survived."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.proc.programs import LIMIT_S, Server, alive, serving, until
from tests.proc.transfer_child import Node
from tests.proc.transfer_pair import Child
from tests.unit.tiny_models import make_plan, new_row, tiny_model

from slipstream import wire
from slipstream.config import EngineConfig, TransferConfig, WorkerConfig
from slipstream.engine.plan import StepOutcome, StepPlan, probe_plan
from slipstream.engine.worker import Worker
from slipstream.ranks import lead, team
from slipstream.ranks.lead import LeadRunner
from slipstream.ranks.team import RankLost, Team
from slipstream.run.engine_model import OpenedModel, open_model
from slipstream.stream import Link
from slipstream.transfer.peer import disconnect, source_gone
from slipstream.transfer.rank import RankHere
from slipstream.transfer.transports.base import Exports
from slipstream.types import Request, SamplingParams


def followers(leader: int) -> list[int]:
    """The pids of the other ranks of the worker with this pid."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError):
            parent = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
            if parent == leader and b"slipstream.ranks.follower" in Path(f"/proc/{entry}/cmdline").read_bytes():
                found.append(int(entry))
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "llama", tokenizer=True)


# ------------------------------------------------------------------------------------------------- in a cluster


def test_a_killed_rank_is_a_pause_for_requests_and_leaves_nothing_behind(model: Path) -> None:
    arguments = ("--prefill", "tp2@cpu", "--decode", "2xcpu", "--dtype", "float32")
    with serving(*arguments, model=str(model)) as (program, server, pids):
        name = server.get("/v1/models")[1]["data"][0]["id"]
        wanted = complete(server, name)
        (follower,) = followers(pids["prefill-0"])
        answered = [in_background(lambda: complete(server, name)) for _ in range(3)]
        os.kill(follower, signal.SIGKILL)
        program.says(rf"rank 1 \(pid {follower}\) of this worker was ended by SIGKILL")
        assert [answer() for answer in answered] == [wanted] * 3
        until(lambda: not alive(pids["prefill-0"]), "the worker ends with its rank")

        until(lambda: server.pids().get("prefill-0", pids["prefill-0"]) != pids["prefill-0"], "it is started again")
        assert complete(server, name) == wanted
        leader = server.pid("prefill-0")
        (follower,) = until(lambda: followers(leader), "its other rank")
        answered = [in_background(lambda: complete(server, name)) for _ in range(3)]
        os.kill(leader, signal.SIGKILL)
        until(lambda: not alive(follower), "the other rank ends")
        assert [answer() for answer in answered] == [wanted] * 3
        until(lambda: server.pids().get("prefill-0", leader) != leader, "it is started again")
        assert complete(server, name) == wanted
        every = list(until(lambda: len(found := server.pids()) == 3 and found, "all workers are live").values())
        every += [rank for pid in every for rank in followers(pid)]
        program.process.send_signal(signal.SIGTERM)
        assert program.ends() == 0
    until(lambda: not any(map(alive, every)), "all processes end")


async def test_a_worker_that_ends_with_its_rank_blames_no_request_for_it(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it said of its copies would cost the requests their second chance: the end of its link says more."""
    engine = EngineConfig(model=str(model), dtype="float32", kv_tokens=256, threads=1, device="cpu")
    two_ranks = msgspec.structs.replace(engine, tp=2)
    with (
        Worker(engine, WorkerConfig(role="decode", name="d"), TransferConfig()) as d,
        Worker(two_ranks, WorkerConfig(role="prefill", name="p"), TransferConfig()) as p,
    ):
        assert p._team is not None
        monkeypatch.setattr(p._team, "copy", lambda *_: None)  # a copy that rank 1 is never done with
        link = await Link.connect(p.info.wire, wire.Decoder(wire.ToRouter))
        link.send(wire.Hello(kind="router", id="r"))
        sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        asked = Request(id="a", prompt_ids=[5, 6, 7], sampling=sampling)
        link.send(wire.Submit(request=asked, decode_at=d.info.wire))
        heard: list[wire.Message | None] = []
        async with asyncio.timeout(LIMIT_S):
            while not any(isinstance(message, wire.StepOutput) for message in heard):
                heard.append(await link.receive())
            await asyncio.to_thread(until, lambda: p._copies._pending, "the copy is under way")
            os.kill(p._team.pids[0], signal.SIGKILL)
            while heard[-1] is not None:
                heard.append(await link.receive())
        assert not any(isinstance(message, wire.Failed) for message in heard), heard


def complete(server: Server, name: str) -> str:
    body = {"model": name, "prompt": "a few words to begin with" * 4, "max_tokens": 60, "temperature": 0}
    status, answer = server.post("/v1/completions", {**body, "ignore_eos": True})
    assert status == 200, answer
    return answer["choices"][0]["text"]


def in_background(work: Callable[[], str]) -> Callable[[], str]:
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()

    def answer() -> str:
        thread.join(LIMIT_S)
        assert found, "no answer"
        return found[0]

    return answer


# ------------------------------------------------------------------------------------------------- proofs


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_memory_is_free_only_when_every_rank_of_a_lost_source_is_proven_gone(transport: str) -> None:
    mine = [Node(transport, 8, 2) for _ in range(2)]
    theirs = [Child(transport, 8, 2) for _ in range(2)]
    ranks = [RankHere(node.agent) for node in mine]
    try:
        exports = [msgspec.msgpack.decode(child.call("exports"), type=Exports) for child in theirs]
        for rank in ranks:
            await rank.admit("S", exports)
        for child, node in zip(theirs, mine, strict=True):
            assert child.call("connect", "D", node.exports()) == [transport]
            child.call("fill", 3)
            child.ask("write_for_ever", "D")
        for node in mine:
            until(lambda node=node: node.read().all(), "pages arrive")
        theirs[0].kill()
        theirs[1].stop()
        proof = asyncio.ensure_future(source_gone(ranks, "S"))
        if transport == "shm":  # over tcp the receiver writes itself, and cuts the connection
            assert not (await asyncio.wait([proof], timeout=0.5))[0], "a rank that is stopped may still write"
        theirs[1].kill()
        assert await asyncio.wait_for(proof, LIMIT_S)
        for node in mine:
            node.zero()
        await asyncio.sleep(0.2)
        assert not any(node.read().any() for node in mine)
    finally:
        for one in (*theirs, *mine):
            one.close()


async def test_a_rank_of_ours_that_has_ended_gives_no_proof(pair: Pair) -> None:
    (elsewhere,) = pair.team.ranks
    assert await source_gone([elsewhere], "nobody") is True
    os.kill(pair.team.pids[0], signal.SIGKILL)
    assert await source_gone([elsewhere], "nobody") is False
    await disconnect([elsewhere], "nobody/1")


# ------------------------------------------------------------------------------------------------- two ranks alone


class Pair:
    """Rank 0 of a worker without the worker: its runner, and rank 1 as a process."""

    def __init__(self, model: Path, name: str = "pair") -> None:
        engine = EngineConfig(model=str(model), dtype="float32", kv_tokens=256, threads=1, tp=2, device="cpu")
        self.losses: list[RankLost] = []
        self.copied: list[tuple[int, int, str | None]] = []
        self.team = Team(
            engine,
            TransferConfig(),
            ["cpu", "cpu"],
            host="127.0.0.1",
            name=name,
            on_copied=lambda *answer: self.copied.append(answer),
            on_lost=self.losses.append,
        )
        self.opened: OpenedModel = open_model(engine)
        (other,) = self.team.opened()
        self.team.proceed(other.pages)
        fds = self.team.meeting.take(0)
        self.team.meeting.close()
        self.group = self.opened.join(fds)
        self.pool = self.opened.allocate_pool(4096, other.pages)
        self.local = self.opened.runner(self.pool.region, 4)
        self.runner = LeadRunner(self.local, self.team, self.group)
        self.team.ready()

    def close(self) -> None:
        self.group.close()
        self.team.close()
        self.pool.close()


@pytest.fixture
def pair(model: Path) -> Iterator[Pair]:
    """One that the test may break."""
    pair = Pair(model)
    yield pair
    pair.close()


@pytest.fixture(scope="module")
def sound(model: Path) -> Iterator[Pair]:
    pair = Pair(model)
    yield pair
    pair.close()


def plan(step: int, tokens: list[int], **more: Any) -> StepPlan:
    return make_plan([(0, tokens, 0, [3])], new_rows=[new_row(0)], step=step, **more)


def sampled(outcome: StepOutcome) -> int:
    return int(outcome.token_ids[0])


def test_a_step_that_fails_alike_everywhere_is_survived(sound: Pair) -> None:
    before = sampled(sound.runner.execute(plan(1, [5, 6, 7])))
    wrong = plan(2, [5, 100_000, 7])  # no such token: the embedding raises on every rank
    with pytest.raises(IndexError):
        sound.runner.execute(wrong)
    assert sampled(sound.runner.execute(probe_plan(wrong))) >= 0
    assert sampled(sound.runner.execute(plan(3, [5, 6, 7]))) == before
    assert sound.losses == []
    assert sound.runner.collected == 3


def test_a_step_that_fails_on_one_rank_alone_breaks_the_worker(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team, "SETTLE_S", 0.2)

    def refuse(plan: StepPlan) -> StepOutcome:
        raise ValueError("only here")

    monkeypatch.setattr(pair.local, "_run", refuse)
    with pytest.raises(RankLost, match="rank 1 has not failed at step 1"):
        pair.runner.execute(plan(1, [5, 6, 7]))
    monkeypatch.undo()
    with pytest.raises(RankLost, match="have lost step"):
        pair.runner.execute(plan(2, [5, 6, 7]))


def test_ranks_that_sample_different_tokens_are_noticed(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lead, "checksum", lambda outcome: 1)
    pair.runner.execute(plan(1, [5, 6, 7]))
    with contextlib.suppress(RankLost):  # it may have been noticed already
        pair.runner.execute(plan(2, [5, 6, 7]))
    until(lambda: pair.losses, "rank 1 objects")
    assert pair.losses[0].message == "rank 1 has sampled other tokens than rank 0 in step 1"
    with pytest.raises(RankLost):
        pair.runner.execute(plan(3, [5, 6, 7]))


def test_a_rank_that_is_killed_frees_the_step_that_waits_for_it(pair: Pair) -> None:
    pair.runner.execute(plan(1, [5, 6, 7]))
    (follower,) = pair.team.pids
    os.kill(follower, signal.SIGSTOP)
    threading.Timer(0.3, os.kill, (follower, signal.SIGKILL)).start()
    with pytest.raises(Exception, match=r"is gone|was ended by SIGKILL"):  # and not that it has been silent for long
        pair.runner.execute(plan(2, [5, 6, 7]))
    until(lambda: pair.losses, "the team hears of it")
    assert "was ended by SIGKILL" in pair.losses[0].message
    assert "a worker cannot go on without it" in pair.losses[0].message


def test_a_copy_order_waits_for_its_step_and_is_answered(sound: Pair) -> None:
    sound.runner.execute(plan(8, [5, 6, 7]))
    sound.team.copy(41, "nobody/1", 7, sound.runner.collected, [3], [4])
    until(lambda: sound.copied, "an answer")
    assert sound.copied == [(41, 1, "there is no route to nobody/1")]


def test_a_rank_that_cannot_load_its_part_says_why(model: Path) -> None:
    engine = EngineConfig(model=str(model), dtype="float32", kv_tokens=256, threads=1, tp=2, device="cpu")
    wrong = msgspec.structs.replace(engine, device="cuda:7")
    other = Team(
        wrong,
        TransferConfig(),
        ["cpu", "cuda:7"],
        host="127.0.0.1",
        name="",
        on_copied=lambda *_: None,
        on_lost=lambda _: None,
    )
    with pytest.raises(Exception, match="rank 1: device 'cuda:7' does not exist here"):
        other.opened()
    other.close()
