"""Copies that are queued when the step that computes their pages is launched, and wait for it on the device."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from tests.unit.test_core import LAYOUT, Bench, request
from tests.unit.test_core_overlap import Overlapped

from slipstream import wire
from slipstream.config import EngineConfig
from slipstream.engine.core import EngineCore
from slipstream.engine.effects import CopyPages, Effect, ToPeer, ToRouter
from slipstream.engine.loop import EngineLoop
from slipstream.engine.plan import StepOutcome, StepPlan
from slipstream.engine.terms import TAIL_BYTES
from slipstream.kv.layout import KVLayout
from slipstream.transfer.job import Behind, CopyTimes
from slipstream.transfer.protocol import Copy, Send, SourceHandoff

PATIENCE_S = 60.0


def grant(xfer: int, *pages: int) -> wire.Grant:
    return wire.Grant(xfer=xfer, skip_tokens=0, pages=list(pages), generation=xfer)


def launched(bench: Bench, plan: StepPlan | None) -> Behind:
    assert plan is not None
    behind = Behind(f"step {plan.step}")
    bench.core.launched(plan, behind)
    bench.take()
    return behind


def begun() -> tuple[Bench, StepPlan, Behind]:
    """A prompt of three granted pages, all of it in one step that has been launched."""
    bench = Bench(chunk_tokens=16)
    bench.core.submit(request(max_tokens=5), "router", "decode")
    plan = bench.plan()
    assert plan is not None
    bench.core.from_destination("decode", grant(1, 7, 8, 9))
    return bench, plan, launched(bench, plan)


def seen(bench: Bench) -> list[tuple[list[int], Behind | None]]:
    return [(job.destination_pages, job.behind) for job in bench.copies]


def test_full_pages_are_copied_behind_their_step_and_the_last_in_part_behind_the_last() -> None:
    bench = Bench(chunk_tokens=6)
    bench.core.submit(request(prompt=14, max_tokens=5), "router", "decode")
    plan = bench.plan()
    assert plan is not None
    bench.core.from_destination("decode", grant(1, 5, 6, 7, 8))
    steps = [launched(bench, plan)]
    assert seen(bench) == [([5], steps[0])]
    bench.settle(plan)
    for _ in range(2):
        plan = bench.plan()
        steps.append(launched(bench, plan))
        assert plan is not None
        bench.settle(plan)
    assert seen(bench) == [([5], steps[0]), ([6, 7], steps[1]), ([8], steps[2])]
    assert not [message for message in bench.peer if isinstance(message, wire.Commit)]
    for _ in range(3):
        bench.core.copies_done("decode", 1, 1)
    bench.take()
    assert isinstance(bench.peer[-1], wire.Commit)


def test_a_grant_that_comes_during_the_step_is_served_behind_it() -> None:
    bench = Bench()
    bench.core.submit(request(max_tokens=5), "router", "decode")
    behind = launched(bench, bench.plan())
    assert bench.copies == []
    bench.core.from_destination("decode", grant(1, 7, 8, 9))
    bench.take()
    assert seen(bench) == [([7, 8], behind)]


def test_a_step_that_holds_nothing_for_others_begins_no_copy() -> None:
    bench = Bench()
    bench.core.submit(request(max_tokens=5), "router", None)
    plan = bench.plan()
    assert not bench.core.handing_over
    launched(bench, plan)
    assert bench.copies == []


def test_what_a_failed_step_should_have_computed_is_copied_again_when_the_first_copy_is_over() -> None:
    bench, plan, first = begun()
    bench.core.step_failed(plan, "the step failed")
    again = bench.plan()
    second = launched(bench, again)
    assert again is not None
    bench.settle(again)
    assert seen(bench) == [([7, 8, 9], first)]
    bench.core.copies_done("decode", 1, 3)
    bench.take()
    assert seen(bench) == [([7, 8, 9], first), ([7, 8, 9], second)]
    assert not [message for message in bench.peer if isinstance(message, wire.Commit)]
    bench.core.copies_done("decode", 1, 3)
    bench.take()
    assert isinstance(bench.peer[-1], wire.Commit)


def test_a_step_behind_a_failed_one_has_its_copies_made_again_too() -> None:
    bench = Overlapped()
    bench.core.submit(request("a", 8, max_tokens=5), "router", "decode")
    bench.core.submit(request("b", 8, start=50, max_tokens=5), "router", "decode")
    plans = [bench.launch()]
    launched(bench, plans[0])
    plans.append(bench.launch())
    for xfer, pages in ((1, (5, 6)), (2, (7, 8))):
        bench.core.from_destination("decode", grant(xfer, *pages))
    launched(bench, plans[1])
    assert [job.xfer for job in bench.copies] == [1, 2]
    bench.under_way.clear()
    bench.core.step_failed(plans[0], "the step failed")
    for xfer in (1, 2):
        bench.core.copies_done("decode", xfer, 2)
    while (plan := bench.plan()) is not None:
        launched(bench, plan)
        bench.settle(plan)
    assert [job.xfer for job in bench.copies] == [1, 2, 1, 2]


def test_a_request_that_ends_during_its_step_keeps_its_pages_until_the_copy_is_over() -> None:
    bench, plan, _ = begun()
    bench.core.abort("r", 0)
    bench.settle(plan)
    assert bench.core.audit().running == 3
    bench.core.copies_done("decode", 1, 3)
    bench.take()
    assert bench.peer[-1] == wire.Released(xfer=1, generation=1)
    assert bench.core.audit().running == 0
    assert bench.core.idle


def test_the_machine_copies_from_where_it_was_rewound_to_and_never_below_what_the_destination_holds() -> None:
    handoff = SourceHandoff(7, "decode", 6, 4)
    handoff.ready(3)
    copies = handoff.on_grant(wire.Grant(xfer=7, skip_tokens=8, pages=[12, 13, 14, 15], generation=3))
    assert copies == [Copy(2, [12])]
    handoff.rewind(1)
    assert handoff.ready(4) == []
    assert handoff.copied() == [Copy(2, [12, 13])]
    handoff.rewind(4)
    assert handoff.ready(5) == [Copy(4, [14])]
    assert handoff.cancel("client_closed_request") == [Send(wire.Cancel(xfer=7, code="client_closed_request"))]


WIDE = KVLayout(
    page_tokens=4, layers=1, kv_heads=1, head_dim=TAIL_BYTES // 16, dtype="float32", total_kv_heads=1, model="m"
)  # two tokens are a tail


@pytest.mark.parametrize(
    ("prompt", "chunk", "decode_at", "lengths"),
    [
        (20, 64, "decode", [18, 2]),
        (16, 64, "decode", [14, 2]),
        (15, 64, "decode", [15]),
        (20, 64, None, [20]),
        (40, 20, "decode", [20, 18, 2]),
        (34, 20, "decode", [20, 14]),
        (19, 18, "decode", [18, 1]),
    ],
)
def test_the_end_of_a_long_prompt_that_is_handed_over_is_a_chunk_of_its_own(
    prompt: int, chunk: int, decode_at: str | None, lengths: list[int]
) -> None:
    bench = Bench(chunk_tokens=chunk, layout=WIDE)
    bench.core.submit(request(prompt=prompt, max_tokens=5), "router", decode_at)
    plans = bench.run()
    assert [len(plan.token_ids) for plan in plans][: len(lengths)] == lengths
    assert len(bench.said("r")) == (1 if decode_at else 5)


# ---------------------------------------------------------------------------------------------------- the loop


class OrderedRunner:
    """A device that keeps an order: `behind` is an event of each step. Steps end when the test lets them."""

    depth = 1
    attention = "none"

    def __init__(self) -> None:
        self.go = threading.Semaphore(0)
        self._launched: deque[StepPlan] = deque()

    def launch(self, plan: StepPlan) -> None:
        self._launched.append(plan)

    def behind(self) -> str:
        return f"event {self._launched[-1].step}"

    def ended(self) -> bool:
        return False

    def collect(self) -> StepOutcome:
        assert self.go.acquire(timeout=PATIENCE_S)
        plan = self._launched.popleft()
        return StepOutcome(plan.step, np.where(plan.sample, 100, -1), [None] * plan.sequences)

    def execute(self, plan: StepPlan) -> StepOutcome:
        self.launch(plan)
        return self.collect()


@contextmanager
def handing_over(
    runner: OrderedRunner,
    deliver: Callable[[list[Effect]], None],
    core: type[EngineCore] = EngineCore,
    **told: Callable[..., Any],
) -> Iterator[EngineLoop]:
    """A running loop with a prompt of three granted pages; nothing may have failed at its end."""
    failures: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    numbers = EngineConfig(page_tokens=4, chunk_tokens=64, max_sequences=4, max_model_len=64)
    loop = EngineLoop(
        core(LAYOUT, 33, numbers, ()),
        runner,
        deliver=deliver,
        on_step=lambda plan, seconds: None,
        on_failure=failures.put,
        **told,
    )
    loop.post(lambda core: core.submit(request(max_tokens=5), "router", "decode"))
    loop.start()
    loop.post(lambda core: core.from_destination("decode", grant(1, 7, 8, 9)))
    yield loop
    loop.stop()
    assert failures.empty()


def test_the_loop_hands_out_copies_while_their_step_computes_and_tells_of_its_end() -> None:
    copies: queue.SimpleQueue[CopyPages] = queue.SimpleQueue()
    ends: queue.SimpleQueue[tuple[Behind, float]] = queue.SimpleQueue()

    def deliver(effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, CopyPages):
                assert effect.behind is not None
                effect.behind.awaited = True
                copies.put(effect)

    runner = OrderedRunner()
    with handing_over(runner, deliver, on_end=lambda behind: ends.put((behind, behind.seen))):
        job = copies.get(timeout=PATIENCE_S)
        assert job.behind is not None
        assert (job.behind.event, job.behind.seen) == ("event 1", 0.0)
        assert ends.empty()
        runner.go.release()
        behind, at = ends.get(timeout=PATIENCE_S)
        assert behind is job.behind
        assert at > 0


class Waiting:
    """What a loop hands out: `jobs` are the copies that wait for their step, `told` names what else goes out."""

    def __init__(self) -> None:
        self.jobs: list[CopyPages] = []
        self.queued = threading.Event()
        self.told: queue.SimpleQueue[str] = queue.SimpleQueue()

    def deliver(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case CopyPages(behind=Behind() as behind):
                    behind.awaited = True
                    self.jobs.append(effect)
                    self.queued.set()
                case ToPeer(message=wire.Commit()):
                    self.told.put("commit")
                case ToRouter(message=wire.StepOutput()):
                    self.told.put("token")

    def end_copies(self, loop: EngineLoop) -> None:
        """As a transfer agent: what has ended is an event for the core."""
        if self.jobs:
            job = self.jobs.pop()
            loop.post(lambda core: core.copies_done(job.peer, job.xfer, len(job.source_pages)))


def test_copies_that_have_ended_when_their_step_is_settled_are_committed_before_the_next_is_planned() -> None:
    waiting = Waiting()
    told = waiting.told

    def look() -> bool:
        waiting.end_copies(loop)
        return False

    class Planning(EngineCore):
        def schedule(self) -> StepPlan | None:
            told.put("plan")
            return super().schedule()

    runner = OrderedRunner()
    with handing_over(runner, waiting.deliver, Planning, look=look) as loop:
        assert waiting.queued.wait(PATIENCE_S)
        while not told.empty():
            told.get()
        runner.go.release()
        assert [told.get(timeout=PATIENCE_S) for _ in range(3)] == ["token", "commit", "plan"]


def test_copies_that_end_soon_behind_their_step_are_looked_for_until_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.engine.loop.COPIES_S", PATIENCE_S)
    waiting = Waiting()
    looks = 0

    def look() -> bool:
        nonlocal looks
        looks += 1
        if looks == 3:
            waiting.end_copies(loop)
        return bool(waiting.jobs)

    runner = OrderedRunner()
    with handing_over(runner, waiting.deliver, look=look) as loop:
        assert waiting.queued.wait(PATIENCE_S)
        runner.go.release()
        while waiting.told.get(timeout=PATIENCE_S) != "commit":
            pass
    assert looks == 3


@pytest.mark.parametrize(
    ("over", "submitted", "begun"),
    [(3.0, 3.0, 3.0), (0.5, 1.0, 2.0), (0.0, 9.0, 9.0)],
    ids=["waited", "was ready", "ended before the host saw the step end"],
)
def test_the_time_that_a_copy_waits_for_its_step_is_not_the_copys(over: float, submitted: float, begun: float) -> None:
    times = CopyTimes(1.0, begun=2.0)
    times.end(9.0, Behind("event", seen=over))
    assert (times.submitted, times.begun, times.ended) == (submitted, begun, 9.0)
