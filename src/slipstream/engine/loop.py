"""The engine's loop: receive, schedule, launch, settle, deliver.

It runs in a thread of its own and is the only one that touches the EngineCore. Everything that happens elsewhere (a
request, a peer's message, a finished copy) is a function of the core put into `inbox`; everything that should happen
elsewhere (messages, copies) is an effect that the core hands out, delivered after scheduling, so that an offer leaves
before its first chunk computes, and again after the step.

Where the runner allows it a step is launched before the one in front of it has been collected: the device goes on while
the host settles that one, tells its tokens, and plans the next.

A step that raises has harmed no pages but those of its sequences, so the core finds by trying them one by one which of
them cannot be computed, and fails that one. Before that the loop asks the device for a step that no request has a part
in. When that raises too the device or the program is broken: the loop reports it and ends, links close, and the router
continues the requests elsewhere.

An event that raises (a peer that breaks the protocol, a bug) is logged and counted, and the loop goes on: ending the
worker would fail all requests for the sake of one message.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from slipstream.engine.core import EngineCore
from slipstream.engine.effects import Effect
from slipstream.engine.plan import StepOutcome, StepPlan, probe_plan

logger = logging.getLogger(__name__)

Event = Callable[[EngineCore], None]


class Runner(Protocol):
    """What executes plans, in the order in which they are launched; see `run.runner.Runner`.

    `depth` is how many steps may be launched before the first of them is collected. `launch` returns before the step
    is done where the device allows, and raises nothing; `collect` waits for the oldest step under way, and raises what
    that step raised. `execute` is both. `attention` names its backend.
    """

    @property
    def depth(self) -> int: ...
    @property
    def attention(self) -> str: ...
    def launch(self, plan: StepPlan) -> None: ...
    def collect(self) -> StepOutcome: ...
    def execute(self, plan: StepPlan) -> StepOutcome: ...


class EngineLoop:
    """One worker's loop thread.

    `deliver` gets the effects of the core, in order; `on_step` is told of each finished step with its seconds, for
    metrics; `on_failure` is called once when the loop ends by an error. All three are called on the loop thread and
    must not wait. `failed_events` and `failed_steps` count what raised.
    """

    def __init__(
        self,
        core: EngineCore,
        runner: Runner,
        *,
        deliver: Callable[[list[Effect]], None],
        on_step: Callable[[StepPlan, float], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self.core = core
        self.inbox: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._runner = runner
        self._deliver = deliver
        self._on_step = on_step
        self._on_failure = on_failure
        self.failed_events = 0
        self.failed_steps = 0
        self._under_way: deque[tuple[StepPlan, float]] = deque()  # with the time of their launch
        self._finished = 0.0
        self._thread = threading.Thread(target=self._run, name="slipstream-loop", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, event: Event) -> None:
        """Runs `event(core)` on the loop thread before the next step."""
        self.inbox.put(event)

    def stop(self) -> None:
        """Ends the loop after the steps that are under way; waits for them."""
        self.inbox.put(None)
        if threading.current_thread() is not self._thread and self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            idle = True
            while self._receive(wait=idle):
                plan = self.core.schedule()
                self._deliver(self.core.take_effects())
                if plan is not None:
                    self._launch(plan)
                idle = not self._under_way
                if self._under_way and (plan is None or len(self._under_way) == self._runner.depth):
                    self._finish()
            while self._under_way:
                self._finish()
        except Exception as error:
            logger.exception("the engine failed; this worker ends")
            self._on_failure(error)

    def _launch(self, plan: StepPlan) -> None:
        self._under_way.append((plan, time.perf_counter()))
        self._runner.launch(plan)

    def _finish(self) -> None:
        """Waits for the oldest step and settles it; the time of a step counts from the end of the one before."""
        plan, launched = self._under_way.popleft()
        try:
            outcome = self._runner.collect()
        except Exception as error:
            self._give_up(plan, error)
        else:
            self.core.settle(plan, outcome)
            begun, self._finished = max(launched, self._finished), time.perf_counter()
            self._on_step(plan, self._finished - begun)
        self._deliver(self.core.take_effects())

    def _give_up(self, plan: StepPlan, error: Exception) -> None:
        """A step has failed, and with it those launched behind it. Raises when the device can compute nothing."""
        self.failed_steps += 1
        logger.error("step %d of %d sequences failed", plan.step, plan.sequences, exc_info=error)
        for _ in range(len(self._under_way)):
            with contextlib.suppress(Exception):
                self._runner.collect()
        self._under_way.clear()
        self._runner.execute(probe_plan(plan))
        self.core.step_failed(plan, f"the step failed: {type(error).__name__}: {error}")

    def _receive(self, *, wait: bool) -> bool:
        """Applies all events that are there, at least one if `wait`; False when the loop should end."""
        try:
            event = self.inbox.get(block=wait)
            while event is not None:
                self._apply(event)
                event = self.inbox.get_nowait()
        except queue.Empty:
            return True
        return False

    def _apply(self, event: Event) -> None:
        try:
            event(self.core)
        except Exception:
            self.failed_events += 1
            logger.exception("an event failed and was left out; this worker goes on")
