"""A liar on purpose: real copies through another transport, with seeded trouble.

Each write may be left alone, delayed, cut into pieces that arrive in any order, or lost in part: some of its bytes
arrive, and then its ticket fails. A remote may also die: everything in flight on it fails, and all that follows. What
the fake never does is what no transport may do: report as done what is not in place, or as failed what can still
arrive. Writes into the probe area are left alone, so that a preflight passes and the trouble meets the handoff.

The clock is given, so that a simulator can drive it; with the real clock a thread wakes the mover when the next
delayed write is due.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
import random
import select
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from slipstream.errors import PeerLost, RouteUnavailable
from slipstream.transfer.copies import check_bounds, split
from slipstream.transfer.transports import load_all
from slipstream.transfer.transports.base import (
    Completion,
    Context,
    Description,
    Exports,
    Remote,
    Runs,
    Transport,
)
from slipstream.transfer.transports.bell import Bell

LONGEST_DELAY_S = 0.05
PIECES = 8
DIED = "the fake transport let this peer die"
LOST = "the fake transport lost a part of this copy"


class FakeRemote:
    """A remote of the transport underneath."""

    def __init__(self, inner: Transport, remote: Remote, probe_offset: int) -> None:
        self.inner, self.remote, self.probe_offset = inner, remote, probe_offset
        self.bytes = remote.bytes
        self.dead = False


@dataclass(slots=True, eq=False)
class _Ticket:
    number: int
    remote: FakeRemote
    waiting: int  # pieces that have not been given to the transport underneath
    running: int = 0  # pieces that it has
    error: str | None = None


@dataclass(slots=True, order=True)
class _Held:
    """A piece that is due later."""

    due: float
    order: int
    ticket: _Ticket = field(compare=False)
    runs: Runs = field(compare=False)
    after: Any = field(compare=False)


class FakeTransport:
    """Trouble around `inners`, which are tried in their order for each peer.

    `trouble` is the share of writes that meet some; `mortality` that of writes at which the remote dies.
    `virtual_clock`, when given, is the only time there is, and whoever drives it polls.
    """

    name: ClassVar[str] = "fake"
    open_blocks: ClassVar[bool] = True

    def __init__(
        self,
        inners: Mapping[str, Transport],
        size: int,
        *,
        seed: int,
        trouble: float,
        mortality: float = 0.0,
        virtual_clock: Callable[[], float] | None = None,
    ) -> None:
        if not inners:
            raise RouteUnavailable("there is no transport that the fake one could get between")
        self._inners, self._size = dict(inners), size
        self._random = random.Random(seed)
        self._trouble, self._mortality = trouble, mortality
        self._numbers, self._orders = itertools.count(1), itertools.count()
        self._held: list[_Held] = []
        self._running: dict[tuple[str, int], _Ticket] = {}
        self._ended: list[_Ticket] = []
        self._bell = Bell()
        self._clock = virtual_clock or time.monotonic
        self._alarm = None if virtual_clock else _Alarm(self._bell)
        self._epoll = select.epoll()
        self._epoll.register(self._bell, select.EPOLLIN)
        for inner in self._inners.values():
            self._epoll.register(inner.fileno(), select.EPOLLIN)

    def export(self) -> bytes:
        return msgspec.msgpack.encode([Description(name, inner.export()) for name, inner in self._inners.items()])

    def admit(self, agent: str) -> None:
        for inner in self._inners.values():
            inner.admit(agent)

    def cut_off(self, agent: str) -> Future[None]:
        return _all([inner.cut_off(agent) for inner in self._inners.values()])

    def fileno(self) -> int:
        return self._epoll.fileno()

    def open(self, exports: Exports, detail: bytes) -> FakeRemote:
        """`detail` is what the peer's fake transport exports; empty when it has none, but is open to the real ones."""
        offered = msgspec.msgpack.decode(detail, type=list[Description]) if detail else exports.descriptions
        theirs = {description.transport: description.detail for description in offered}
        reasons: list[str] = []
        for name, inner in self._inners.items():
            if name not in theirs:
                reasons.append(f"{name}: the peer does not offer it")
                continue
            try:
                return FakeRemote(inner, inner.open(exports, theirs[name]), exports.probe_offset)
            except (RouteUnavailable, PeerLost) as error:
                reasons.append(f"{name}: {error.message}")
        raise RouteUnavailable("none of the transports underneath opens: " + "; ".join(reasons))

    def write(self, remote: FakeRemote, runs: Runs, after: Any = None) -> int:
        check_bounds(runs, self._size, remote.bytes)
        if remote.dead:
            raise PeerLost(DIED)
        ticket = _Ticket(next(self._numbers), remote, 0)
        troubled = bool((runs.destination < remote.probe_offset).any())
        if troubled and self._random.random() < self._mortality:
            self._die(remote, ticket, runs)
        elif troubled and self._random.random() < self._trouble:
            self._random.choice((self._delay, self._reorder, self._lose))(ticket, runs, after)
        else:
            self._start(ticket, runs, after)
        self._settle(ticket)
        return ticket.number

    def poll(self) -> list[Completion]:
        self._bell.hush()
        now = self._clock()
        while self._held and self._held[0].due <= now:
            held = heapq.heappop(self._held)
            held.ticket.waiting -= 1
            if held.ticket.error is None:
                self._start(held.ticket, held.runs, held.after)
            self._settle(held.ticket)
        for name, inner in self._inners.items():
            for completion in inner.poll():
                ticket = self._running.pop((name, completion.ticket))
                ticket.running -= 1
                ticket.error = ticket.error or completion.error
                self._settle(ticket)
        if self._alarm is not None and self._held:
            self._alarm.set(self._held[0].due)
        ended, self._ended = self._ended, []
        return [Completion(ticket.number, ticket.error) for ticket in ended]

    def close(self, remote: FakeRemote) -> None:
        self._drop(remote, "the route was closed")
        remote.inner.close(remote.remote)

    def shutdown(self) -> None:
        if self._alarm is not None:
            self._alarm.close()
        for inner in self._inners.values():
            inner.shutdown()
        self._epoll.close()
        self._bell.close()

    # ------------------------------------------------------------------------------------------- trouble

    def _delay(self, ticket: _Ticket, runs: Runs, after: Any) -> None:
        self._hold(ticket, runs, after)

    def _reorder(self, ticket: _Ticket, runs: Runs, after: Any) -> None:
        for piece in self._pieces(runs):
            self._hold(ticket, piece, after)

    def _lose(self, ticket: _Ticket, runs: Runs, after: Any) -> None:
        pieces = self._pieces(runs)
        for piece in pieces[: self._random.randrange(len(pieces))]:
            self._start(ticket, piece, after)
        ticket.error = ticket.error or LOST

    def _die(self, remote: FakeRemote, ticket: _Ticket, runs: Runs) -> None:
        self._lose(ticket, runs, None)
        remote.dead = True
        ticket.error = DIED
        self._drop(remote, DIED)

    def _drop(self, remote: FakeRemote, reason: str) -> None:
        """Fails what has not been given to the transport underneath, and whatever belongs to the same tickets."""
        for held in self._held:
            if held.ticket.remote is remote:
                held.ticket.error = held.ticket.error or reason
                held.due = 0.0
        heapq.heapify(self._held)
        for ticket in self._running.values():
            if ticket.remote is remote:
                ticket.error = ticket.error or reason
        self._bell.ring()

    def _pieces(self, runs: Runs) -> list[Runs]:
        pieces = list(split(runs, max(1, runs.total // PIECES), max(1, len(runs.length) // PIECES)))
        self._random.shuffle(pieces)
        return pieces

    # ------------------------------------------------------------------------------------------- bookkeeping

    def _hold(self, ticket: _Ticket, runs: Runs, after: Any) -> None:
        ticket.waiting += 1
        due = self._clock() + self._random.uniform(0, LONGEST_DELAY_S)
        heapq.heappush(self._held, _Held(due, next(self._orders), ticket, runs, after))
        if self._alarm is not None:
            self._alarm.set(self._held[0].due)

    def _start(self, ticket: _Ticket, runs: Runs, after: Any) -> None:
        inner = ticket.remote.inner
        try:
            number = inner.write(ticket.remote.remote, runs, after)
        except PeerLost as error:
            ticket.error = ticket.error or error.message
            return
        ticket.running += 1
        self._running[inner.name, number] = ticket

    def _settle(self, ticket: _Ticket) -> None:
        if ticket.waiting == 0 and ticket.running == 0:
            self._ended.append(ticket)
            self._bell.ring()


class _Alarm:
    """Rings a bell at a time of the real clock."""

    def __init__(self, bell: Bell) -> None:
        self._bell = bell
        self._changed = threading.Condition()
        self._due = math.inf
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="slipstream-fake-alarm", daemon=True)
        self._thread.start()

    def set(self, due: float) -> None:
        with self._changed:
            self._due = min(self._due, due)
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        with self._changed:
            while not self._closed:
                left = self._due - time.monotonic()
                if left <= 0:
                    self._due = math.inf
                    self._bell.ring()
                else:
                    self._changed.wait(None if left == math.inf else left)


def _all(futures: list[Future[None]]) -> Future[None]:
    """Done when all are; cancelled when one is."""
    outcome: Future[None] = Future()
    left = itertools.count(len(futures) - 1, -1)

    def ended(future: Future[None]) -> None:
        if future.cancelled():
            outcome.cancel()
        elif next(left) == 0:
            with contextlib.suppress(InvalidStateError):
                outcome.set_result(None)

    for future in futures:
        future.add_done_callback(ended)
    return outcome


def create(context: Context) -> FakeTransport:
    inners, _ = load_all(["local", "shm", "tcp"], context)
    config = context.config
    return FakeTransport(inners, context.region.bytes, seed=config.fake_seed, trouble=config.fake_trouble)
