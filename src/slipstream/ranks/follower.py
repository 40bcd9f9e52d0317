"""A rank of a worker other than rank 0, as a process: `python -m slipstream.ranks.follower FDS`.

It has a model part, a pool and a mover like rank 0, and decides nothing. Its main thread takes orders from the ring: it
launches steps in the order of rank 0, and starts copies when the step behind them is computed. Its IO thread carries
out calls of the control channel, which are those of links and preflights. It ends when it is told to, and at once when
rank 0 is gone: its lifeline and its channel both end then.

It notes in the ring which step it has begun and which it has ended, and, about once a second, that its threads still
answer. Rank 0, whose watch sees a step that does not end, tells by these notes which rank is to blame.

A step that raises is reported and the next one is taken: whether all ranks have failed alike, rank 0 finds out. The
checksum of each step's tokens is compared with that of rank 0, so that ranks which would go different ways are noticed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import numpy as np

from slipstream import garbage, logs
from slipstream.engine.plan import StepOutcome
from slipstream.errors import PeerLost, SlipstreamError
from slipstream.lifeline import die_with_parent
from slipstream.ranks import codec
from slipstream.ranks.control import (
    Begin,
    Call,
    Channel,
    Copied,
    Differs,
    Opened,
    Proceed,
    Ready,
    Refused,
    StepFailed,
    ToFollower,
    carry_out,
)
from slipstream.ranks.ring import RingReader
from slipstream.transfer.rank import RankHere

logger = logging.getLogger(__name__)

IDLE_S = 0.01  # without orders for so long, what has ended is collected
KEPT = 16  # steps whose checksums are kept for rank 0's
BEAT_S = 0.5  # between two signs of life


def checksum(outcome: StepOutcome) -> int:
    """Of the tokens that a step has sampled."""
    return zlib.crc32(np.ascontiguousarray(outcome.token_ids, dtype=np.int64).tobytes())


@dataclass(frozen=True, slots=True)
class Inherited:
    """The descriptors that rank 0 passes on, in the order of the command line."""

    control: int
    lifeline: int
    ring: tuple[int, int]
    meeting: list[int]

    @classmethod
    def parse(cls, text: str) -> Inherited:
        fds = [int(part) for part in text.split(",")]
        return cls(fds[0], fds[1], (fds[2], fds[3]), fds[4:])


def main(argument: str) -> int:
    fds = Inherited.parse(argument)
    die_with_parent(fds.lifeline)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for rank 0, which ends this one in order
    channel = Channel(socket.socket(fileno=fds.control), ToFollower)
    begin = channel.receive()
    if not isinstance(begin, Begin):
        return 1
    if begin.log_level:
        logs.set_up(begin.log_level, cast(Any, begin.log_format), f"{begin.name or 'worker'}.{begin.rank}")
    try:
        return _work(begin, channel, fds)
    except SlipstreamError as error:
        with contextlib.suppress(PeerLost):
            channel.send(Refused(error.code, error.message))
        return 1


def _work(begin: Begin, channel: Channel, fds: Inherited) -> int:
    garbage.starting()
    from slipstream.run.engine_model import open_model
    from slipstream.transfer.agent import TransferAgent
    from slipstream.transfer.job import CopyJob, ProbeMemory

    opened = open_model(begin.engine, rank=begin.rank)
    channel.send(Opened(opened.pool_pages, opened.device_name))
    proceed = channel.receive()
    if not isinstance(proceed, Proceed):
        return 0
    jobs: dict[CopyJob, int] = {}

    def copied(job: CopyJob, error: str | None) -> None:
        with contextlib.suppress(PeerLost):
            channel.send(Copied(jobs.pop(job), error))

    with contextlib.ExitStack() as closing:
        pool = opened.allocate_pool(begin.transfer.preflight_bytes, proceed.pages)
        closing.callback(pool.close)
        group = opened.join(fds.meeting, proceed.nccl_id)
        closing.callback(group.close)
        agent = TransferAgent(
            pool.region,
            opened.layout,
            begin.transfer,
            on_done=copied,
            rank=begin.rank,
            ranks=opened.head_ranges,
            host=begin.host,
            memory=cast(ProbeMemory, pool) if pool.region.kind == "cuda" else None,
        )
        closing.callback(agent.close)
        runner = opened.runner(pool.region, begin.engine.max_sequences)
        io = CallThread(channel, RankHere(agent))
        io.start()
        garbage.settled()
        channel.send(Ready(agent.exports()))
        ring = RingReader(fds.ring, begin.rank - 1, begin.size - 1)
        threading.Thread(target=show_life, args=(ring, io, agent.pulse), name="slipstream-beat", daemon=True).start()

        def copy(order: codec.CopyOrder, source: Any, destination: Any) -> None:
            job = CopyJob(order.peer, order.xfer, source, destination)
            jobs[job] = order.job
            agent.submit(job)

        Orders(ring, runner, channel, copy, lambda: group.exchanges).follow()
    return 0


class CallThread(threading.Thread):
    """Carries out rank 0's calls on an event loop; ends the process when rank 0 is gone."""

    def __init__(self, channel: Channel, rank: RankHere) -> None:
        super().__init__(name="slipstream-io", daemon=True)
        self._channel, self._rank = channel, rank
        self._loop = asyncio.new_event_loop()

    def run(self) -> None:
        threading.Thread(target=self._loop.run_forever, name="slipstream-calls", daemon=True).start()
        while (message := self._channel.receive()) is not None:
            if isinstance(message, Call):
                asyncio.run_coroutine_threadsafe(self._answer(message), self._loop)
        os.kill(os.getpid(), signal.SIGKILL)

    def pulse(self, answer: Callable[[], None]) -> None:
        """Has the event loop call `answer`."""
        self._loop.call_soon_threadsafe(answer)

    async def _answer(self, asked: Call) -> None:
        try:
            answer = await carry_out(self._rank, asked)
        except Exception:
            logger.exception("a call of rank 0 failed: %s", asked.verb)
            self._channel.sock.shutdown(socket.SHUT_RDWR)  # which ends this process, and with it the worker
            return
        with contextlib.suppress(PeerLost):
            self._channel.send(answer)


def show_life(ring: RingReader, io: CallThread, mover: Callable[[Callable[[], None]], None]) -> None:
    """Beats in the ring for as long as the event loop and the mover answer; returns when the mover has ended."""
    while True:
        answered = threading.Event()
        io.pulse(answered.set)
        answered.wait()
        answered.clear()
        try:
            mover(answered.set)
        except PeerLost:
            return
        answered.wait()
        ring.beat()
        time.sleep(BEAT_S)


class Orders:
    """The main thread's work: everything that comes through the ring, in order."""

    def __init__(
        self,
        ring: RingReader,
        runner: Any,
        channel: Channel,
        copy: Callable[[codec.CopyOrder, Any, Any], None],
        exchanges: Callable[[], int],
    ) -> None:
        self._ring, self._runner, self._channel = ring, runner, channel
        self._copy, self._exchanges = copy, exchanges
        self._under_way: deque[tuple[int, int]] = deque()  # step, exchanges when it was launched
        self._sums: dict[int, int] = {}
        self._expected: dict[int, int] = {}  # rank 0's, of steps that are not collected here yet

    def follow(self) -> None:
        """Returns when rank 0 says so. Raises RingBroken."""
        while True:
            order = self._ring.get(IDLE_S if self._under_way else None)
            if order is None:
                self._collect_ended()
                continue
            header, what = codec.decode(order)
            match header:
                case codec.PlanOrder():
                    while len(self._under_way) >= self._runner.depth:
                        self._collect()
                    self._ring.begin(header.step)
                    self._runner.launch(what)
                    self._under_way.append((header.step, self._exchanges()))
                    if header.checked is not None:
                        self._compare(*header.checked)
                case codec.CopyOrder():
                    while self._under_way and self._under_way[0][0] <= header.after:
                        self._collect()
                    self._copy(header, *what)
                case codec.StopOrder():
                    self._collect_all()
                    return

    def _collect_all(self) -> None:
        while self._under_way:
            self._collect()

    def _collect_ended(self) -> None:
        """Waits for nothing: the next step, which rank 0 plans late, has to be launched before this one ends."""
        while self._under_way and self._runner.ended():
            self._collect()

    def _collect(self) -> None:
        step, exchanges = self._under_way.popleft()
        try:
            outcome = self._runner.collect()
        except Exception as error:
            logger.exception("step %d failed at this rank", step)
            self._channel.send(StepFailed(step, exchanges, f"{type(error).__name__}: {error}"))
            return
        finally:
            self._ring.end(step)
        self._sums[step] = checksum(outcome)
        while len(self._sums) > KEPT:
            del self._sums[next(iter(self._sums))]
        if step in self._expected:
            self._compare(step, self._expected.pop(step))

    def _compare(self, step: int, theirs: int) -> None:
        if any(step == waiting for waiting, _ in self._under_way):
            self._expected[step] = theirs
        elif self._sums.get(step, theirs) != theirs:
            self._channel.send(Differs(step))


def run(argument: str) -> int:
    """The exit code of the process."""
    try:
        return main(argument)
    except msgspec.MsgspecError as error:
        logger.error("rank 0 said what is no message: %s", error)
    except Exception:
        logger.exception("this rank failed")
    return 1


if __name__ == "__main__":
    code = run(sys.argv[1])
    logging.shutdown()
    os._exit(code)  # threads of a device's library may wait for what nobody takes down any more
