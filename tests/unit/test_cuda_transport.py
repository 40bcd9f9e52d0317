"""The cuda_ipc transport without a GPU: its logic runs over a device whose memory is the host's and whose streams are
queues that the test works off. What needs a real GPU is in tests/gpu."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from slipstream.config import TransferConfig
from slipstream.errors import ConfigError, PeerLost, PoolTooSmall, RouteUnavailable
from slipstream.transfer.cuda.alarm import Alarm
from slipstream.transfer.cuda.batches import FIRST_COPIES, MOST_COPIES, Words
from slipstream.transfer.cuda.copier import Copier
from slipstream.transfer.cuda.door import ProcessDoor
from slipstream.transfer.cuda.launcher import CopySettings, Launch, TritonLauncher
from slipstream.transfer.cuda.memory import DeviceMemory, Seal, read_seal, seal_offset
from slipstream.transfer.cuda.plan import CopyCosts
from slipstream.transfer.cuda.runtime import CudaError, find_device, uuid_text
from slipstream.transfer.staging import Staging
from slipstream.transfer.transports.base import Context, Exports, Region, Runs
from slipstream.transfer.transports.cuda_ipc import CudaIpcTransport, CudaRemote, event_handle
from slipstream.transfer.transports.door import knock

UUID = "GPU-00112233-4455-6677-8899-aabbccddeeff"
PAGE = 4096
PAGES = 64


class HostDevice:
    """A GPU of host memory. While `held`, work waits in the streams until `release`."""

    def __init__(self, uuid: str = UUID) -> None:
        self.index, self.uuid, self.is_mig = 0, uuid, False
        self.held = False
        self.memory: dict[int, Any] = {}
        self.streams: dict[int, list[Callable[[], object]]] = defaultdict(list)  # work that gives False has to wait
        self.done_events: set[int] = set()
        self.events: set[int] = set()
        self.pinned: set[int] = set()
        self.opened: set[int] = set()
        self.broken = ""
        self.room = 1 << 40
        self.launches: list[Launch] = []
        self.first_copies: list[int] = []  # of each batch for the copy engine
        self._names = iter(range(1000, 1 << 30))

    def use(self) -> None:
        pass

    def allocate(self, size: int) -> int:
        if size > self.room:
            raise CudaError("cudaMalloc", "cudaErrorMemoryAllocation", "out of memory")
        block = (ctypes.c_uint8 * (size + 256))()
        address = -(-ctypes.addressof(block) // 256) * 256
        self.memory[address] = (block, size)
        return address

    def available(self) -> tuple[int, int]:
        return self.room, self.room

    def free(self, address: int) -> None:
        del self.memory[address]

    allocate_pinned, free_pinned = allocate, free

    def pin(self, address: int, size: int) -> None:
        self.pinned.add(address)

    def unpin(self, address: int) -> None:
        self.pinned.remove(address)

    def fill(self, address: int, value: int, size: int) -> None:
        ctypes.memset(address, value, size)

    def read(self, address: int, host_address: int, size: int) -> None:
        ctypes.memmove(host_address, address, size)

    def write(self, address: int, host_address: int, size: int) -> None:
        ctypes.memmove(address, host_address, size)

    def export_handle(self, address: int) -> bytes:
        return address.to_bytes(8, "little") * 8

    def open_handle(self, handle: bytes) -> int:
        address = int.from_bytes(handle[:8], "little")
        self.opened.add(address)
        return address

    def close_handle(self, address: int) -> None:
        self.opened.remove(address)

    def extent(self, address: int) -> tuple[int, int]:
        for start, (_, size) in self.memory.items():
            if start <= address < start + size:
                return start, size
        raise CudaError("cuMemGetAddressRange", "CUDA_ERROR_NOT_FOUND", "no allocation")

    def reach_peer(self, uuid: str) -> str | None:
        return None

    def stream(self) -> int:
        return next(self._names)

    def destroy_stream(self, stream: int) -> None:
        assert not self.streams[stream]

    def event(self) -> int:
        event = next(self._names)
        self.events.add(event)
        return event

    timing_event = event

    def elapsed(self, start: int, end: int) -> float:
        assert {start, end} <= self.done_events
        return 1e-4

    def destroy_event(self, event: int) -> None:
        self.events.remove(event)

    def wait_for(self, stream: int, event: int) -> None:
        self._queue(stream, lambda: event in self.done_events)

    def record(self, event: int, stream: int) -> None:
        self.done_events.discard(event)
        self._queue(stream, lambda: self.done_events.add(event))

    def is_done(self, event: int) -> bool:
        if self.broken:
            raise CudaError("cudaEventQuery", self.broken, "an illegal memory access was encountered")
        return event in self.done_events

    def wait(self, event: int) -> None:
        self.release()
        assert event in self.done_events

    def copy(self, destination: int, source: int, size: int, stream: int) -> None:
        self._queue(stream, lambda: ctypes.memmove(destination, source, size))

    def copy_batch(self, destinations: Words, sources: Words, sizes: Words, stream: int, first: int) -> None:
        self.first_copies.append(first)
        for to, origin, size in zip(destinations.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            self.copy(to, origin, size, stream)

    def launch(self, launch: Launch, stream: int, settings: CopySettings) -> None:
        """Does what the kernels do, from the list in device memory."""
        self.launches.append(launch)
        self._queue(stream, lambda: self._move(launch))

    def _move(self, launch: Launch) -> None:
        columns, kind = (2 if launch.length else 3), np.int64
        size = columns * launch.runs
        raw = (ctypes.c_uint8 * (size * np.dtype(kind).itemsize)).from_address(launch.lists)
        lists = np.frombuffer(raw, kind).reshape(columns, launch.runs)
        for row in range(launch.runs):
            length = launch.length or int(lists[2, row])
            source, destination = (int(lists[side, row]) for side in (0, 1))
            ctypes.memmove(launch.destination_at + destination, launch.source_at + source, length)

    def _queue(self, stream: int, work: Callable[[], object]) -> None:
        self.streams[stream].append(work)
        if not self.held:
            self.release()

    def release(self) -> None:
        """Runs everything that waits."""
        self.held = False
        moved = True
        while moved:
            moved = False
            for queue in self.streams.values():
                while queue and queue[0]() is not False:
                    queue.pop(0)
                    moved = True


def contents(memory: DeviceMemory) -> np.ndarray:
    return np.frombuffer((ctypes.c_uint8 * memory.region.bytes).from_address(memory.address), np.uint8)


class Rank:
    """A pool and its transport."""

    def __init__(self, name: str, device: HostDevice) -> None:
        self.name, self.device = name, device
        self.memory = DeviceMemory(device, PAGES, PAGE, 8192)  # type: ignore[arg-type]
        context = Context(self.memory.region, TransferConfig(), name, "127.0.0.1")
        copiers = lambda device, settings: Copier(device, settings, launch=self.device.launch)  # noqa: E731
        self.transport = CudaIpcTransport(context, device, copiers)  # type: ignore[arg-type]

    def exports(self, **changes: Any) -> Exports:
        region = self.memory.region
        plain = Exports(
            rank=0,
            first_head=0,
            heads=1,
            kind="cuda",
            device=region.device,
            bytes=region.bytes,
            page_bytes=PAGE,
            pages=PAGES,
            probe_offset=region.probe_offset,
            probe_bytes=8192,
            machine="",
            process="",
            agent=self.name,
            descriptions=[],
        )
        return msgspec.structs.replace(plain, **changes)

    def open(self, peer: Rank) -> CudaRemote:
        peer.transport.admit(self.name)
        return self.transport.open(peer.exports(), peer.transport.export())

    def close(self) -> None:
        self.device.release()
        self.transport.shutdown()
        self.memory.close()


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Rank, Rank]]:
    """Two ranks that take each other for separate processes, so that handles are opened."""
    names = iter(str(n) for n in range(1 << 20))
    monkeypatch.setattr("slipstream.transfer.transports.cuda_ipc.process_name", lambda: next(names))
    device = HostDevice()
    pair = Rank("a", device), Rank("b", device)
    for rank in pair:
        contents(rank.memory)[:] = np.random.default_rng(ord(rank.name)).integers(0, 256, rank.memory.region.bytes)
    yield pair
    for rank in pair:
        rank.close()


def page_runs(source: list[int], destination: list[int]) -> Runs:
    pages = [np.array(pages, np.int64) * PAGE for pages in (source, destination)]
    return Runs(*pages, np.full(len(source), PAGE, np.int64))


def completions(rank: Rank, count: int, seconds: float = 60.0) -> list[Any]:
    """Sleeps on the transport's descriptor as the mover does, until `count` tickets have come back."""
    found: list[Any] = []
    end = time.monotonic() + seconds
    while len(found) < count and time.monotonic() < end:
        if select.select([rank.transport.fileno()], [], [], 0.2)[0]:
            found += rank.transport.poll()
    return found


def test_pages_arrive_at_their_places_and_nothing_else_changes(ranks: tuple[Rank, Rank]):
    a, b = ranks
    remote = a.open(b)
    want = contents(b.memory).copy()
    random = np.random.default_rng(1)
    source, destination = random.permutation(PAGES)[:40].tolist(), random.permutation(PAGES)[:40].tolist()
    for here, there in zip(source, destination, strict=True):
        want[there * PAGE : (there + 1) * PAGE] = contents(a.memory)[here * PAGE : (here + 1) * PAGE]
    ticket = a.transport.write(remote, page_runs(source, destination))
    assert completions(a, 1) == [_done(ticket)]
    assert (contents(b.memory) == want).all()


def _done(ticket: int, error: str | None = None) -> Any:
    from slipstream.transfer.transports.base import Completion

    return Completion(ticket, error)


def test_reading_goes_the_other_way(ranks: tuple[Rank, Rank]):
    a, b = ranks
    remote = a.open(b)
    ticket = a.transport.read(remote, page_runs([3, 9], [1, 2]))
    assert completions(a, 1) == [_done(ticket)]
    assert (contents(a.memory)[PAGE : 3 * PAGE].reshape(2, PAGE) == contents(b.memory).reshape(-1, PAGE)[[3, 9]]).all()


def test_runs_of_any_length_and_offset_arrive(ranks: tuple[Rank, Rank]):
    a, b = ranks
    remote = a.open(b)
    random = np.random.default_rng(2)
    for _ in range(20):
        lengths = random.integers(1, 3000, size=50)
        gaps = random.integers(0, 40, size=(2, 50))
        source = np.cumsum(gaps[0]) + np.concatenate(([0], np.cumsum(lengths)[:-1]))
        destination = np.cumsum(gaps[1]) + np.concatenate(([0], np.cumsum(lengths)[:-1]))
        want = contents(b.memory).copy()
        for s, d, n in zip(source, destination, lengths, strict=True):
            want[d : d + n] = contents(a.memory)[s : s + n]
        ticket = a.transport.write(remote, Runs(source.astype(np.int64), destination.astype(np.int64), lengths))
        assert completions(a, 1) == [_done(ticket)]
        assert (contents(b.memory) == want).all()


def test_many_runs_of_one_length_go_in_few_launches(ranks: tuple[Rank, Rank]):
    a, b = ranks
    remote = a.open(b)
    remote.costs = CopyCosts(0.0, 0.0, 1.0, 1.0, 1.0)
    a.device.launches.clear()
    offsets = np.random.default_rng(3).permutation(PAGES * PAGE // 16).astype(np.int64) * 16
    ticket = a.transport.write(remote, Runs(offsets, offsets, np.full(len(offsets), 16, np.int64)))
    assert completions(a, 1) == [_done(ticket)]
    assert [launch.runs for launch in a.device.launches] == [2048, 8192, 6144]
    assert (contents(b.memory)[: PAGES * PAGE] == contents(a.memory)[: PAGES * PAGE]).all()


LONG = 80_000  # runs: more than two threads share


@pytest.fixture
def copier() -> Iterator[tuple[Copier, HostDevice, int]]:
    device = HostDevice()
    copier = Copier(device, CopySettings(bulk=None), launch=device.launch)  # type: ignore[arg-type]
    at = device.allocate(4 * LONG * 16)
    contents = np.frombuffer((ctypes.c_uint8 * (4 * LONG * 16)).from_address(at), np.uint8)
    contents[:] = np.random.default_rng(4).integers(0, 256, len(contents), np.uint8)
    yield copier, device, at
    device.release()
    copier.close()


def long_runs(seed: int) -> Runs:
    random = np.random.default_rng(seed)
    places = [random.permutation(2 * LONG)[:LONG].astype(np.int64) * 16 for _ in range(2)]
    return Runs(*places, np.broadcast_to(np.int64(16), (LONG,)))


BY_KERNEL = CopyCosts(0.0, 0.0, 1.0, 1.0, 1.0)


def test_long_lists_arrive_launched_in_parts_when_alone_and_whole_behind_others(
    copier: tuple[Copier, HostDevice, int],
):
    moves, device, at = copier
    half = 2 * LONG * 16
    device.held = True
    lists = [long_runs(seed) for seed in range(3)]
    views = [np.frombuffer((ctypes.c_uint8 * half).from_address(at + side * half), np.uint8) for side in (0, 1)]
    origin, found = (view.reshape(-1, 16) for view in views)
    want = found.copy()
    copies = [moves.copy(at, half, at + half, half, runs, BY_KERNEL) for runs in lists]
    assert [launch.runs for launch in device.launches] == [2048, 8192, 32768, LONG - 43008, LONG, LONG]
    assert (found == want).all()
    for copy in copies:
        moves.wait(copy)
    untouched = np.setdiff1d(np.arange(2 * LONG), np.concatenate([runs.destination // 16 for runs in lists]))
    assert (found[untouched] == want[untouched]).all()
    last = [found[runs.destination // 16] == origin[runs.source // 16] for runs in lists]
    assert min(rows.all(axis=1).mean() for rows in last) > 0.2  # what no other list has written over
    moves.wait(moves.copy(at, half, at + half, half, lists[0], BY_KERNEL))
    assert (found[lists[0].destination // 16] == origin[lists[0].source // 16]).all()


@pytest.mark.parametrize("side", ["source", "destination"])
@pytest.mark.parametrize("offset", [-16, 2 * LONG * 16, 1 << 62])
def test_a_long_list_with_one_run_outside_starts_nothing(
    copier: tuple[Copier, HostDevice, int], side: str, offset: int
):
    moves, device, at = copier
    half = 2 * LONG * 16
    runs = long_runs(1)
    getattr(runs, side)[LONG - 1] = offset
    free = {size: len(slots) for size, slots in moves._room._slots.items()}
    with pytest.raises(ValueError, match=f"run {LONG - 1} of {LONG} leaves the {side} region"):
        moves.copy(at, half, at + half, half, runs, BY_KERNEL)
    assert device.launches == []
    assert not any(device.streams.values())
    assert all(len(moves._room._slots[size]) >= count for size, count in free.items())


@pytest.mark.parametrize("side", ["source", "destination"])
def test_a_long_list_with_one_run_aligned_otherwise_arrives(copier: tuple[Copier, HostDevice, int], side: str):
    moves, device, at = copier
    half = 2 * LONG * 16
    runs = long_runs(2)
    spare = np.setdiff1d(np.arange(2 * LONG - 1), getattr(runs, side) // 16)
    getattr(runs, side)[5] = int(spare[0]) * 16 + 3 if side == "source" else getattr(runs, side)[5] + 3
    views = [np.frombuffer((ctypes.c_uint8 * half).from_address(at + part * half), np.uint8) for part in (0, 1)]
    if side == "destination" and runs.destination[5] + 16 > half:
        runs.destination[5] -= 16
    moves.wait(moves.copy(at, half, at + half, half, runs, BY_KERNEL))
    assert {launch.length for launch in device.launches} == {0}
    for row in (0, 5, 4711, LONG - 1):
        source, to = int(runs.source[row]), int(runs.destination[row])
        assert (views[1][to : to + 16] == views[0][source : source + 16]).sum() >= (16 if side == "source" else 13)


def test_a_launch_that_fails_half_way_gives_its_lists_back_when_nothing_runs_any_more(
    copier: tuple[Copier, HostDevice, int],
):
    moves, _, at = copier
    half = 2 * LONG * 16
    launch, launched = moves._launch, []

    def failing(*arguments: Any) -> None:
        launched.append(arguments)
        if len(launched) == 3:
            raise CudaError("cuLaunchKernel", "CUDA_ERROR_UNKNOWN", "no")
        launch(*arguments)

    moves._launch = failing
    with pytest.raises(CudaError, match="cuLaunchKernel"):
        moves.copy(at, half, at + half, half, long_runs(3), BY_KERNEL)
    moves._launch = launch
    known = sum(len(slots) for slots in moves._room._slots.values())
    moves.wait(moves.copy(at, half, at + half, half, long_runs(3), BY_KERNEL))
    assert sum(len(slots) for slots in moves._room._slots.values()) == known
    assert all(lane.in_flight == 0 for lane in moves._lanes)


def test_a_batch_of_pages_is_one_launch(ranks: tuple[Rank, Rank]):
    a, b = ranks
    remote = a.open(b)
    a.device.launches.clear()
    remote.costs = CopyCosts(0.0, 0.0, 1.0, 1.0, 1.0)
    ticket = a.transport.write(remote, page_runs(list(range(PAGES)), list(range(PAGES))))
    assert completions(a, 1) == [_done(ticket)]
    assert [launch.runs for launch in a.device.launches] == [PAGES]


def test_a_run_outside_the_region_writes_nothing(ranks: tuple[Rank, Rank]):
    a, b = ranks
    remote = a.open(b)
    before = contents(b.memory).copy()
    runs = page_runs([0, 1], [0, 1])
    runs.destination[1] = b.memory.region.bytes - 100
    with pytest.raises(ValueError, match="run 1 of 2 leaves the destination region"):
        a.transport.write(remote, runs)
    assert (contents(b.memory) == before).all()
    assert a.transport.poll() == []


def test_tickets_under_way_are_reported_when_their_copies_are_done(ranks: tuple[Rank, Rank]):
    a, b = ranks
    remote = a.open(b)
    a.device.held = True
    tickets = [a.transport.write(remote, page_runs([page], [page])) for page in range(8)]
    assert a.transport.poll() == []
    assert not (contents(b.memory)[:PAGE] == contents(a.memory)[:PAGE]).all()
    a.device.release()
    assert sorted(done.ticket for done in completions(a, 8)) == tickets
    assert (contents(b.memory)[: 8 * PAGE] == contents(a.memory)[: 8 * PAGE]).all()


def test_a_copy_waits_for_the_event_before_it(ranks: tuple[Rank, Rank]):
    a, b = ranks
    remote = a.open(b)
    event = a.device.event()
    a.device.held = True
    ticket = a.transport.write(remote, page_runs([0], [0]), after=event)
    a.device.release()
    assert a.transport.poll() == []
    assert not (contents(b.memory)[:PAGE] == contents(a.memory)[:PAGE]).all()
    a.device.done_events.add(event)
    a.device.release()
    assert completions(a, 1) == [_done(ticket)]
    assert (contents(b.memory)[:PAGE] == contents(a.memory)[:PAGE]).all()


def test_a_copy_that_is_ready_does_not_stand_behind_one_that_waits(ranks: tuple[Rank, Rank]):
    a, b = ranks
    remote = a.open(b)
    event = a.device.event()
    waiting = a.transport.write(remote, page_runs([0], [0]), after=event)
    ready = a.transport.write(remote, page_runs([1], [1]))
    assert completions(a, 1) == [_done(ready)]
    a.device.done_events.add(event)
    a.device.release()
    a.transport.ripe(event)
    assert completions(a, 1) == [_done(waiting)]


def test_who_is_told_of_an_event_looks_when_the_copies_behind_it_should_be_done(ranks: tuple[Rank, Rank]):
    a, b = ranks
    remote = a.open(b)
    events = [a.device.event() for _ in range(2)]
    for page, event in enumerate(events):
        a.transport.write(remote, page_runs([page], [page]), after=event)
    flights = list(a.transport._flights.values())
    assert [flight.due.at for flight in flights] == [math.inf, math.inf]
    a.transport.ripe(events[1])
    assert flights[0].due.at == math.inf
    assert flights[1].due.at < math.inf
    a.device.done_events.update(events)
    a.device.release()
    assert len(completions(a, 2)) == 2


def test_a_copy_behind_an_event_that_has_happened_waits_for_nothing(ranks: tuple[Rank, Rank]):
    a, b = ranks
    event = a.device.event()
    a.device.done_events.add(event)
    a.transport.write(a.open(b), page_runs([0], [0]), after=event)
    (flight,) = a.transport._flights.values()
    assert flight.due.at < math.inf
    assert len(completions(a, 1)) == 1


def test_the_copy_engine_begins_early_with_a_batch_alone_and_gets_one_behind_others_in_one_call(
    ranks: tuple[Rank, Rank],
):
    a, b = ranks
    remote = a.open(b)
    remote.costs = CopyCosts(1.0, 1.0, 0.0, 0.0, 0.0)
    a.device.first_copies.clear()
    a.device.held = True
    tickets = [a.transport.write(remote, page_runs([1, 2], [3, 4])) for _ in range(2)]
    a.device.release()
    assert completions(a, 2) == [_done(ticket) for ticket in tickets]
    event = a.device.event()
    tickets = [a.transport.write(remote, page_runs([1, 2], [3, 4]), after) for after in (event, None)]
    a.device.done_events.add(event)
    a.device.release()
    assert {done.ticket for done in completions(a, 2)} == set(tickets)
    assert a.device.first_copies == [FIRST_COPIES, MOST_COPIES, MOST_COPIES, FIRST_COPIES]


def test_batches_of_the_copy_engine_queue_one_behind_the_other(ranks: tuple[Rank, Rank]):
    a, b = ranks
    remote = a.open(b)
    remote.costs = CopyCosts(1.0, 1.0, 0.0, 0.0, 0.0)
    a.device.held = True
    tickets = [a.transport.write(remote, page_runs([page], [PAGES - 1 - page])) for page in range(4)]
    assert sum(bool(queue) for queue in a.device.streams.values()) == 1
    a.device.release()
    assert sorted(done.ticket for done in completions(a, 4)) == tickets
    rows = [contents(memory)[: PAGES * PAGE].reshape(PAGES, PAGE) for memory in (a.memory, b.memory)]
    assert (rows[1][PAGES - 4 :] == rows[0][:4][::-1]).all()


def test_an_empty_batch_is_done_at_once(ranks: tuple[Rank, Rank]):
    a, b = ranks
    ticket = a.transport.write(a.open(b), page_runs([], []))
    assert completions(a, 1) == [_done(ticket)]


def test_a_closed_remote_reports_its_tickets_after_their_copies_and_unmaps_then(ranks: tuple[Rank, Rank]):
    a, b = ranks
    remote = a.open(b)
    gone = b.transport.cut_off("nobody")
    assert gone.done()
    a.device.held = True
    ticket = a.transport.write(remote, page_runs([5], [6]))
    a.transport.close(remote)
    leaving = b.transport.cut_off("a")
    assert a.transport.poll() == []
    assert a.device.opened == {b.memory.address}
    assert not leaving.done()
    a.device.release()
    assert completions(a, 1) == [_done(ticket, "the route was closed")]
    assert a.device.opened == set()
    leaving.result(60)
    with pytest.raises(PeerLost, match="closed"):
        a.transport.write(remote, page_runs([0], [0]))


def test_a_peer_that_withdraws_is_lost_after_the_copies_under_way(ranks: tuple[Rank, Rank]):
    a, b = ranks
    remote = a.open(b)
    a.device.held = True
    ticket = a.transport.write(remote, page_runs([5], [6]))
    leaving = b.transport.cut_off("a")
    time.sleep(0.05)
    assert a.transport.poll() == []
    assert not leaving.done()
    a.device.release()
    (done,) = completions(a, 1)
    assert done.ticket == ticket
    assert "withdrawn" in done.error
    leaving.result(60)
    with pytest.raises(RouteUnavailable, match="not admitted"):
        a.transport.open(b.exports(), b.transport.export())


def test_a_lost_context_fails_the_tickets(ranks: tuple[Rank, Rank]):
    a, b = ranks
    remote = a.open(b)
    a.device.held = True
    ticket = a.transport.write(remote, page_runs([5], [6]))
    a.device.broken = "cudaErrorIllegalAddress"
    (done,) = completions(a, 1)
    assert (done.ticket, "cudaErrorIllegalAddress" in done.error) == (ticket, True)
    a.device.broken = ""


def test_a_stale_mapping_is_refused(ranks: tuple[Rank, Rank]):
    a, b = ranks
    other = Seal(b"another pool" + bytes(4), b.memory.region.bytes, PAGE, 0, 0)
    raw = np.frombuffer(other.to_bytes(), np.uint8)
    b.device.write(b.memory.address + seal_offset(b.memory.region.bytes), raw.ctypes.data, len(raw))
    with pytest.raises(RouteUnavailable, match="another pool"):
        a.open(b)
    assert a.device.opened == set()


def test_a_pool_of_another_size_than_announced_is_refused(ranks: tuple[Rank, Rank]):
    a, b = ranks
    b.transport.admit("a")
    with pytest.raises(RouteUnavailable, match="announced 4096 bytes"):
        a.transport.open(b.exports(bytes=4096), b.transport.export())


def test_memory_of_the_cpu_is_refused_on_either_side(ranks: tuple[Rank, Rank]):
    a, b = ranks
    with pytest.raises(RouteUnavailable, match="kind 'cpu'"):
        a.transport.open(b.exports(kind="cpu"), b.transport.export())
    region = Region(kind="cpu", address=0, bytes=10, page_bytes=1, pages=1, probe_offset=1)
    with pytest.raises(RouteUnavailable, match="on the CPU"):
        CudaIpcTransport(Context(region, TransferConfig(), "a", ""))


def test_a_part_of_an_allocation_is_refused():
    device = HostDevice()
    start = device.allocate(1 << 20)
    region = Region("cuda", start + 4096, 4096, 4096, 1, 4096, UUID, 0)
    with pytest.raises(RouteUnavailable, match="part of an allocation"):
        CudaIpcTransport(Context(region, TransferConfig(), "a", ""), device)  # type: ignore[arg-type]


def test_a_mig_slice_is_refused():
    device = HostDevice()
    device.is_mig = True
    memory = DeviceMemory(device, 1, PAGE, 0)  # type: ignore[arg-type]
    with pytest.raises(RouteUnavailable, match="MIG"):
        CudaIpcTransport(Context(memory.region, TransferConfig(), "a", ""), device)  # type: ignore[arg-type]


def test_a_neighbour_in_the_same_process_is_used_in_place():
    device = HostDevice()
    a, b = Rank("a", device), Rank("b", device)
    remote = a.open(b)
    assert remote.address == b.memory.address
    assert device.opened == set()
    ticket = a.transport.write(remote, page_runs([1], [2]))
    assert completions(a, 1) == [_done(ticket)]
    a.close()
    b.close()


def test_a_pool_has_its_probe_area_behind_the_pages_and_its_seal_behind_both():
    memory = DeviceMemory(HostDevice(), 3, 1000, 5000)  # type: ignore[arg-type]
    region = memory.region
    assert (region.probe_offset, region.bytes) == (4096, 9096)
    seal = read_seal(memory.device, memory.address, region.bytes)
    assert (seal.region_bytes, seal.page_bytes) == (9096, 1000)
    assert seal.scratch_offset >= region.bytes
    assert memory.__cuda_array_interface__["shape"] == (9096,)
    memory.close()
    memory.close()


def test_two_pools_have_different_generations():
    device = HostDevice()
    pools = [DeviceMemory(device, 1, PAGE, 0) for _ in range(2)]  # type: ignore[arg-type]
    seals = [read_seal(pool.device, pool.address, pool.region.bytes) for pool in pools]
    assert seals[0].generation != seals[1].generation


def test_a_pool_that_does_not_fit_says_what_is_free():
    device = HostDevice()
    device.room = 10 << 20
    with pytest.raises(PoolTooSmall, match=r"needs [\d.]+ MiB .* [\d.]+ MiB are free"):
        DeviceMemory(device, 1, PAGE, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("raw", [b"", b"slipstream pool\n", b"slipstream pool\n\x05hello", bytes(256)])
def test_what_is_no_seal_is_told(raw: bytes):
    with pytest.raises(ValueError, match="seal"):
        Seal.from_bytes(raw + bytes(256 - len(raw)))


def test_devices_are_found_by_index_name_and_uuid():
    uuids = [UUID, "GPU-ffffffff-4455-6677-8899-aabbccddeeff"]
    assert [find_device(d, uuids) for d in (0, "1", "cuda", "cuda:1", UUID, "GPU-ff")] == [0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize("device", [2, "cuda:7", "GPU-", "GPU-12", "cpu", "MIG-00", "", "GPU-00112233-4455-6677-88990"])
def test_an_unknown_device_is_refused_with_what_there_is(device: str | int):
    with pytest.raises(ConfigError, match="cuda:0 = GPU-00112233"):
        find_device(device, [UUID])


def test_a_uuid_reads_as_the_driver_writes_it():
    assert uuid_text(bytes.fromhex("00112233445566778899aabbccddeeff")) == UUID


def test_events_are_taken_from_torch_and_as_integers():
    class Event:
        cuda_event = 77

    assert (event_handle(None), event_handle(Event()), event_handle(5)) == (None, 77, 5)
    Event.cuda_event = 0
    for wrong in (Event(), 0, "event"):
        with pytest.raises(ValueError, match="recorded"):
            event_handle(wrong)


@pytest.mark.parametrize(
    "wrong", [{"programs": 0}, {"tile_bytes": 100}, {"tile_bytes": 3 << 10}, {"warps": 3}, {"streams": 0}]
)
def test_impossible_settings_are_refused(wrong: dict[str, int]):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        CopySettings(**wrong)


@pytest.mark.parametrize("step", [1, 16])
def test_staged_runs_come_out_and_go_in_as_they_were(step: int):
    device = HostDevice()
    memory = DeviceMemory(device, PAGES, PAGE, 0)  # type: ignore[arg-type]
    copiers = lambda device, settings: Copier(device, settings, launch=device.launch)  # noqa: E731
    staging = Staging(memory.region, 2, 16384, device, copiers)  # type: ignore[arg-type]
    random = np.random.default_rng(4)
    contents(memory)[:] = random.integers(0, 256, memory.region.bytes)
    before = contents(memory).copy()
    length = random.integers(1, 5000 // step, 60) * step
    start = np.cumsum(length + step) - length
    order = random.permutation(60)
    runs = Runs(start[order], start[order], length[order])
    pieces = [(piece, packed.copy()) for piece, packed in staging.out(runs)]
    assert sum(piece.total for piece, _ in pieces) == runs.total
    contents(memory)[:] = 0
    for piece, packed in pieces:
        with staging.into(piece) as room:
            room[:] = packed
    staging.flush()
    want = np.zeros_like(before)
    for at, size in zip(start, length, strict=True):
        want[at : at + size] = before[at : at + size]
    assert (contents(memory) == want).all()
    with pytest.raises(ValueError, match="does not fit"), staging.into(Runs(*[np.array([20000])] * 3)):
        pass
    staging.close()


def test_a_consumer_that_stops_early_leaves_the_staging_usable():
    device = HostDevice()
    memory = DeviceMemory(device, PAGES, PAGE, 0)  # type: ignore[arg-type]
    copiers = lambda device, settings: Copier(device, settings, launch=device.launch)  # noqa: E731
    staging = Staging(memory.region, 2, 8192, device, copiers)  # type: ignore[arg-type]
    runs = page_runs(list(range(20)), list(range(20)))
    for _ in range(3):
        for _piece in staging.out(runs):
            break
    assert len(list(staging.out(runs))) == 10
    staging.close()


class StandIn:
    """As much of torch and of the kernels' module as a launch needs; `direct` kernels can be launched when compiled."""

    def __init__(self, direct: bool) -> None:
        self.launched: list[tuple[str, tuple[int, ...], tuple[int, ...], int | None]] = []
        self.direct = direct
        self.current: int | None = None
        self.cuda = self
        self.move_equal, self.move_any = _Kernel(self, "equal"), _Kernel(self, "any")

    @staticmethod
    def equal_tile(length: int, tile: int) -> tuple[int, int, int]:
        return max(1, tile // length), min(length, tile) // 8, max(1, length // tile)

    @staticmethod
    def ExternalStream(stream: int, device: int) -> int:
        return stream

    @contextlib.contextmanager
    def stream(self, stream: int) -> Iterator[None]:
        self.current = stream
        yield
        self.current = None


class _Kernel:
    def __init__(self, owner: StandIn, name: str, compiled: bool = False) -> None:
        self.owner, self.name, self.compiled = owner, name, compiled

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., _Kernel]:
        def run(*arguments: int, num_warps: int = 0, stream: int | None = None) -> _Kernel:
            if self.compiled and not self.owner.direct:
                raise TypeError("launched directly")
            at = stream if self.compiled else self.owner.current
            self.owner.launched.append((self.name, grid, arguments, at))
            return _Kernel(self.owner, self.name, compiled=True)

        return run


@pytest.mark.parametrize("direct", [True, False])
def test_every_launch_reaches_its_stream_with_its_arguments_once(direct: bool):
    module = StandIn(direct)
    launcher = TritonLauncher(0)
    launcher._modules = module, module
    settings = CopySettings(programs=4, tile_bytes=1 << 16)
    base = 1 << 40
    launches = [
        Launch(base, base << 1, base << 2, runs, length, length) for runs in (1, 100) for length in (4096, 8192, 0)
    ]
    for stream, launch in enumerate([*launches, *launches]):
        launcher(launch, stream, settings)
    moved = [entry for entry in module.launched if entry[2][3] > 0]  # those of nothing only try
    assert [entry[3] for entry in moved] == list(range(12))
    assert [entry[2][3] for entry in moved] == [launch.runs for launch in [*launches, *launches]]
    assert [entry[0] for entry in moved] == [("equal" if launch.length else "any") for launch in [*launches, *launches]]
    assert all(entry[2][:3] == (base, base << 1, base << 2) for entry in moved)
    assert max(entry[1][0] for entry in moved) == 4


def test_an_alarm_is_readable_when_due_and_not_before():
    alarm = Alarm()
    alarm.set(30.0)
    assert select.select([alarm], [], [], 0)[0] == []
    alarm.set(0.0)
    assert select.select([alarm], [], [], 60)[0] == [alarm]
    alarm.hush()
    assert select.select([alarm], [], [], 0)[0] == []
    alarm.close()


KNOCK = """
import sys, time
from slipstream.transfer.transports.door import Address, knock
connection, payload, fds = knock(Address(sys.argv[1], bytes.fromhex(sys.argv[2])), "peer")
print(payload.decode(), flush=True)
if sys.argv[3] == "stay":
    time.sleep(60)
connection.close()
time.sleep(60)
"""


def _peer(door: ProcessDoor, what: str) -> subprocess.Popen[str]:
    door.admit("peer")
    arguments = [sys.executable, "-c", KNOCK, door.address.name, door.address.token.hex(), what]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "the handle\n"
    return process


def test_a_killed_peer_is_gone_when_its_process_has_ended():
    door = ProcessDoor(b"the handle", [])
    process = _peer(door, "stay")
    try:
        leaving = door.cut_off("peer")
        assert not leaving.done()
        os.kill(process.pid, signal.SIGKILL)
        leaving.result(60)
        with open(f"/proc/{process.pid}/stat") as file:  # not yet reaped by us, but ended
            assert file.read().rpartition(")")[2].split()[0] == "Z"
    finally:
        process.kill()
        process.wait()
        door.close()


def test_a_living_peer_that_closed_its_connection_is_gone():
    door = ProcessDoor(b"the handle", [])
    process = _peer(door, "leave")
    try:
        door.cut_off("peer").result(60)
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
        door.close()


def test_the_door_stays_shut_for_strangers():
    door = ProcessDoor(b"the handle", [])
    with pytest.raises(RouteUnavailable, match="not admitted"):
        knock(door.address, "stranger")
    door.close()
    with pytest.raises(RouteUnavailable, match="has ended"):
        knock(door.address, "stranger")
