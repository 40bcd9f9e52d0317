"""The other ranks of a worker, as rank 0 has them: their processes, their channels, their orders.

    start      processes with an inherited channel, ring, and sockets for exchanges; each loads its part of the model
    opened     what each could hold; rank 0 takes the least
    proceed    pool, group and runner are made everywhere at the same time
    follow     orders go by the ring; calls, answers and bad news by the channels
    close      the processes end, by themselves or by force

A thread starts the processes and then reads all channels. It lives as long as they do, because a child is tied to the
thread that started it. A rank that ends unasked ends the worker: `lost` then says which and how, all that waits for it
is answered, and `on_lost` is called once.

A rank that hangs says nothing at all. The watch of rank 0 (engine/watch.py) notices, by a step that does not end or by
`signs`; `blame` says which rank it is, `show_stacks` has the others say where they are, `kill` ends them.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from slipstream.config import EngineConfig, TransferConfig
from slipstream.engine.plan import StepPlan
from slipstream.errors import PeerLost, SlipstreamError
from slipstream.lifeline import Lifeline, ended_how
from slipstream.ranks import codec
from slipstream.ranks.control import (
    Answer,
    Begin,
    Channel,
    Copied,
    Differs,
    Opened,
    Proceed,
    Ready,
    Refused,
    StepFailed,
    ToLeader,
    call,
    error_of,
    result_of,
)
from slipstream.ranks.elsewhere import RankElsewhere
from slipstream.ranks.ring import RingWriter
from slipstream.run.parallel import Meeting

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

END_S = 5.0  # for a rank to end by itself when it is told to
LOOK_S = 1.0
SETTLE_S = 10.0  # for the other ranks to say that a step has failed there as well
STACKS_S = 0.5  # for a rank to print where its threads are
PROCESS_STATES = {
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "D": "in a call of the kernel",
    "Z": "ended",
}


class RankLost(SlipstreamError):
    """A rank of this worker has ended, or cannot go on; the worker cannot either."""

    code = "rank_lost"


@dataclass(slots=True, eq=False)
class _Follower:
    """One other rank. `told` are its messages of the start."""

    rank: int
    channel: Channel
    process: subprocess.Popen[bytes]
    told: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)
    calls: dict[int, tuple[str, Future[Any]]] = field(default_factory=dict)
    ended: bool = False


class Team:
    """Ranks 1 to `size - 1`, on `devices[1:]`. Started by the constructor.

    `on_copied(job, rank, error)` and `on_lost(error)` are called on the team's thread.
    """

    def __init__(
        self,
        engine: EngineConfig,
        transfer: TransferConfig,
        devices: Sequence[str],
        *,
        host: str,
        name: str,
        on_copied: Callable[[int, int, str | None], None],
        on_lost: Callable[[RankLost], None],
    ) -> None:
        self.size = len(devices)
        self.lost: RankLost | None = None
        self.meeting = Meeting(self.size)
        self.failures: dict[tuple[int, int], StepFailed] = {}  # (step, rank) -> what that rank said of it
        self._on_copied, self._on_lost = on_copied, on_lost
        self._ring = RingWriter(self.size - 1, alive=lambda: self.lost is None)
        self._lifeline = Lifeline()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._ring_lock = threading.Lock()
        self._news = threading.Condition(self._lock)
        self._closing = False  # ends of ranks are expected
        self._closed = False
        self._followers: list[_Follower] = []
        level, form = _logging()
        self._prints_stacks = bool(level)  # logs.set_up has them printed at SIGUSR1
        begins = [
            Begin(
                engine=msgspec.structs.replace(engine, device=device),
                transfer=transfer,
                rank=rank,
                size=self.size,
                host=host,
                name=name,
                log_level=level,
                log_format=form,
            )
            for rank, device in enumerate(devices)
        ]
        started: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(begins[1:], started), name="slipstream-ranks", daemon=True
        )
        self._thread.start()
        started.result()

    # ------------------------------------------------------------------------------------------- the start

    def opened(self) -> list[Opened]:
        """What the others have loaded, in the order of ranks. Raises their error, or RankLost."""
        return [self._told(follower, Opened) for follower in self._followers]

    def proceed(self, pages: int, nccl_id: bytes = b"") -> None:
        for follower in self._followers:
            follower.channel.send(Proceed(pages=pages, nccl_id=nccl_id))

    def ready(self) -> list[Ready]:
        """When all have their runners. Raises their error, or RankLost."""
        return [self._told(follower, Ready) for follower in self._followers]

    def beside(self, work: Callable[[], Result]) -> Result:
        """Does `work`, which may wait for the other ranks without end. Raises RankLost as soon as one is lost."""
        done: Future[Result] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)
            with self._news:
                self._news.notify_all()

        threading.Thread(target=run, name="slipstream-join", daemon=True).start()
        with self._news:
            self._news.wait_for(lambda: done.done() or self.lost is not None)
        if not done.done():
            assert self.lost is not None
            raise self.lost
        return done.result()

    def _told(self, follower: _Follower, kind: type[Result]) -> Result:
        message = follower.told.get()
        if isinstance(message, Refused):
            raise error_of(message.code, f"rank {follower.rank}: {message.message}")
        if isinstance(message, kind):
            return message
        raise self.lost or RankLost(f"rank {follower.rank} said {type(message).__name__} out of turn")

    # ------------------------------------------------------------------------------------------- orders

    def plan(self, plan: StepPlan, checked: tuple[int, int] | None) -> None:
        """Has all others execute a step. Called on one thread, like `copy`. Raises RankLost or RingBroken."""
        self._put(codec.encode_plan(plan, checked))

    def copy(
        self, job: int, peer: str, xfer: int, after: int, source: Sequence[int], destination: Sequence[int]
    ) -> None:
        """Has all others copy pages, once step `after` is computed; each answers with `on_copied`."""
        order = codec.CopyOrder(job, peer, xfer, after, len(source))
        self._put(codec.encode_copy(order, source, destination))

    def _put(self, parts: list[bytes]) -> None:
        if self.lost is not None:
            raise self.lost
        with self._ring_lock:  # plans come from the loop thread, copies from whoever has the turn at the core
            self._ring.put(parts)

    def failed_alike(self, step: int, exchanges: int) -> str:
        """Whether a step that has failed here has failed in the same place everywhere; if not, why, in words."""
        wanted = {(step, follower.rank) for follower in self._followers}
        with self._news:
            self._news.wait_for(lambda: self.lost is not None or wanted <= self.failures.keys(), SETTLE_S)
            said = {rank: self.failures[step, rank] for _, rank in wanted if (step, rank) in self.failures}
        for follower in self._followers:
            news = said.get(follower.rank)
            if news is None:
                return self.lost.message if self.lost else f"rank {follower.rank} has not failed at step {step}"
            if news.exchanges != exchanges:
                return f"rank {follower.rank} has failed elsewhere in step {step}: {news.message}"
        return ""

    @property
    def pids(self) -> list[int]:
        return [follower.process.pid for follower in self._followers]

    @property
    def ranks(self) -> list[RankElsewhere]:
        """Ranks 1 and up, for links and preflights, once they are ready."""
        ready = zip(self._followers, self._ready, strict=True)
        return [RankElsewhere(known.exports, partial(self._ask, follower)) for follower, known in ready]

    # ------------------------------------------------------------------------------------------- calls

    def _ask(self, follower: _Follower, verb: str, *arguments: Any) -> Future[Any]:
        """Calls a method of a rank. The future fails with what it raised, or with PeerLost."""
        future: Future[Any] = Future()
        number = next(self._numbers)
        with self._lock:
            if follower.ended:
                future.set_exception(PeerLost(f"rank {follower.rank} of this worker has ended"))
                return future
            follower.calls[number] = (verb, future)
        with contextlib.suppress(PeerLost):  # its end answers the call
            follower.channel.send(call(number, verb, arguments))
        return future

    # ------------------------------------------------------------------------------------------- the team's thread

    def _run(self, begins: list[Begin], started: Future[None]) -> None:
        try:
            self._followers = [self._start(begin) for begin in begins]
        except BaseException as error:
            started.set_exception(error)
            return
        self._ready: list[Ready] = []
        started.set_result(None)
        with selectors.DefaultSelector() as selector:
            for follower in self._followers:
                selector.register(follower.channel.sock, selectors.EVENT_READ, follower)
            while selector.get_map():
                for key, _ in selector.select(LOOK_S):
                    if not self._hear(key.data):
                        selector.unregister(key.fileobj)
                        self._ended(key.data)

    def _start(self, begin: Begin) -> _Follower:
        ours, theirs = socket.socketpair()
        ring = self._ring.fds(begin.rank - 1)
        fds = [theirs.fileno(), self._lifeline.fd, *ring, *self.meeting.fds(begin.rank)]
        argv = [sys.executable, "-P", "-m", "slipstream.ranks.follower", ",".join(map(str, fds))]
        process = subprocess.Popen(argv, pass_fds=fds, stdin=subprocess.DEVNULL)
        theirs.close()
        channel = Channel(ours, ToLeader)
        with contextlib.suppress(PeerLost):  # it has ended already, which its channel tells
            channel.send(begin)
        return _Follower(begin.rank, channel, process)

    def _hear(self, follower: _Follower) -> bool:
        """Takes one message; False at the end."""
        try:
            message = follower.channel.receive()
        except msgspec.MsgspecError as error:
            self._lose(RankLost(f"rank {follower.rank} said what is no message: {error}"))
            return False
        match message:
            case None:
                return False
            case Opened() | Refused():
                follower.told.put(message)
            case Ready():
                self._ready.append(message)
                self._ready.sort(key=lambda ready: ready.exports.rank)
                follower.told.put(message)
            case Answer(number=number):
                with self._lock:
                    verb, future = follower.calls.pop(number)
                try:
                    future.set_result(result_of(verb, message))
                except (SlipstreamError, msgspec.MsgspecError) as error:
                    future.set_exception(error)
            case Copied(job=job, error=error):
                self._on_copied(job, follower.rank, error)
            case StepFailed():
                with self._news:
                    self.failures[message.step, follower.rank] = message
                    self._news.notify_all()
            case Differs(step=step):
                self._lose(RankLost(f"rank {follower.rank} has sampled other tokens than rank 0 in step {step}"))
        return True

    def _ended(self, follower: _Follower) -> None:
        try:
            code = follower.process.wait(END_S)
        except subprocess.TimeoutExpired:  # its channel is closed, so it is of no use
            follower.process.kill()
            code = follower.process.wait()
        with self._lock:
            follower.ended = True
            calls, follower.calls = list(follower.calls.values()), {}
            expected = self._closing
        if not expected:
            device = f"rank {follower.rank} (pid {follower.process.pid})"
            self._lose(RankLost(f"{device} of this worker {ended_how(code)}; a worker cannot go on without it"))
        follower.told.put(None)
        for _, future in calls:
            future.set_exception(PeerLost(f"rank {follower.rank} of this worker has ended"))

    def _lose(self, reason: RankLost) -> None:
        with self._news:
            if self.lost is not None or self._closing:
                return
            self.lost = reason
            self._news.notify_all()
        self._on_lost(reason)

    # ------------------------------------------------------------------------------------------- hangs

    def signs(self) -> dict[int, Callable[[], int]]:
        """For each other rank what reads its signs of life, a number that grows while its threads answer."""
        return {f.rank: partial(self._beats, f.rank) for f in self._followers}

    def _beats(self, rank: int) -> int:
        return self._ring.notes(rank - 1).beats

    def blame(self, step: int) -> str:
        """Which ranks have not ended this step, in words."""
        found = []
        for follower in self._followers:
            notes = self._ring.notes(follower.rank - 1)
            if notes.ended >= step:
                continue
            what = "has begun it and not ended it" if notes.begun >= step else "has not taken it"
            found.append(f"{self.named(follower.rank)} {what}")
        return "; ".join(found) or "all other ranks have ended it"

    def named(self, rank: int) -> str:
        """A rank with its pid, and with the state of its process where that says something."""
        process = self._followers[rank - 1].process
        try:
            state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            state = "Z"
        known = PROCESS_STATES.get(state)
        return f"rank {rank} (pid {process.pid}{', ' + known if known else ''})"

    def show_stacks(self) -> None:
        """Has the other ranks print where their threads are, and gives them time for it; a stopped one cannot."""
        if not self._prints_stacks:
            return
        for follower in self._followers:
            logger.error("%s prints where its threads are, if it can:", self.named(follower.rank))
            with contextlib.suppress(OSError):
                follower.process.send_signal(signal.SIGUSR1)
            time.sleep(STACKS_S)

    def kill(self) -> None:
        """Ends all other ranks now, whatever they do; `close` has still to be called. Nobody is told of a loss."""
        with self._lock:
            self._closing = True
        for follower in self._followers:
            follower.process.kill()
        for follower in self._followers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                follower.process.wait(END_S)

    # ------------------------------------------------------------------------------------------- the end

    def close(self) -> None:
        """Ends all other ranks: told to where they listen, by force otherwise. May be called twice."""
        with self._lock:
            killed, again = self._closing, self._closed
            killed |= len(self._ready) < len(self._followers)  # they still load: nothing of theirs has to be finished
            self._closing = self._closed = True
        if again:
            return
        if self.lost is None and not killed:
            with contextlib.suppress(SlipstreamError):
                self._ring.put(codec.encode_stop(), wait_s=1.0)
        deadline = time.monotonic() + (END_S if self.lost is None and not killed else 0.0)
        for follower in self._followers:
            try:
                follower.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                if self.lost is None and not killed:
                    logger.warning("rank %d did not end in time; killing it", follower.rank)
                follower.process.kill()
                follower.process.wait()
        self._thread.join()
        for follower in self._followers:
            follower.channel.close()
        self._ring.close()
        self._lifeline.close()
        self.meeting.close()


def _logging() -> tuple[str, str]:
    """How this process logs, for the others to do the same; an empty level where it has not been set up."""
    from slipstream.logs import JsonFormatter

    if not logging.getLogger().handlers:
        return "", "text"
    as_json = any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)
    level = logging.getLogger("slipstream").getEffectiveLevel()
    return logging.getLevelName(level).lower(), "json" if as_json else "text"
