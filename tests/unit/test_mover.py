"""Jobs that any thread starts: each is reported once, whatever raises, ends or closes meanwhile."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.config import TransferConfig
from slipstream.errors import PeerLost, RouteUnavailable, TransferError
from slipstream.kv.layout import KVLayout
from slipstream.transfer.agent import INLINE_PAGES, INLINE_WRITES, CopyJob, TransferAgent
from slipstream.transfer.copies import HeadRange
from slipstream.transfer.mover import CLOSED, Mover
from slipstream.transfer.transports.base import Completion, Context, Exports, Region, Runs
from slipstream.transfer.transports.bell import Bell

LAYOUT = KVLayout(page_tokens=4, layers=1, kv_heads=2, head_dim=8, dtype="float32", total_kv_heads=2)
PAGES = 1024
WAIT_S = 20.0


class Remote:
    bytes = PAGES * LAYOUT.page_bytes

    def __init__(self) -> None:
        self.ended = False


class Scripted:
    """A transport that does as it is told, and lets no two threads in at once.

    `at_write` and `at_open` are called first, and may raise. Tickets end in the next poll, or while `held` when
    `finish` names them. `started` are the (destination offset of the first run, thread) of each write.
    """

    name: ClassVar[str] = "scripted"
    open_blocks: ClassVar[bool] = True
    copies_in_poll: ClassVar[bool] = True

    def __init__(self, inline: int = 1 << 62) -> None:
        self.inline_bytes = inline
        self.held = False
        self.at_write: Callable[[int], object] = lambda ticket: None
        self.at_open: Callable[[], object] = lambda: None
        self.at_close: Callable[[], object] = lambda: None
        self.started: list[tuple[int, int]] = []
        self.tickets = itertools.count(1)
        self.under_way: dict[int, Remote] = {}
        self.done: deque[Completion] = deque()
        self.bell = Bell()
        self._inside = threading.Lock()

    def _enter(self) -> threading.Lock:
        assert self._inside.acquire(blocking=False), "two threads drive one transport"
        return self._inside

    def export(self) -> bytes:
        return b""

    def admit(self, agent: str) -> None: ...

    def cut_off(self, agent: str) -> Future[None]:
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def fileno(self) -> int:
        return self.bell.fileno()

    def open(self, exports: Exports, detail: bytes) -> Remote:
        self.at_open()
        return Remote()

    def write(self, remote: Remote, runs: Runs, after: Any = None) -> int:
        inside = self._enter()
        try:
            ticket = next(self.tickets)
            self.at_write(ticket)
            if remote.ended:
                raise PeerLost("the peer has ended")
            self.started.append((int(runs.destination[0]), threading.get_ident()))
            self.under_way[ticket] = remote
            if not self.held:
                self.finish(ticket)
            return ticket
        finally:
            inside.release()

    def finish(self, ticket: int, error: str | None = None) -> None:
        """From any thread."""
        del self.under_way[ticket]
        self.done.append(Completion(ticket, error))
        self.bell.ring()

    def poll(self) -> list[Completion]:
        inside = self._enter()
        try:
            self.bell.hush()
            return [self.done.popleft() for _ in range(len(self.done))]
        finally:
            inside.release()

    def close(self, remote: Remote) -> None:
        self.at_close()
        inside = self._enter()
        try:
            remote.ended = True
            for ticket in [ticket for ticket, its in self.under_way.items() if its is remote]:
                self.finish(ticket, "the route was closed")
        finally:
            inside.release()

    def shutdown(self) -> None:
        self.bell.close()


class Source:
    """An agent over one scripted transport, and what its jobs came to."""

    def __init__(self, transport: Scripted, ranks: int = 1) -> None:
        size = PAGES * LAYOUT.page_bytes
        region = Region("cpu", 0, size, LAYOUT.page_bytes, PAGES, size, array=np.zeros(size, np.uint8))
        self.transport = transport
        self.outcomes: list[tuple[int, str | None, int]] = []  # number, error, thread
        self.heard = threading.Condition()
        self.then: Callable[[CopyJob], object] = lambda job: None
        self.agent = TransferAgent(region, LAYOUT, TransferConfig(transport="shm"), on_done=self._done, load=self._load)
        heads = [HeadRange(rank, 1) for rank in range(2)] if ranks == 2 else [HeadRange(0, 2)]
        plain = self.agent.exports()
        self.theirs = [
            msgspec.structs.replace(plain, rank=rank, first_head=held.first, heads=held.size, process=f"{rank}")
            for rank, held in enumerate(heads)
        ]

    def _load(self, names: Any, context: Context) -> Any:
        return {"scripted": self.transport}, {}

    def _done(self, job: CopyJob, error: str | None) -> None:
        with self.heard:
            self.outcomes.append((job.xfer, error, threading.get_ident()))
            self.heard.notify_all()
        self.then(job)

    def join(self, peer: str = "D") -> None:
        routes = [
            self.agent.open_route(peer, theirs, "scripted", self.agent.moves_to(self.theirs)[theirs.rank]).result(
                WAIT_S
            )
            for theirs in self.theirs
        ]
        self.agent.use(peer, routes)
        self.settle()

    def settle(self) -> None:
        """Until the mover has done what it was asked and sleeps."""
        done = threading.Event()
        self.agent._mover.ask(done.set)
        assert done.wait(WAIT_S)
        end = time.monotonic() + WAIT_S
        while self.agent._mover._turn.locked() and time.monotonic() < end:
            time.sleep(0.0005)
        time.sleep(0.002)

    def submit(self, number: int, pages: int = 1, peer: str = "D") -> None:
        self.agent.submit(CopyJob(peer, number, list(range(pages)), list(range(pages))))

    def reported(self, count: int) -> dict[int, str | None]:
        """What the first `count` reports said, by job; there is no job that was reported twice."""
        with self.heard:
            assert self.heard.wait_for(lambda: len(self.outcomes) >= count, WAIT_S)
            found = {number: error for number, error, _ in self.outcomes}
            assert len(found) == len(self.outcomes)
        return found


@pytest.fixture
def make() -> Iterator[Callable[..., Source]]:
    sources: list[Source] = []

    def source(inline: int = 1 << 62, ranks: int = 1) -> Source:
        sources.append(Source(Scripted(inline), ranks))
        sources[-1].join()
        return sources[-1]

    yield source
    for one in sources:
        one.transport.at_close = lambda: None
        one.agent.close()


Make = Callable[..., Source]


def test_a_short_job_begins_and_ends_on_the_thread_that_submits_it(make: Make) -> None:
    source = make()
    for number in range(5):
        source.settle()
        source.submit(number, INLINE_PAGES)
    me = threading.get_ident()
    assert [thread for _, thread in source.transport.started] == [me] * 5
    assert source.outcomes == [(number, None, me) for number in range(5)]


def test_a_transport_that_moves_bytes_by_itself_is_not_asked_at_once(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scripted, "copies_in_poll", False)
    source = make()
    source.submit(1)
    assert source.reported(1) == {1: None}
    (_, starter), (_, _, reporter) = source.transport.started[0], source.outcomes[0]
    assert starter == threading.get_ident() != reporter


def test_long_jobs_large_ones_and_those_behind_many_are_begun_by_the_mover(make: Make) -> None:
    source = make(inline=10 * LAYOUT.page_bytes)
    source.submit(0, 11)
    source.reported(1)
    source.transport.inline_bytes = 1 << 62
    source.settle()
    source.submit(1, INLINE_PAGES + 1)
    source.reported(2)
    source.transport.held = True
    for number in range(2, 2 + INLINE_WRITES + 2):
        source.settle()
        source.submit(number)
    source.settle()
    me = threading.get_ident()
    assert [thread == me for _, thread in source.transport.started] == [False] * 2 + [True] * INLINE_WRITES + [
        False
    ] * 2


def test_jobs_submitted_together_begin_in_their_order_and_wake_the_mover_once(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make()
    source.transport.held = True
    rings: list[int] = []
    ring = Bell.ring
    monkeypatch.setattr(Bell, "ring", lambda bell: (rings.append(bell.fileno()), ring(bell)))
    count = INLINE_WRITES + 5
    source.agent.submit(*(CopyJob("D", number, [number], [number]) for number in range(count)))
    assert rings == [source.agent._mover._bell.fileno()]
    source.settle()
    me = threading.get_ident()
    begun = [(ticket, thread == me) for ticket, thread in source.transport.started]
    assert begun == sorted(begun)
    assert [here for _, here in begun] == [True] * INLINE_WRITES + [False] * 5


def test_a_long_job_keeps_those_submitted_behind_it_in_their_order(make: Make) -> None:
    source = make()
    pages = [INLINE_PAGES + 1, 1, 2]
    source.agent.submit(*(CopyJob("D", n, list(range(c)), list(range(c))) for n, c in enumerate(pages)))
    assert source.reported(3) == {0: None, 1: None, 2: None}
    assert threading.get_ident() not in {thread for _, thread in source.transport.started}


def test_jobs_submitted_together_behind_the_end_are_all_reported(make: Make) -> None:
    source = make()
    source.agent.close()
    source.agent.submit(*(CopyJob("D", number, [number], [number]) for number in range(3)))
    assert source.reported(3) == dict.fromkeys(range(3), CLOSED)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("a run leaves the region"),
        PeerLost("the peer has ended"),
        TransferError("the copy engine refuses"),
        RuntimeError("something else"),
        OSError(errno.EBADF, "bad"),
        MemoryError(),
    ],
)
@pytest.mark.parametrize("here", [True, False])
def test_a_start_that_raises_is_reported_once_and_harms_no_other(make: Make, error: Exception, here: bool) -> None:
    source = make(1 << 62 if here else 0)

    def fail(ticket: int) -> None:
        if ticket == 2:
            raise error

    source.transport.at_write = fail
    for number in range(1, 4):
        source.settle()
        source.submit(number)
    found = source.reported(3)
    source.settle()
    assert len(source.outcomes) == 3
    assert found[1] is None
    assert found[3] is None
    assert str(error) in (found[2] or "")
    assert found[2]


def test_a_job_whose_second_rank_cannot_start_fails_when_the_first_has_ended(make: Make) -> None:
    source = make(ranks=2)
    source.transport.held = True

    def fail(ticket: int) -> None:
        if ticket == 2:
            raise RuntimeError("no second rank")

    source.transport.at_write = fail
    source.submit(1)
    source.settle()
    assert source.outcomes == []
    source.transport.finish(1)
    assert "no second rank" in (source.reported(1)[1] or "")
    source.agent.disconnect("D")  # what has ended does not hold it


def test_tickets_that_end_in_another_order_are_reported_with_their_own_errors(make: Make) -> None:
    source = make()
    source.transport.held = True
    for number in range(1, 13):
        source.submit(number)
        source.settle()
    order = random.Random(3).sample(range(1, 13), 12)
    for ticket in order:
        source.transport.finish(ticket, f"error {ticket}" if ticket % 3 == 0 else None)
    assert source.reported(12) == {n: f"error {n}" if n % 3 == 0 else None for n in range(1, 13)}
    assert [number for number, _, _ in source.outcomes] == order


@pytest.mark.parametrize("here", [True, False])
def test_what_the_report_of_a_job_raises_is_logged_and_reported_no_second_time(
    make: Make, here: bool, caplog: pytest.LogCaptureFixture
) -> None:
    source = make(1 << 62 if here else 0)

    def fail(job: CopyJob) -> None:
        raise ArithmeticError("nobody listens")

    source.then = fail
    source.submit(1)
    source.submit(2, peer="unknown")
    source.reported(2)
    source.settle()
    assert len(source.outcomes) == 2
    assert "nobody listens" in caplog.text


@pytest.mark.parametrize("here", [True, False])
def test_a_report_may_submit_the_next_job(make: Make, here: bool) -> None:
    source = make(1 << 62 if here else 0)

    def next_one(job: CopyJob) -> None:
        if job.xfer < 300:
            source.submit(job.xfer + 1)

    source.then = next_one
    source.submit(1)
    assert source.reported(300) == dict.fromkeys(range(1, 301))


def test_jobs_of_one_thread_begin_in_its_order_whoever_begins_them(make: Make) -> None:
    source = make()
    rng = random.Random(1)
    for number in range(400):
        page = [number]
        if rng.random() < 0.3:
            source.agent.use("D", source.agent._routes.used("D") or ())  # wakes the mover, which is then at it or not
        source.agent.submit(CopyJob("D", number, page, page))
        if rng.random() < 0.1:
            source.settle()
    source.reported(400)
    begun = [at // LAYOUT.page_bytes for at, _ in source.transport.started]
    assert begun == list(range(400))
    assert {thread == threading.get_ident() for _, thread in source.transport.started} == {True, False}


def test_a_peer_that_dies_within_submit_fails_the_job(make: Make) -> None:
    source = make()
    source.transport.held = True
    source.submit(1)
    source.settle()
    began, go = threading.Event(), threading.Event()

    def wait(ticket: int) -> None:
        began.set()
        assert go.wait(WAIT_S)

    source.transport.at_write = wait
    with ThreadPoolExecutor(2) as pool:
        submitting = pool.submit(source.submit, 2)
        assert began.wait(WAIT_S)
        leaving = pool.submit(source.agent.disconnect, "D")
        source.submit(3)  # cannot have the turn, and does not wait for it
        go.set()
        submitting.result(WAIT_S)
        leaving.result(WAIT_S)
    found = source.reported(3)
    assert found[1] == found[2] == "the route was closed"
    assert found[3] in ("the route was closed", "there is no route to D")


Step = tuple[str, int]


@settings(max_examples=15, deadline=None)
@given(
    plan=st.lists(
        st.lists(
            st.sampled_from(
                [("submit", 1), ("submit", 3), ("submit", 300), ("disconnect", 0), ("join", 0), ("nap", 0)]
            ),
            min_size=5,
            max_size=40,
        ),
        min_size=2,
        max_size=4,
    ),
    seed=st.integers(0, 1 << 16),
    early_close=st.booleans(),
)
def test_jobs_of_several_threads_are_reported_once_each_while_peers_come_and_go(
    plan: list[list[Step]], seed: int, early_close: bool
) -> None:
    transport = Scripted()
    source = Source(transport)
    source.join()
    rng = random.Random(seed)
    stop = threading.Event()
    fail_at = {rng.randrange(60) for _ in range(6)}
    numbers = itertools.count(1)
    submitted = list[int]()

    def fail(ticket: int) -> None:
        transport.held = rng.random() < 0.5
        if ticket in fail_at:
            raise RuntimeError("by plan")

    transport.at_write = fail

    def run(steps: list[Step]) -> None:
        for verb, pages in steps:
            if verb == "submit":
                number = next(numbers)
                submitted.append(number)
                source.submit(number, pages)
            elif verb == "disconnect":
                source.agent.disconnect("D")
            elif verb == "join":
                with contextlib.suppress(PeerLost, RouteUnavailable):
                    source.join()
            else:
                time.sleep(0.0005)

    def end_some() -> None:
        while not stop.is_set():
            for ticket in list(transport.under_way)[::-1][:3]:
                with source.agent._mover._turn:
                    if ticket in transport.under_way:
                        transport.finish(ticket)
            time.sleep(0.0005)

    with ThreadPoolExecutor(len(plan) + 1) as pool:
        ending = pool.submit(end_some)
        running = [pool.submit(run, steps) for steps in plan]
        if early_close:
            source.agent.close()
        for one in running:
            one.result(WAIT_S)
        stop.set()
        ending.result(WAIT_S)
    source.agent.close()
    assert Counter(number for number, _, _ in source.outcomes) == Counter(submitted)


def test_tickets_under_way_when_the_mover_ends_have_failed() -> None:
    transport = Scripted()
    transport.held = True
    mover = Mover({"scripted": transport})  # type: ignore[dict-item]
    told: list[str | None] = []
    runs = Runs(*(np.array([1], np.int64) for _ in range(3)))
    mover.ask(lambda: mover.write("scripted", Remote(), runs, None, told.append))
    mover.stop()
    assert told == ["the transfer agent of this worker is closed"]
    with pytest.raises(PeerLost):
        mover.ask(lambda: None)
    assert not mover.instead(lambda: True)


def test_an_open_that_fails_in_any_way_is_answered(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    source = make()
    for error, level in ((RuntimeError("driver"), logging.ERROR), (OSError(errno.ECONNREFUSED, "refused"), None)):
        caplog.clear()

        def fail(error: Exception = error) -> None:
            raise error

        source.transport.at_open = fail
        future = source.agent.open_route("E", source.theirs[0], "scripted", ())
        with pytest.raises(RouteUnavailable, match=r"driver|refused"):
            future.result(WAIT_S)
        assert [record.levelno for record in caplog.records] == ([level] if level else [])
    with pytest.raises(RouteUnavailable, match="no transport 'other'"):
        source.agent.open_route("E", source.theirs[0], "other", ()).result(WAIT_S)


def test_a_timed_write_that_fails_in_any_way_is_answered(make: Make) -> None:
    source = make()

    def fail(ticket: int) -> None:
        raise RuntimeError("driver")

    source.transport.at_write = fail
    (route,) = source.agent._routes.used("D") or ()
    runs = Runs(*(np.array([value], np.int64) for value in (0, 0, 8)))
    with pytest.raises(PeerLost, match="driver"):
        source.agent.time_writes(route, runs, 3).result(WAIT_S)


def test_a_route_that_cannot_be_closed_in_order_holds_neither_its_peer_nor_the_agent(make: Make) -> None:
    source = make()
    source.join("E")

    def fail() -> None:
        raise RuntimeError("the driver is gone")

    source.transport.at_close = fail
    source.agent.disconnect("D")
    source.agent.close()
    source.submit(1)
    assert "closed" in (source.reported(1)[1] or "")


def test_a_bell_that_is_being_rung_is_closed_behind_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the number of its descriptor could be another's by then, who would get the eight bytes."""
    bell = Bell()
    ringing, go = threading.Event(), threading.Event()
    closed: list[int] = []
    real_write, real_close = os.eventfd_write, os.close

    def slow_write(fd: int, value: int) -> None:
        ringing.set()
        assert go.wait(WAIT_S)
        assert fd not in closed
        real_write(fd, value)

    def noted_close(fd: int) -> None:
        closed.append(fd)
        real_close(fd)

    monkeypatch.setattr(os, "eventfd_write", slow_write)
    monkeypatch.setattr(os, "close", noted_close)
    fd = bell.fileno()
    with ThreadPoolExecutor(2) as pool:
        ring = pool.submit(bell.ring)
        assert ringing.wait(WAIT_S)
        close = pool.submit(bell.close)
        time.sleep(0.05)
        go.set()
        ring.result(WAIT_S)
        close.result(WAIT_S)
    assert closed == [fd]
    bell.ring()  # silent
