"""The steps under way: which sequences they compute, and what becomes of these when a step has failed.

A step is launched, and landed when its outcome is there, in the same order. A second may be launched before the first
has landed; then it builds on what the first will bring, so the failure of the first makes both void. Their sequences
go back to where they were, and those of the step that failed are computed again, each in a step of its own with
nothing beside it: one that fails so is to blame.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from slipstream.engine.observe import Observer
from slipstream.engine.plan import IntArray, StepPlan
from slipstream.engine.rows import RowTable
from slipstream.engine.scheduler import Scheduler
from slipstream.engine.sequence import Phase, Sequence

MOST = 2  # steps under way: the last token of a row is known on the device one step before it is known here


@dataclass(frozen=True, slots=True)
class Work:
    """What a step computes: a token for each of `decodes`, whose rows are `rows`, and (sequence, tokens) of chunks."""

    decodes: list[Sequence]
    rows: IntArray
    chunks: list[tuple[Sequence, int]]
    alone: bool = False  # one sequence of a step that has failed, by itself


@dataclass(frozen=True, slots=True)
class Flight:
    """A step under way; its sequences are in the order of the plan."""

    plan: StepPlan
    decodes: list[Sequence]
    chunks: list[tuple[Sequence, int]]
    alone: bool


class Flights:
    """Steps under way, the oldest first. `release(sequence)` is called for each that has ended, behind its steps."""

    def __init__(
        self, rows: RowTable, scheduler: Scheduler, observer: Observer, release: Callable[[Sequence], None]
    ) -> None:
        self._rows = rows
        self._scheduler = scheduler
        self._observer = observer
        self._release = release
        self._step = 0
        self._under_way: deque[Flight] = deque()
        self._suspects: list[tuple[Sequence, int]] = []  # of a failed step, with their tokens in it

    def __len__(self) -> int:
        return len(self._under_way)

    @property
    def careful(self) -> bool:
        """Whether a step has failed and its sequences are still being tried one by one."""
        return bool(self._suspects) or any(flight.alone for flight in self._under_way)

    def launch(self, work: Work) -> StepPlan:
        """Makes the plan. A sequence whose last chunk is in it goes on decoding here, unless it is handed over."""
        assert len(self._under_way) < MOST, f"{MOST} steps are under way already"
        self._step += 1
        plan = self._rows.plan(self._step, work.rows, work.chunks)
        for sequence in work.decodes:
            sequence.in_flight += 1
        for sequence, count in work.chunks:
            sequence.in_flight += 1
            sequence.planned += count
            if sequence.planned == len(sequence.tokens) and sequence.handoff is None:
                self._scheduler.shift(sequence, Phase.DECODE)
        self._under_way.append(Flight(plan, work.decodes, work.chunks, work.alone))
        self._observer.planned(self._step, work.decodes, work.chunks)
        return plan

    def find(self, plan: StepPlan) -> Flight | None:
        """The step under way that has this plan; None when it is void."""
        return next((flight for flight in self._under_way if flight.plan is plan), None)

    def prompts(self) -> set[Sequence]:
        """All that steps under way compute chunks of."""
        return {sequence for flight in self._under_way for sequence, _ in flight.chunks}

    def land(self, plan: StepPlan) -> Flight:
        """Takes the oldest step out. Raises ValueError when `plan` is another one."""
        step = self._under_way[0].plan.step if self._under_way else None
        if step != plan.step:
            raise ValueError(f"step {plan.step} has ended, but the oldest under way is {step}")
        return self._under_way.popleft()

    def back(self, sequence: Sequence) -> bool:
        """A step is over for this sequence; False when it ended meanwhile."""
        sequence.in_flight -= 1
        if sequence.phase is Phase.ENDED:
            self._release(sequence)
            return False
        return True

    def void(self, plan: StepPlan) -> list[Sequence]:
        """The oldest step has failed: it and what was launched behind it count for nothing.

        Returns the sequence to blame, if the step held no other.
        """
        failed = self.land(plan)
        void = [failed, *self._under_way]
        self._under_way.clear()
        for flight in void:
            self._rows.retell(flight.plan)
            self._observer.step_failed(flight.plan.step, flight.decodes, flight.chunks)
            for sequence in [*flight.decodes, *(sequence for sequence, _ in flight.chunks)]:
                if self.back(sequence):
                    self._rows.rewind(sequence)
            for sequence, _ in flight.chunks:
                sequence.planned = sequence.computed
                if sequence.phase is Phase.DECODE:
                    self._scheduler.shift(sequence, Phase.PREFILL)
        tried = [*((sequence, 0) for sequence in failed.decodes), *failed.chunks]
        there = [(sequence, count) for sequence, count in tried if sequence.phase is not Phase.ENDED]
        if failed.alone:
            return [sequence for sequence, _ in there]
        self._suspects += reversed(there)
        return []

    def suspect(self) -> Work | None:
        """The next sequence of a failed step, alone; its row and pages are still those of that step."""
        while self._suspects:
            sequence, count = self._suspects.pop()
            if sequence.phase is Phase.DECODE:
                return Work([sequence], np.array([sequence.row]), [], alone=True)
            if sequence.phase is Phase.PREFILL:
                return Work([], np.zeros(0, dtype=np.int64), [(sequence, count)], alone=True)
        return None
