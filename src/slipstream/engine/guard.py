"""What the watch of a worker looks at, and what becomes of a worker that hangs.

    step      the oldest step under way, from when it is planned until it is settled: the runner, the loop thread
    turn      whoever decides, or delivers, with the turn at the core
    io        the IO thread answers
    mover     the mover thread answers
    routes    the routes to a lost peer are closed, which waits for the last copy
    rank N    the IO and mover threads of another rank answer

The links of a worker that hangs are cut there and then, so that routers continue its requests elsewhere; peers free its
grants when its process is gone, as after any death. It says what does not get on, and which rank is to blame. The other
ranks are killed. The process ends by `os._exit`: threads that wait for a device hear no signal, and taking down in
order would wait for them. It does so within a bound, whatever may keep it from saying so. In a process that is not the
worker's own, the worker fails, and what is stuck stays.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from functools import partial

from slipstream import outlet
from slipstream.engine.loop import EngineLoop
from slipstream.engine.plan import StepPlan
from slipstream.engine.server import WorkerServer
from slipstream.engine.watch import (
    LAST_RESORT,
    Alarm,
    Allowance,
    Pulse,
    Source,
    UnderWay,
    Watch,
    stacks,
    step_in_words,
)
from slipstream.errors import SlipstreamError
from slipstream.lifeline import HUNG
from slipstream.ranks.team import Team
from slipstream.transfer.agent import TransferAgent

logger = logging.getLogger(__name__)

END_S = 8.0  # a rank, from the end of the links to the end of the process: more than Team needs to show and kill it


class Hung(SlipstreamError):
    """A worker does not get on any more."""

    code = "hung"


class Guard:
    """The watch of one worker; `limit_s` 0 is none. `allowance` is what steps may take beyond the limit.

    `alone`: the process is the worker's own and ends with it. Otherwise `on_hang(error)` is called, on the watch's
    thread, when links and ranks have been ended.
    """

    def __init__(
        self,
        limit_s: float,
        allowance: Allowance,
        loop: EngineLoop,
        agent: TransferAgent,
        server: WorkerServer,
        team: Team | None,
        *,
        alone: bool,
        on_hang: Callable[[Hung], None],
    ) -> None:
        self._limit_s, self._allowance = limit_s, allowance
        self._loop, self._server, self._team = loop, server, team
        self._on_hang = on_hang
        self._alone = alone
        self._alarm = Alarm(LAST_RESORT * limit_s) if alone and limit_s else None
        sources: dict[str, Source] = {
            "step": self._step,
            "turn": self._turn,
            "io": Pulse("its IO thread has not answered", server.pulse),
            "mover": Pulse("its mover thread has not answered", agent.pulse),
            "routes": self._routes,
        }
        for rank, signs in team.signs().items() if team is not None else ():
            sources[f"rank {rank}"] = partial(self._rank, rank, signs)
        put_off = self._alarm.put_off if self._alarm is not None else None
        self._watch = Watch(limit_s, sources, self._hung, on_look=put_off) if limit_s else None

    def start(self) -> None:
        if self._watch is not None:
            self._watch.start()

    def stop(self) -> None:
        if self._watch is not None:
            self._watch.stop()
        if self._alarm is not None:
            self._alarm.close()

    def step_age(self) -> float:
        """Seconds that the step under way has been watched, 0 when there is none."""
        return self._watch.age("step") if self._watch is not None else 0.0

    # ---------------------------------------------------------------------------------------------- sources

    def _step(self) -> UnderWay | None:
        plan = self._loop.step
        return None if plan is None else UnderWay(plan.step, partial(self._blame, plan), self._allowance.of(plan))

    def _blame(self, plan: StepPlan) -> str:
        ranks = f" ({self._team.blame(plan.step)})" if self._team is not None else ""
        return f"{step_in_words(plan)} has not ended{ranks}"

    def _turn(self) -> UnderWay | None:
        number = self._loop.turn
        return None if number is None else UnderWay(number, lambda: "a turn of its scheduler has not ended")

    def _routes(self) -> UnderWay | None:
        way = self._server.closing_route()
        return None if way is None else UnderWay(way, lambda: f"a copy over the routes {way} of a lost peer runs on")

    def _rank(self, rank: int, signs: Callable[[], int]) -> UnderWay:
        assert self._team is not None
        named = partial(self._team.named, rank)
        return UnderWay(signs(), lambda: f"{named()} has not shown a sign of life")

    # ---------------------------------------------------------------------------------------------- a hang

    def _hung(self, what: str, seconds: float) -> None:
        plan = self._loop.step
        also = f"; {self._blame(plan)}" if plan is not None and step_in_words(plan) not in what else ""
        error = Hung(f"{what} for {seconds:.0f} s{also}")
        if self._alone:
            ranks = self._team.size if self._team is not None else 1
            end = threading.Timer(END_S * ranks, os._exit, (HUNG,))
            end.daemon = True
            end.start()
        self._server.cut(error.message)
        logger.error(
            "this worker hangs: %s (--step-timeout-s %g). Its requests continue elsewhere, and it ends. Where its "
            "threads are follows; `slipstream doctor` looks for causes in the machine. If it was merely slow, give it "
            "more time by --step-timeout-s or smaller steps by --chunk-tokens.",
            error.message,
            self._limit_s,
        )
        logger.error("where the threads of this worker are:\n%s", stacks())
        if self._team is not None:
            self._team.show_stacks()
            self._team.kill()
        if self._alone:
            outlet.drain()
            os._exit(HUNG)
        self._on_hang(error)
