"""Copies of all ranks of a worker: one job of the engine is one job on every rank, and is over when all have answered.

Rank 0 copies by its own agent; the others get an order behind the step that computes the pages. A job that fails on one
rank has failed, but is reported only when no rank has anything of it under way.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass

from slipstream.errors import SlipstreamError
from slipstream.ranks.team import Team
from slipstream.transfer.agent import CopyJob, TransferAgent


@dataclass(slots=True)
class _Pending:
    job: CopyJob
    left: set[int]  # ranks that have not answered
    error: str | None = None


class RankCopies:
    """`on_done(job, error)` is called once for each job, on whichever thread heard the last answer.

    `here` and `elsewhere` are what the agent of rank 0 and the team call; `attach` comes before the first job.
    """

    def __init__(self, on_done: Callable[[CopyJob, str | None], None]) -> None:
        self._on_done = on_done
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self._agent: TransferAgent | None = None
        self._team: Team | None = None
        self._collected: Callable[[], int] = lambda: -1
        self._under_way: dict[str, dict[CopyJob, int]] = {}  # peer -> its jobs with their numbers, the oldest first

    def oldest(self, peer: str) -> int | None:
        """The number of the oldest job for this peer that is not over; None when it has none. From any thread."""
        with self._lock:
            return next(iter(self._under_way.get(peer, {}).values()), None)

    def attach(self, agent: TransferAgent, team: Team | None, collected: Callable[[], int]) -> None:
        """`collected` says which step is the last that is computed."""
        self._agent, self._team, self._collected = agent, team, collected

    def submit(self, *jobs: CopyJob) -> None:
        """Starts copies on all ranks. Called with the turn at the core."""
        assert self._agent is not None
        with self._lock:
            for job in jobs:
                self._under_way.setdefault(job.peer, {})[job] = next(self._numbers)
        if self._team is not None:
            for job in jobs:
                self._order(self._team, job)
        self._agent.submit(*jobs)

    def _order(self, team: Team, job: CopyJob) -> None:
        """Has the other ranks copy their part."""
        others = set(range(1, team.size))
        with self._lock:
            number = self._under_way[job.peer][job]
            self._pending[number] = _Pending(job, {0, *others})
        pages = [list(map(int, side)) for side in (job.source_pages, job.destination_pages)]
        try:
            team.copy(number, job.peer, job.xfer, self._collected(), *pages)
        except SlipstreamError as error:
            for rank in others:
                self.elsewhere(number, rank, error.message)

    def here(self, job: CopyJob, error: str | None) -> None:
        """Rank 0 is done with a job."""
        if self._team is None:
            self._over(job, error)
        else:
            self._answered(self._under_way[job.peer][job], 0, error)

    def elsewhere(self, number: int, rank: int, error: str | None) -> None:
        """Another rank is done with a job."""
        self._answered(number, rank, None if error is None else f"rank {rank}: {error}")

    def lost(self, rank: int, reason: str) -> None:
        """A rank has ended: nothing of it is under way any more."""
        with self._lock:
            waiting = [number for number, pending in self._pending.items() if rank in pending.left]
        for number in waiting:
            self._answered(number, rank, reason)

    def _answered(self, number: int, rank: int, error: str | None) -> None:
        with self._lock:
            pending = self._pending.get(number)
            if pending is None or rank not in pending.left:
                return
            pending.left.discard(rank)
            pending.error = pending.error or error
            if pending.left:
                return
            del self._pending[number]
        self._over(pending.job, pending.error)

    def _over(self, job: CopyJob, error: str | None) -> None:
        with self._lock:
            jobs = self._under_way[job.peer]
            del jobs[job]
            if not jobs:
                del self._under_way[job.peer]
        self._on_done(job, error)
