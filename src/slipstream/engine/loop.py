"""The engine's loop: receive, schedule, compute, settle, deliver.

It runs in a thread of its own and is the only one that touches the EngineCore. Everything that happens elsewhere (a
request, a peer's message, a finished copy) is a function of the core put into `inbox`; everything that should happen
elsewhere (messages, copies) is an effect that the core hands out, delivered after scheduling, so that an offer leaves
before its first chunk computes, and again after the step.

A step that raises fails the sequences in it, which wrote to no pages but their own; the others go on. Several in a row
mean that the device or the program is broken: the loop reports it and ends, links close, and the router continues the
requests elsewhere.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

from slipstream.engine.core import EngineCore
from slipstream.engine.effects import Effect
from slipstream.engine.plan import StepOutcome, StepPlan

logger = logging.getLogger(__name__)

FATAL_FAILURES = 3  # steps in a row that raise before the worker gives up

Event = Callable[[EngineCore], None]


class Runner(Protocol):
    """What executes plans; see `run.runner.Runner`."""

    def execute(self, plan: StepPlan) -> StepOutcome: ...


class EngineLoop:
    """One worker's loop thread.

    `deliver` gets the effects of the core, in order; `on_step` is told of each finished step with its seconds, for
    metrics; `on_failure` is called once when the loop ends by an error. All three are called on the loop thread and
    must not wait.
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
        self._failures = 0
        self._thread = threading.Thread(target=self._run, name="slipstream-loop", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, event: Event) -> None:
        """Runs `event(core)` on the loop thread before the next step."""
        self.inbox.put(event)

    def stop(self) -> None:
        """Ends the loop after the step that is running; waits for it."""
        self.inbox.put(None)
        if threading.current_thread() is not self._thread and self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            plan = None
            while self._receive(wait=plan is None):
                plan = self.core.schedule()
                self._deliver(self.core.take_effects())
                if plan is not None:
                    self._step(plan)
                    self._deliver(self.core.take_effects())
        except Exception as error:
            logger.exception("the engine failed; this worker ends")
            self._on_failure(error)

    def _step(self, plan: StepPlan) -> None:
        started = time.perf_counter()
        try:
            outcome = self._runner.execute(plan)
        except Exception as error:
            self._failures += 1
            if self._failures >= FATAL_FAILURES:
                raise
            logger.exception("step %d failed", plan.step)
            self.core.step_failed(plan, f"the step failed: {type(error).__name__}: {error}")
            return
        self._failures = 0
        self.core.settle(plan, outcome)
        self._on_step(plan, time.perf_counter() - started)

    def _receive(self, *, wait: bool) -> bool:
        """Applies all events that are there, at least one if `wait`; False when the loop should end."""
        try:
            event = self.inbox.get(block=wait)
            while event is not None:
                event(self.core)
                event = self.inbox.get_nowait()
        except queue.Empty:
            return True
        return False
