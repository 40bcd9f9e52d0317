"""Notices that a worker hangs, and ends what cannot end itself.

A thread looks, about once a second, at everything that has to get on: the oldest step under way, whoever has the turn
at the core, the threads that must answer when they are asked, the other ranks (engine/guard.py lists them). Each is a
*source*: it says what is under way, with a mark that changes as soon as it gets on. What keeps its mark for longer than
it may is hung: `on_hang` is called, once, and the watch is over.

The watch counts its own looks, not the clock: a process that was held up as a whole (a stopped container, a machine
without memory) has not hung, and a look that comes late counts for no more than two.

A step may take `limit_s`, and beside that ten times what its work would take at the best pace of any step so far
(`Allowance`). So the limit is short where steps are, and no large prompt on a slow machine is taken for a hang.

The watch's thread needs the interpreter. Native code that never gives it back stops this thread too; then `Alarm` ends
the process. It is a timer of the kernel that each look puts off. When nobody does, the signal's handler, which is
native as well, prints where all threads are, as far as that goes without waiting for who reads it, and the signal ends
the process. This timer does count while the process is stopped: one that was for longer than the alarm allows ends when
it goes on.
"""

from __future__ import annotations

import faulthandler
import logging
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from slipstream import outlet
from slipstream.engine.plan import StepPlan
from slipstream.errors import SlipstreamError

STDERR = 2  # its descriptor
logger = logging.getLogger(__name__)

TICK_S = 1.0
LIKE_A_TOKEN = 4096  # tokens of context whose attention is taken to cost as much as the rest of a token's work
SLACK = 10.0  # how much slower than the best step another may be, for the same work
FIRST_GUESS_S = {"cpu": 0.05, "cuda": 1e-4}  # of a token, before any step has ended: slow machines, large models
LAST_RESORT = 2.0  # limits without a look, before the alarm ends the process


@dataclass(frozen=True, slots=True)
class UnderWay:
    """What a source has to get on with. `mark` is another one as soon as it has; `what` says it in words.

    It may take `more_s` longer than the limit.
    """

    mark: object
    what: Callable[[], str]
    more_s: float = 0.0


Source = Callable[[], UnderWay | None]


class Watch:
    """The watching thread of one worker. `on_hang(what, seconds)` is called there, at most once.

    `sources` are asked at every look, by name; they must not wait. `on_look` is called before them. What raises is
    logged once and asked again at the next look, and the others are asked all the same. An `on_hang` that raises is
    called again, but `on_look` is not, so that a process whose alarm `on_look` puts off ends in any case.
    """

    def __init__(
        self,
        limit_s: float,
        sources: dict[str, Source],
        on_hang: Callable[[str, float], None],
        *,
        on_look: Callable[[], None] | None = None,
    ) -> None:
        self._limit_s = limit_s
        self._sources = sources
        self._on_hang = on_hang
        self._on_look = on_look
        self._tick_s = min(TICK_S, limit_s / 8)
        self._seen: dict[str, tuple[object, float]] = {}  # source -> its mark, and for how long it has been that
        self._faults: set[str] = set()  # what has raised, and was logged
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="slipstream-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns when no look is under way any more."""
        self._stopped.set()
        if threading.current_thread() is not self._thread and self._thread.ident is not None:
            self._thread.join()
        self._seen.clear()

    def age(self, source: str) -> float:
        """Seconds that the present work of this source has been looked at without getting on."""
        return self._seen.get(source, (None, 0.0))[1]

    def look(self, passed_s: float) -> bool:
        """One look, `passed_s` after the one before; False when something hangs."""
        if self._on_look is not None:
            try:
                self._on_look()
            except Exception:
                self._fault("what is done at every look")
        for name, source in self._sources.items():
            try:
                now = source()
            except Exception:
                self._fault(name)
                continue
            if now is None:
                self._seen.pop(name, None)
                continue
            mark, age = self._seen.get(name, (None, 0.0))
            age = age + passed_s if mark == now.mark else 0.0
            self._seen[name] = (now.mark, age)
            if age > self._limit_s + now.more_s:
                return not self._tell(name, now, age)
        return True

    def _tell(self, name: str, hung: UnderWay, age: float) -> bool:
        """Whether the owner has taken it."""
        try:
            what = hung.what()
        except Exception:
            self._fault(f"the words for {name}")
            what = f"{name} has not got on"
        try:
            self._on_hang(what, age)
        except Exception:
            self._fault("the end of a worker that hangs")
            self._on_look = None
            return False
        return True

    def _fault(self, what: str) -> None:
        if what not in self._faults:
            self._faults.add(what)
            logger.exception("a fault in the watch of this worker, at: %s; it goes on, and tries that again", what)

    def _run(self) -> None:
        last = time.monotonic()
        while not self._stopped.wait(self._tick_s):
            now = time.monotonic()
            passed, last = min(now - last, 2 * self._tick_s), now
            if not self.look(passed):
                return


class Pulse:
    """A source that asks a thread for a sign of life. `ask(answer)` has that thread call `answer`; must not wait."""

    def __init__(self, what: str, ask: Callable[[Callable[[], None]], None]) -> None:
        self._what = what
        self._ask = ask
        self._asked = self._answered = 0

    def __call__(self) -> UnderWay | None:
        if self._asked == self._answered:
            number = self._asked = self._asked + 1
            try:
                self._ask(lambda: setattr(self, "_answered", number))
            except (SlipstreamError, RuntimeError):  # it has ended in order
                self._answered = number
                return None
        return UnderWay(self._asked, lambda: self._what)


class Allowance:
    """How much longer than others a step may take for the work in it; `learn` is told of each step that has ended.

    The work of a token counts one, and one more for each `LIKE_A_TOKEN` tokens of context that it attends to.
    """

    def __init__(self, device: str) -> None:
        self._best_s = FIRST_GUESS_S["cpu" if device == "cpu" else "cuda"]
        self._guessed = True

    def learn(self, plan: StepPlan, seconds: float) -> None:
        if not self._guessed and len(plan.token_ids) <= plan.sequences:
            return  # steps that only decode say less than chunks do
        pace = seconds / max(1.0, work(plan))
        self._best_s = pace if self._guessed else min(self._best_s, pace)
        self._guessed = False

    def of(self, plan: StepPlan) -> float:
        """In seconds."""
        return SLACK * work(plan) * self._best_s


def work(plan: StepPlan) -> float:
    lengths = np.diff(plan.query_start)
    return float((lengths * (1.0 + plan.context_lens / LIKE_A_TOKEN)).sum())


def step_in_words(plan: StepPlan) -> str:
    decoding = plan.decodes
    kind = "decode" if decoding == plan.sequences else "prefill" if not decoding else "mixed"
    tokens = len(plan.token_ids)
    return f"{kind} step {plan.step} ({plan.sequences} sequences, {tokens} tokens)"


def stacks() -> str:
    """Where all threads of this process are, by name."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        lines = "".join(traceback.format_stack(frame)).rstrip()
        parts.append(f"thread {names.get(ident, ident)} (innermost call last):\n{lines}")
    return "\n".join(parts)


class Alarm:
    """Ends this process by SIGALRM, with the stacks of all threads, when it is not put off for `seconds`.

    Where standard error cannot be had in a way that never waits (outlet.never_waiting), it ends without them.
    Only for a process that has nothing else to do: the timer and the signal are the process's own.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._closed = False
        fd = outlet.never_waiting(STDERR)
        if fd is not None:
            faulthandler.register(signal.SIGALRM, file=fd, all_threads=True, chain=True)

    def put_off(self) -> None:
        with self._lock:
            if not self._closed:
                signal.setitimer(signal.ITIMER_REAL, self._seconds)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            faulthandler.unregister(signal.SIGALRM)
