"""Gates and landings, over a package that copies by memmove: admission, order of ends, calls that hang."""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from slipstream.config import TransferConfig
from slipstream.errors import RouteUnavailable, TransferError
from slipstream.kv.layout import KVLayout
from slipstream.kv.pool import HostPool
from slipstream.transfer.agent import CopyJob, TransferAgent
from slipstream.transfer.transports import package
from slipstream.transfer.transports.base import Context, Exports, Runs, Transport
from slipstream.transfer.transports.gate import Landing
from slipstream.transfer.transports.package import Engine, PackageTransport

LAYOUT = KVLayout(page_tokens=4, layers=3, kv_heads=2, head_dim=32, dtype="float32", total_kv_heads=2)
WAIT_S = 60.0


class MoveLanding:
    """Reachable while it is open; then a copy through it fails."""

    open_ones: ClassVar[dict[int, MoveLanding]] = {}

    def __init__(self, address: int, log: list[str]) -> None:
        self.address, self._log = address, log
        self.description = address.to_bytes(8, "little")
        self.open_ones[address] = self

    def close(self) -> None:
        self._log.append("landing closed")
        self.open_ones.pop(self.address, None)


class MoveEngine:
    """Copies when asked whether it has; with `held` set, not yet; with `hang` set, `start` does not return."""

    def __init__(self, address: int) -> None:
        self._address = address
        self.held, self.hang, self.fail = threading.Event(), threading.Event(), ""
        self.started = threading.Event()
        self.given_up = 0

    def reach(self, description: bytes, exports: Exports) -> int:
        return int.from_bytes(description, "little")

    def start(self, there: int, runs: Runs) -> Runs:
        self.started.set()
        while self.hang.is_set():
            time.sleep(0.01)
        return runs

    def finished(self, there: int, job: Runs) -> bool:
        if self.fail:
            raise TransferError(self.fail)
        if self.held.is_set():
            return False
        if there not in MoveLanding.open_ones:
            raise TransferError("the landing is closed")
        for source, destination, length in zip(job.source, job.destination, job.length, strict=True):
            ctypes.memmove(there + int(destination), self._address + int(source), int(length))
        return True

    def give_up(self, there: int, job: Runs) -> None:
        self.given_up += 1

    def leave(self, there: int) -> None:
        pass


class MoveTransport(PackageTransport):
    name = "nixl"  # a name that the ranking knows

    def __init__(self, context: Context, log: list[str]) -> None:
        self._log = log
        self.engine = MoveEngine(context.region.address)
        self.refuse = ""
        super().__init__(context)

    def _make_engine(self) -> Engine:
        return self.engine

    def _make_landing(self) -> Landing:
        if self.refuse:
            raise RouteUnavailable(self.refuse)
        return MoveLanding(self.region.address, self._log)


class Side:
    def __init__(self) -> None:
        self.pool = HostPool.allocate(LAYOUT, 64, 64 << 10)
        self.log: list[str] = []
        self.done: queue.Queue[tuple[int, str | None]] = queue.Queue()
        self.transport: Any = None

        def load(names: Sequence[str], context: Context) -> tuple[dict[str, Transport], dict[str, str]]:
            self.transport = MoveTransport(context, self.log)
            return {"nixl": self.transport}, {}

        def on_done(job: CopyJob, error: str | None) -> None:
            self.log.append(f"job {job.xfer} {'failed' if error else 'done'}")
            self.done.put((job.xfer, error))

        config = TransferConfig(transport="nixl")
        self.agent = TransferAgent(self.pool.region, LAYOUT, config, on_done=on_done, load=load)

    @property
    def pages(self) -> np.ndarray:
        return self.pool.array[: 64 * LAYOUT.page_bytes].reshape(64, -1)


@pytest.fixture
def make() -> Iterator[Callable[[], Side]]:
    sides: list[Side] = []

    def side() -> Side:
        sides.append(Side())
        return sides[-1]

    yield side
    for one in sides:
        one.transport.engine.held.clear()
        one.transport.engine.hang.clear()
        one.agent.close()
        one.pool.close()


def join(source: Side, destination: Side) -> None:
    destination.agent.admit("S", [source.agent.exports()])
    source.agent.connect("D", [destination.agent.exports()])


def test_pages_arrive_and_jobs_end_once_each(make: Callable[[], Side]) -> None:
    source, destination = make(), make()
    join(source, destination)
    source.pages[:] = np.random.default_rng(1).integers(1, 256, source.pages.shape, dtype=np.uint8)
    order = np.random.default_rng(2).permutation(64)
    for xfer in range(16):
        part = order[4 * xfer : 4 * xfer + 4]
        source.agent.submit(CopyJob("D", xfer, part, part[::-1]))
    assert dict(source.done.get(timeout=WAIT_S) for _ in range(16)) == dict.fromkeys(range(16))
    for xfer in range(16):
        part = order[4 * xfer : 4 * xfer + 4]
        assert np.array_equal(destination.pages[part[::-1]], source.pages[part])


def test_a_failed_copy_is_reported_only_after_the_landing_is_gone(make: Callable[[], Side]) -> None:
    source, destination = make(), make()
    join(source, destination)
    shared: list[str] = []
    source.log, destination.log = shared, shared
    destination.transport._log = shared
    for landing in MoveLanding.open_ones.values():
        landing._log = shared
    source.transport.engine.fail = "a part of the batch was refused"
    source.agent.submit(CopyJob("D", 1, [1], [2]))
    assert source.done.get(timeout=WAIT_S) == (1, "a part of the batch was refused")
    assert shared == ["landing closed", "job 1 failed"]
    source.agent.submit(CopyJob("D", 2, [1], [2]))
    assert source.done.get(timeout=WAIT_S) == (2, "a part of the batch was refused")


def test_cut_off_is_done_when_the_source_has_left(make: Callable[[], Side]) -> None:
    source, destination = make(), make()
    join(source, destination)
    source.transport.engine.held.set()
    source.agent.submit(CopyJob("D", 1, [1], [2]))
    assert source.transport.engine.started.wait(WAIT_S)
    assert destination.agent.source_gone("S")  # after the second that the copy is given to end
    assert source.transport.engine.given_up == 1
    assert not MoveLanding.open_ones
    assert "has cut this worker off" in (source.done.get(timeout=WAIT_S)[1] or "")


def test_a_call_that_hangs_is_left_behind_and_the_memory_stays_taken(
    make: Callable[[], Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(package, "STUCK_S", 0.3)
    source, destination = make(), make()
    join(source, destination)
    source.transport.engine.hang.set()
    source.agent.submit(CopyJob("D", 1, [1], [2]))
    assert source.transport.engine.started.wait(WAIT_S)
    gone = threading.Thread(target=destination.agent.source_gone, args=("S",))
    gone.start()
    assert "has cut this worker off" in (source.done.get(timeout=WAIT_S)[1] or "")
    gone.join(0.2)
    assert gone.is_alive()  # the source's thread may still write: on one machine nothing proves that it does not
    source.transport.engine.hang.clear()
    gone.join(WAIT_S)
    assert not gone.is_alive()


def test_a_landing_that_cannot_be_made_is_a_reason_at_the_source(make: Callable[[], Side]) -> None:
    source, destination = make(), make()
    destination.transport.refuse = "the pool cannot be registered"
    with pytest.raises(RouteUnavailable, match="at the peer: the pool cannot be registered"):
        join(source, destination)


def test_a_stranger_gets_no_landing(make: Callable[[], Side]) -> None:
    source, destination = make(), make()
    with pytest.raises(RouteUnavailable, match="does not know this worker"):
        source.agent.connect("D", [destination.agent.exports()])
    assert not MoveLanding.open_ones


def test_a_destination_that_closes_fails_what_is_under_way(make: Callable[[], Side]) -> None:
    source, destination = make(), make()
    join(source, destination)
    source.transport.engine.held.set()
    source.agent.submit(CopyJob("D", 1, [1], [2]))
    assert source.transport.engine.started.wait(WAIT_S)
    destination.agent.close()
    assert "has ended" in (source.done.get(timeout=WAIT_S)[1] or "")
