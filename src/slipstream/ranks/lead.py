"""Rank 0's runner: has every other rank execute what it executes, and knows when they have lost step.

A plan goes to the others first and is then launched here, so that all compute it together. A step that fails here must
have failed alike everywhere, after the same number of exchanges, for the next one to find the ranks in step: a wrong
input does that. Otherwise the worker is broken, and every later step fails at once.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from slipstream.engine.plan import StepOutcome, StepPlan
from slipstream.errors import SlipstreamError
from slipstream.ranks.follower import checksum
from slipstream.ranks.team import RankLost, Team


class Runner(Protocol):
    @property
    def depth(self) -> int: ...
    @property
    def attention(self) -> str: ...
    def launch(self, plan: StepPlan) -> None: ...
    def ended(self) -> bool: ...
    def collect(self) -> StepOutcome: ...


class Counting(Protocol):
    exchanges: int


class LeadRunner:
    """Executes plans on all ranks of a worker; for the rest, like the runner of rank 0 that it is given.

    `collected` is the last step that is computed everywhere.
    """

    def __init__(self, runner: Runner, team: Team, group: Counting) -> None:
        self._runner, self._team, self._group = runner, team, group
        self._under_way: deque[tuple[int, int, SlipstreamError | None]] = deque()
        self._broken: SlipstreamError | None = None
        self._checked: tuple[int, int] | None = None
        self.collected = -1

    @property
    def depth(self) -> int:
        return self._runner.depth

    @property
    def attention(self) -> str:
        return self._runner.attention

    def launch(self, plan: StepPlan) -> None:
        error = self._broken or self._team.lost
        if error is None:
            try:
                self._team.plan(plan, self._checked)
                self._runner.launch(plan)
            except SlipstreamError as problem:
                self._broken = error = problem
        self._under_way.append((plan.step, self._group.exchanges, error))

    def behind(self) -> None:
        """Never: the events of other ranks are theirs, and the orders of copies and of steps reach them apart."""

    def ended(self) -> bool:
        return self._under_way[0][2] is not None or self._runner.ended()

    def collect(self) -> StepOutcome:
        step, exchanges, error = self._under_way.popleft()
        if error is not None:
            raise error
        try:
            outcome = self._runner.collect()
        except Exception as problem:
            self._after_failure(step, exchanges, problem)
            raise
        if self._team.lost is not None:
            raise self._team.lost
        if any(failed <= step for failed, _ in self._team.failures):
            self._broken = RankLost(f"a step up to {step} has failed at another rank of this worker, but not here")
            raise self._broken
        self.collected = step
        self._checked = (step, checksum(outcome))
        return outcome

    def _after_failure(self, step: int, exchanges: int, problem: Exception) -> None:
        reason = self._team.failed_alike(step, exchanges)
        if reason:
            self._broken = self._team.lost or RankLost(f"the ranks of this worker have lost step: {reason}")
            raise self._broken from problem
        for key in [key for key in self._team.failures if key[0] == step]:
            del self._team.failures[key]
        self.collected = step

    def execute(self, plan: StepPlan) -> StepOutcome:
        self.launch(plan)
        return self.collect()
