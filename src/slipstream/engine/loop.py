"""The engine's loop: receive, schedule, launch, settle, deliver.

Everything that happens elsewhere (a request, a peer's message, a finished copy) is a function of the core, posted here;
everything that should happen elsewhere (messages, copies) is an effect that the core hands out, delivered after
scheduling, so that an offer leaves before its first chunk computes, and again after the step.

One thread at a time touches the core: the one that has the turn. The loop thread has it between two steps. Whoever
posts an event while nobody has it takes it and does what the event asks for then and there, instead of waking the loop
thread for it: on a virtual machine a thread that sleeps takes longer to wake than a handoff's message takes to be
answered. So what peers say, and the ends of copies, are heeded while a step computes too. If the turn is taken, the one
that has it sees to the event before it goes. Events are applied, and effects delivered, in one order whatever the
threads.

Steps are launched and collected by the loop thread alone. While none is under way the one that has the turn plans the
next, else the loop thread does.

Where the runner allows it a step is launched before the one in front of it has been collected: the device goes on while
the host settles that one and tells its tokens. It is planned late (engine/ahead.py), so that what comes meanwhile need
not wait for one step more. Where the runner has an event behind the step (`behind`), the copies of what the step
computes are handed out as soon as it is launched, to wait for it on the device.

A step that raises has harmed no pages but those of its sequences, so the core finds by trying them one by one which of
them cannot be computed, and fails that one. Before that the loop asks the device for a step that no request has a part
in. When that raises too the device or the program is broken: the loop reports it and ends, links close, and the router
continues the requests elsewhere.

An event that raises (a peer that breaks the protocol, a bug) is logged and counted, and the loop goes on: ending the
worker would fail all requests for the sake of one message.

A step that never ends raises nothing: `step` and `turn` are what the watch (engine/watch.py) looks at, from outside.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from slipstream.engine.ahead import Ahead
from slipstream.engine.core import EngineCore
from slipstream.engine.effects import Effect
from slipstream.engine.plan import StepOutcome, StepPlan, probe_plan
from slipstream.transfer.job import Behind

logger = logging.getLogger(__name__)

Event = Callable[[EngineCore], None]

GLANCE_S = 20e-6  # between two looks for copies that waited for a step
COPIES_S = 0.4e-3  # how long they are looked for
LOOK_S = 1e-3  # how often it is looked whether a step has ended that the next was not planned behind yet


class Runner(Protocol):
    """What executes plans, in the order in which they are launched; see `run.runner.Runner`.

    `depth` is how many steps may be launched before the first of them is collected. `launch` returns before the step
    is done where the device allows, and raises nothing; `behind` is the device's event behind the step launched last,
    None where copies have to wait until it is collected; `ended` says whether the oldest step under way is over;
    `collect` waits for that, and raises what it raised. `execute` launches and collects. `attention` names its backend.
    """

    @property
    def depth(self) -> int: ...
    @property
    def attention(self) -> str: ...
    def launch(self, plan: StepPlan) -> None: ...
    def behind(self) -> Any: ...
    def ended(self) -> bool: ...
    def collect(self) -> StepOutcome: ...
    def execute(self, plan: StepPlan) -> StepOutcome: ...


class Post(Protocol):
    """Has events applied to the core, in their order; those of one call before anything is decided on any of them."""

    def __call__(self, *events: Event) -> None: ...


class EngineLoop:
    """One worker's loop thread, and the turns of others at its core.

    `deliver` gets the effects of the core, in order; `on_step` is told of each finished step with its seconds, for
    metrics; `on_end` of each step that copies wait for, as soon as it is over; `look` is called when that step has been
    settled, and a few times more, while it says that some of its copies are still under way: they last about as long
    as it takes to wake whoever waits for them; `on_failure` is called once when the loop ends by an error. The first is
    called by whoever has the turn, the others on the loop thread; none may wait.
    `rehearse` is called on the loop thread before anything else, and has the runner for itself. `failed_events` and
    `failed_steps` count what raised.
    """

    def __init__(
        self,
        core: EngineCore,
        runner: Runner,
        *,
        deliver: Callable[[list[Effect]], None],
        on_step: Callable[[StepPlan, float], None],
        on_failure: Callable[[BaseException], None],
        on_end: Callable[[Behind], None] = lambda behind: None,
        look: Callable[[], bool] = lambda: False,
        rehearse: Callable[[], object] | None = None,
    ) -> None:
        self.core = core
        self.inbox: queue.SimpleQueue[Event | None] = queue.SimpleQueue()  # None: the end
        self._runner = runner
        self._deliver = deliver
        self._on_step = on_step
        self._on_failure = on_failure
        self._on_end = on_end
        self._look = look
        self._rehearse = rehearse
        self._rehearsed = threading.Event()
        self.failed_events = 0
        self.failed_steps = 0
        self._turn = threading.Lock()  # whoever holds it may touch the core and what follows
        self._turns = 0  # taken so far
        self._started = False
        self._over = False
        self._broken: Exception | None = None  # what a turn on another thread has raised
        self._under_way: deque[StepPlan] = deque()
        self._planned: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()  # of those, not launched; None: look up
        self._launched: deque[tuple[float, Behind | None]] = deque()  # when, for the others; the loop thread's
        self._finished = 0.0
        self._ahead = Ahead()
        self._late = False  # the oldest step under way was over when the next was launched
        self._planning = 0.0  # when the loop thread began to plan what is to be launched; 0 if it did not
        self._thread = threading.Thread(target=self._run, name="slipstream-loop", daemon=True)

    def start(self) -> None:
        """Returns when the loop thread has rehearsed, and takes what was posted."""
        self._thread.start()
        self._rehearsed.wait()

    def post(self, *events: Event) -> None:
        """Has `event(core)` run for each, here and now where that is possible, else by whoever is at it."""
        for event in events:
            self.inbox.put(event)
        self._serve()

    def stop(self) -> None:
        """Ends the loop after the steps that are under way; waits for them. Not for an event to call."""
        self.inbox.put(None)
        self._serve()
        if threading.current_thread() is not self._thread and self._thread.ident is not None:
            self._thread.join()

    @property
    def step(self) -> StepPlan | None:
        """The oldest step that is planned and not settled. For any thread, without the turn."""
        try:
            return self._under_way[0]
        except IndexError:
            return None

    @property
    def turn(self) -> int | None:
        """The number of the present turn; None while nobody has it. For any thread."""
        return self._turns if self._turn.locked() else None

    # ---------------------------------------------------------------------------------------------- any thread

    def _serve(self) -> None:
        """Sees to what is in the inbox, unless somebody is at it: who then looks again when he is done."""
        while self._started and not (self._over or self.inbox.empty()) and self._turn.acquire(blocking=False):
            try:
                if not self._over:
                    self._take_turn(plan=not self._under_way)
            except Exception as error:
                self._broken, self._over = error, True
                self._planned.put(None)
            finally:
                self._turn.release()

    def _take_turn(self, *, plan: bool) -> None:
        """With the turn: applies all events that are there, plans a step if `plan`, and delivers what follows."""
        self._turns += 1
        self._receive()
        if self._over:
            return
        if plan:
            self._deliver(self.core.take_effects())  # what has just been decided does not wait for a plan
        else:
            self.core.answer_offers()
        step = self.core.schedule() if plan else None
        if step is not None:
            self._under_way.append(step)
            self._planned.put(step)  # the loop thread wakes while we deliver
        self._deliver(self.core.take_effects())

    def _receive(self) -> None:
        while not self._over:
            try:
                event = self.inbox.get_nowait()
            except queue.Empty:
                return
            if event is None:
                self._over = True
                self._planned.put(None)
            else:
                self._apply(event)

    def _apply(self, event: Event) -> None:
        try:
            event(self.core)
        except Exception:
            self.failed_events += 1
            logger.exception("an event failed and was left out; this worker goes on")

    # ---------------------------------------------------------------------------------------------- the loop thread

    def _run(self) -> None:
        try:
            self._prepare()
            self._started = True
            self._serve()
            while self._broken is None and (self._under_way or not self._over):
                self._launch()
                if self._launched:
                    self._plan_ahead()
                    self._serve()
                if self._launched and self._planned.empty():
                    self._finish()
                self._serve()
            if self._broken is not None:
                raise self._broken
        except BaseException as error:
            self._over = True
            logger.exception("the engine failed; this worker ends")
            self._on_failure(error)

    def _prepare(self) -> None:
        """A failure here is no request's: if the device is broken the first step will say so."""
        try:
            if self._rehearse is not None:
                self._rehearse()
        except Exception:
            logger.warning("the rehearsal before the first request failed; that one may be slow", exc_info=True)
        finally:
            self._rehearsed.set()

    def _launch(self) -> None:
        """Launches what is planned; sleeps until there is something, when nothing is under way."""
        with contextlib.suppress(queue.Empty):
            plan = self._planned.get(block=not self._launched)
            while plan is not None:
                began = time.perf_counter()
                self._late = bool(self._launched) and self._runner.ended()
                self._runner.launch(plan)
                self._ahead.launched(plan, time.perf_counter() - (self._planning or began))
                self._planning = 0.0
                event = self._runner.behind()
                behind = None if event is None else Behind(event)
                self._launched.append((began, behind))
                if behind is not None and self.core.handing_over:
                    self._copy_behind(plan, behind)
                plan = self._planned.get_nowait()

    def _copy_behind(self, plan: StepPlan, behind: Behind) -> None:
        with self._turn:
            self._turns += 1
            self.core.launched(plan, behind)
            self._deliver(self.core.take_effects())

    def _plan_ahead(self) -> None:
        if len(self._under_way) < self._runner.depth:
            self._wait_until_due()
            if not self._over:
                began = time.perf_counter()
                with self._turn:
                    self._take_turn(plan=True)
                self._planning = 0.0 if self._planned.empty() else began

    def _wait_until_due(self) -> None:
        """Sleeps while it is too early to plan what comes behind the step that is being computed."""
        due = self._ahead.due(self._under_way[0], max(self._launched[0][0], self._finished))
        while (left := due - time.perf_counter()) > 0 and not (self._over or self._runner.ended()):
            time.sleep(min(left, LOOK_S))

    def _finish(self) -> None:
        """Waits for the oldest step and settles it; the time of a step counts from the end of the one before."""
        plan, (launched, behind) = self._under_way[0], self._launched.popleft()
        outcome, failure = None, None
        try:
            outcome = self._runner.collect()
        except Exception as error:
            failure = error
        self._ended(behind)
        look = behind is not None and behind.awaited
        with self._turn:
            self._turns += 1
            self._under_way.popleft()
            if outcome is None:
                assert failure is not None
                self._give_up(plan, failure)
            else:
                self.core.settle(plan, outcome)
                begun, self._finished = max(launched, self._finished), time.perf_counter()
                self._ahead.ended(plan, self._finished - begun, late=self._late)
                self._late = False  # what is under way now has nothing behind it yet
                self._on_step(plan, self._finished - begun)
            self._deliver(self.core.take_effects())
            if look:
                self._look()
            if not self._over:
                self._take_turn(plan=not self._launched)
        if look:
            self._await_copies()

    def _await_copies(self) -> None:
        """Looks for the ends of copies that waited for a step, for a while and unless there is something to launch."""
        until = time.perf_counter() + COPIES_S
        while self._look() and self._planned.empty() and time.perf_counter() < until:
            time.sleep(GLANCE_S)

    def _ended(self, behind: Behind | None) -> None:
        if behind is not None:
            behind.seen = time.monotonic()
            if behind.awaited:
                self._on_end(behind)

    def _give_up(self, plan: StepPlan, error: Exception) -> None:
        """A step has failed, and with it those launched behind it. Raises when the device can compute nothing."""
        self.failed_steps += 1
        logger.error("step %d of %d sequences failed", plan.step, plan.sequences, exc_info=error)
        for _, behind in self._launched:
            with contextlib.suppress(Exception):
                self._runner.collect()
            self._ended(behind)
        self._launched.clear()
        self._under_way.clear()
        self._runner.execute(probe_plan(plan))
        self.core.step_failed(plan, f"the step failed: {type(error).__name__}: {error}")
