"""The engine's loop: what a failing step, a broken device and a failing event end, and what they do not."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable

import numpy as np
import pytest
from tests.unit.test_core import EOS, LAYOUT, request

from slipstream import wire
from slipstream.config import EngineConfig
from slipstream.engine.ahead import Ahead
from slipstream.engine.core import EngineCore
from slipstream.engine.effects import Effect, ToRouter
from slipstream.engine.loop import EngineLoop
from slipstream.engine.plan import StepOutcome, StepPlan
from slipstream.types import Request

PATIENCE_S = 60.0


class PoisonedRunner:
    """Answers 100 to everything; raises for steps that hold a token of `poison`, and for all when `broken`.

    `most` is how many steps were under way at once.
    """

    attention = "none"

    def __init__(self, poison: set[int], depth: int) -> None:
        self.poison = poison
        self.broken = False
        self.depth = depth
        self.most = 0
        self._launched: deque[StepPlan] = deque()

    def launch(self, plan: StepPlan) -> None:
        self._launched.append(plan)
        self.most = max(self.most, len(self._launched))

    def behind(self) -> None: ...

    def ended(self) -> bool:
        return True

    def collect(self) -> StepOutcome:
        plan = self._launched.popleft()
        if self.broken or self.poison & set(plan.token_ids.tolist()):
            raise RuntimeError("the kernel failed")
        return StepOutcome(plan.step, np.where(plan.sample, 100, -1), [None] * plan.sequences)

    def execute(self, plan: StepPlan) -> StepOutcome:
        self.launch(plan)
        return self.collect()


class Work:
    """A running loop; `ended` gets (request, code) of each that has ended, `failures` what ended the loop."""

    def __init__(self, *poison: int, depth: int = 1, runner: PoisonedRunner | None = None) -> None:
        numbers = EngineConfig(page_tokens=4, chunk_tokens=64, max_sequences=16, max_model_len=64)
        self.ended: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self.failures: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
        self.runner = runner or PoisonedRunner(set(poison), depth)
        self.loop = EngineLoop(
            EngineCore(LAYOUT, 65, numbers, (EOS,)),
            self.runner,
            deliver=self._deliver,
            on_step=lambda plan, seconds: None,
            on_failure=self.failures.put,
        )

    def _deliver(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case ToRouter(_, wire.StepOutput(tokens=tokens)):
                    for news in tokens:
                        if news.finish is not None:
                            self.ended.put((news.request, news.finish))
                case ToRouter(_, wire.Failed(request=name, code=code)):
                    self.ended.put((name, code))

    def submit(self, *requests: Request) -> None:
        for one in requests:
            self.loop.post(_submission(one))

    def ends(self, count: int) -> dict[str, str]:
        return dict(self.ended.get(timeout=PATIENCE_S) for _ in range(count))


def _submission(one: Request) -> Callable[[EngineCore], None]:
    return lambda core: core.submit(one, "router")


@pytest.mark.parametrize("depth", [1, 2])
def test_requests_that_cannot_be_computed_end_neither_the_others_nor_the_worker(depth: int) -> None:
    work = Work(13, 23, 33, 43, 53, depth=depth)
    bad = [request(f"bad{start}", 4, start=start) for start in (10, 20, 30, 40, 50)]
    good = [request(f"good{start}", 4, start=start) for start in (60, 70, 80)]
    work.submit(*bad, *good)
    work.loop.start()
    ends = work.ends(8)
    work.submit(request("later", 4, start=90))
    assert work.ends(1) == {"later": "length"}
    work.loop.stop()
    assert ends == {r.id: "engine_failure" for r in bad} | {r.id: "length" for r in good}
    assert work.failures.empty()
    assert work.loop.failed_steps > len(bad)
    assert work.loop.core.audit().settled


@pytest.mark.parametrize("depth", [1, 2])
def test_a_device_that_can_compute_nothing_ends_the_loop_and_blames_no_request(depth: int) -> None:
    work = Work(depth=depth)
    work.runner.broken = True
    work.submit(request("a", 4), request("b", 4, start=50))
    work.loop.start()
    assert str(work.failures.get(timeout=PATIENCE_S)) == "the kernel failed"
    work.loop.stop()
    assert work.ended.empty()


def test_an_event_that_raises_is_logged_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    def fail(core: EngineCore) -> None:
        raise OverflowError("int too large")

    work = Work()
    work.loop.start()
    work.submit(request("before", 4))
    work.loop.post(fail)
    work.submit(request("after", 4, start=50))
    assert work.ends(2) == {"before": "length", "after": "length"}
    work.loop.stop()
    assert work.loop.failed_events == 1
    assert "int too large" in caplog.text
    assert work.failures.empty()


@pytest.mark.parametrize("depth", [1, 2])
def test_as_many_steps_are_under_way_as_the_runner_takes(depth: int) -> None:
    work = Work(depth=depth)
    work.submit(request("a", 4, max_tokens=20), request("b", 4, start=50, max_tokens=30))
    work.loop.start()
    assert work.ends(2) == {"a": "length", "b": "length"}
    work.loop.stop()
    assert work.runner.most == depth
    assert work.loop.core.audit().settled


class HeldRunner(PoisonedRunner):
    """Steps end when `go` is released; `launches` gets the plans."""

    def __init__(self) -> None:
        super().__init__(set(), 2)
        self.go = threading.Semaphore(0)
        self.launches: queue.SimpleQueue[StepPlan] = queue.SimpleQueue()

    def launch(self, plan: StepPlan) -> None:
        super().launch(plan)
        self.launches.put(plan)

    def ended(self) -> bool:
        if over := self.go.acquire(blocking=False):
            self.go.release()
        return over

    def collect(self) -> StepOutcome:
        assert self.go.acquire(timeout=PATIENCE_S)
        return super().collect()


@pytest.mark.parametrize("early", [True, False])
def test_what_comes_before_the_next_step_is_due_is_part_of_it(early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what comes later waits for that step too. A step that ends before its time is noticed."""
    monkeypatch.setattr(Ahead, "due", lambda self, plan, begun: begun + (PATIENCE_S if early else 0.0))
    runner = HeldRunner()
    work = Work(runner=runner)
    work.submit(request("a", 4, max_tokens=8))
    work.loop.start()
    assert runner.launches.get(timeout=PATIENCE_S).sequences == 1
    if not early:
        assert runner.launches.get(timeout=PATIENCE_S).sequences == 1
    work.submit(request("b", 4, start=50, max_tokens=8))
    runner.go.release()
    assert runner.launches.get(timeout=PATIENCE_S).sequences == 2
    runner.go.release(100)
    assert work.ends(2) == {"a": "length", "b": "length"}
    work.loop.stop()
    assert work.failures.empty()


def test_only_a_step_with_another_behind_it_can_have_waited_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of these have ended when the next is launched; behind the last there is none."""
    late: list[bool] = []
    monkeypatch.setattr(Ahead, "ended", lambda self, plan, seconds, *, late: noted(late))
    noted = late.append
    work = Work(depth=2)
    work.submit(request("a", 4, max_tokens=5))
    work.loop.start()
    assert work.ends(1) == {"a": "length"}
    work.loop.stop()
    assert late == [True] * 4 + [False]


def test_steps_under_way_are_settled_when_the_loop_stops() -> None:
    work = Work(depth=2)
    work.submit(request("a", 4, max_tokens=40))
    work.loop.post(lambda core: work.loop.inbox.put(None))
    work.loop.start()
    work.loop.stop()
    assert work.failures.empty()
    assert not work.loop.core._flights
