"""Device memory over shm and tcp, through pinned slots: contents, order, bounds, and every way to end.

The GPU is `device_queue.QueueDevice`, whose memory the CPU cannot touch and whose copies end some time after they were
queued. What real GPUs add is in tests/gpu/test_staging.py.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.unit.device_queue import QueueDevice, is_out_of_reach
from tests.unit.transfer_sides import WAIT_S, Outcomes, Side, join, many_jobs_end_once_each

from slipstream.config import TransferConfig
from slipstream.errors import RouteUnavailable
from slipstream.kv.layout import KVLayout
from slipstream.kv.pool import HostPool
from slipstream.transfer.agent import CopyJob, TransferAgent
from slipstream.transfer.cuda.memory import DeviceMemory
from slipstream.transfer.cuda.runtime import CudaError
from slipstream.transfer.job import Behind
from slipstream.transfer.staging import Staging, cpu_list, running_on
from slipstream.transfer.transports.base import Context, Runs, Transport
from slipstream.transfer.transports.door import Address, knock
from slipstream.transfer.transports.shm import ShmAddress, ShmTransport
from slipstream.transfer.transports.shm_ring import EMPTIED, FILLED, RingShape
from slipstream.transfer.transports.tcp import TcpTransport

LAYOUT = KVLayout(page_tokens=4, layers=3, kv_heads=2, head_dim=32, dtype="float32", total_kv_heads=2)
PAGE = LAYOUT.page_bytes
SMALL = RingShape(slots=3, slot_bytes=4 * 4096, runs=64)
KINDS = [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")]
INTO_A_GPU = [kinds for kinds in KINDS if kinds[1] == "cuda"]
TRANSPORTS = ("shm", "tcp")


Make = Callable[..., Side]


@pytest.fixture
def make() -> Iterator[Make]:
    sides: list[Side] = []

    def side(kind: str, transport: str, *, pages: int = 64, shape: RingShape = SMALL, **device: Any) -> Side:
        queue_device = QueueDevice(len(sides) + 1, **device) if kind == "cuda" else None
        if queue_device is not None:
            memory: Any = DeviceMemory(queue_device, pages, PAGE, 16 << 10)  # type: ignore[arg-type]
            view = queue_device.view(memory.region.address, memory.region.bytes)
        else:
            memory = HostPool.allocate(LAYOUT, pages, 16 << 10)
            view = memory.array
        copiers: Any = queue_device.copier if queue_device else None

        def load(names: Sequence[str], context: Context) -> tuple[dict[str, Transport], dict[str, str]]:
            made: Any = (
                ShmTransport(context, shape, queue_device, copiers)  # type: ignore[arg-type]
                if transport == "shm"
                else TcpTransport(context, queue_device, copiers)  # type: ignore[arg-type]
            )
            return {transport: made}, {}

        done: Outcomes = queue.Queue()
        agent = TransferAgent(
            memory.region,
            LAYOUT,
            TransferConfig(transport=transport, tcp_streams=2),  # type: ignore[arg-type]
            on_done=lambda job, error: done.put((job, error)),
            memory=memory if queue_device else None,
            load=load,
        )
        sides.append(Side(agent, memory, view, pages, queue_device, done))
        return sides[-1]

    yield side
    for one in sides:
        one.release()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_the_double_keeps_its_memory_from_the_cpu() -> None:
    device = QueueDevice()
    address = device.allocate(1 << 16)
    assert is_out_of_reach(address)
    assert not is_out_of_reach(device.allocate_pinned(64))
    device.view(address, 4)[:] = 7


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
def test_random_page_lists_arrive_and_nothing_else_changes(make: Make, transport: str, kinds: tuple[str, str]) -> None:
    source, destination = make(kinds[0], transport), make(kinds[1], transport)
    assert join(source, destination).transport == transport
    rng = np.random.default_rng(5)
    destination.fill(1)
    expected = destination.view.copy()
    for xfer in range(12):
        source.fill(100 + xfer)
        count = int(rng.integers(1, 65))
        origin, to = rng.permutation(64)[:count], rng.permutation(64)[:count]
        source.agent.submit(CopyJob("D", xfer, origin, to))
        assert source.outcomes(1) == {xfer: None}
        expected[: 64 * PAGE].reshape(64, PAGE)[to] = source.pages[origin]
        assert np.array_equal(destination.view, expected)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
def test_many_jobs_in_flight_end_once_each(make: Make, transport: str, kinds: tuple[str, str]) -> None:
    source, destination = (make(kind, transport, pages=256) for kind in kinds)
    many_jobs_end_once_each(source, destination, jobs=64)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("kinds", INTO_A_GPU, ids="-".join)
def test_a_job_is_done_only_when_the_destinations_copy_has_ended(
    make: Make, transport: str, kinds: tuple[str, str]
) -> None:
    source, destination = make(kinds[0], transport), make(kinds[1], transport)
    join(source, destination)
    source.fill(1)
    assert destination.device is not None
    destination.device.go.clear()
    source.agent.submit(CopyJob("D", 1, [3], [4]))
    with pytest.raises(queue.Empty):
        source.done.get(timeout=0.15)
    assert not destination.pages.any()
    destination.device.go.set()
    assert source.outcomes(1) == {1: None}
    assert np.array_equal(destination.pages[4], source.pages[3])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_copy_waits_for_the_event_before_it(make: Make, transport: str) -> None:
    source, destination = make("cuda", transport), make("cuda", transport)
    join(source, destination)
    source.fill(1)
    assert source.device is not None
    event = source.device.event()
    source.agent.submit(CopyJob("D", 1, [3], [4], after=Behind(event)))
    with pytest.raises(queue.Empty):
        source.done.get(timeout=0.15)
    source.pages[3] = 99  # what the event stands for
    source.device._events[event].set()
    assert source.outcomes(1) == {1: None}
    assert (destination.pages[4] == 99).all()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
def test_a_run_out_of_bounds_is_refused_and_writes_nothing(make: Make, transport: str, kinds: tuple[str, str]) -> None:
    source, destination = make(kinds[0], transport), make(kinds[1], transport)
    route = join(source, destination)
    source.fill(1)
    for run in [(0, 1 << 40, 8), (1 << 40, 0, 8), (-8, 0, 8), (0, -8, 8), (0, 0, 0)]:
        runs = Runs(*(np.array(column, np.int64) for column in zip((0, 0, 4096), run, strict=True)))
        with pytest.raises(ValueError, match="leaves the"):
            source.agent.time_writes(route, runs, 1).result(WAIT_S)
    assert not destination.view.any()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
def test_runs_of_any_length_and_place_arrive(make: Make, transport: str, kinds: tuple[str, str]) -> None:
    source, destination = make(kinds[0], transport), make(kinds[1], transport)
    route = join(source, destination)
    source.fill(1)
    rng = np.random.default_rng(8)
    length = rng.integers(1, 3000, 40)
    length[7] = 50_000  # more than a slot
    gap = rng.integers(0, 9, 40)
    to = np.cumsum(length + gap) - length
    origin = rng.integers(0, 64 * PAGE - length)
    order = rng.permutation(40)
    runs = Runs(*(column[order].astype(np.int64) for column in (origin, to, length)))
    expected = destination.view.copy()
    for start, end, size in zip(origin, to, length, strict=True):
        expected[end : end + size] = source.view[start : start + size]
    source.agent.time_writes(route, runs, 1).result(WAIT_S)
    assert np.array_equal(destination.view, expected)


# ------------------------------------------------------------------------------------------------------- ends


def submit_all(source: Side, count: int, pages: int = 256) -> None:
    order = np.random.default_rng(1).permutation(pages)
    for xfer in range(count):
        source.agent.submit(CopyJob("D", xfer, order, order))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
def test_cutting_a_source_off_in_the_middle_fails_its_jobs_and_ends_its_writes(
    make: Make, transport: str, kinds: tuple[str, str]
) -> None:
    source, destination = (make(kind, transport, pages=256) for kind in kinds)
    join(source, destination)
    source.fill(1)
    submit_all(source, 60)  # more than can be done before the main thread goes on
    wait_until(lambda: bool(destination.pages.any()))
    assert destination.agent.source_gone("S")
    destination.pages[:] = 0  # used again, at once
    errors = source.outcomes(60)
    assert any(words in (errors[59] or "") for words in ("has cut this worker off", "Broken pipe", "reset"))
    time.sleep(0.05)
    assert not destination.pages.any()
    with pytest.raises(RouteUnavailable):
        source.agent.connect("D", [destination.exports])


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("kinds", INTO_A_GPU, ids="-".join)
def test_cut_off_waits_for_copies_that_the_device_has_not_done(
    make: Make, transport: str, kinds: tuple[str, str]
) -> None:
    source, destination = (make(kind, transport) for kind in kinds)
    join(source, destination)
    source.fill(1)
    assert destination.device is not None
    destination.device.go.clear()
    source.agent.submit(CopyJob("D", 1, [3], [4]))
    wait_until(lambda: destination.device.at_work)  # the piece has arrived in a slot
    gone = threading.Thread(target=destination.agent.source_gone, args=("S",))
    gone.start()
    gone.join(0.15)
    assert gone.is_alive()
    destination.device.go.set()
    gone.join(WAIT_S)
    assert not gone.is_alive()
    destination.pages[:] = 0
    time.sleep(0.05)
    assert not destination.pages.any()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
def test_disconnect_returns_when_every_job_is_reported_and_the_device_reads_no_more(
    make: Make, transport: str, kinds: tuple[str, str]
) -> None:
    source, destination = (make(kind, transport, pages=256) for kind in kinds)
    join(source, destination)
    submit_all(source, 20)
    source.agent.disconnect("D")
    assert source.done.qsize() == 20
    source.agent.submit(CopyJob("D", 99, [0], [0]))
    assert source.outcomes(21)[99] == "there is no route to D"


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
def test_closing_the_destination_fails_jobs_in_flight(make: Make, transport: str, kinds: tuple[str, str]) -> None:
    source, destination = (make(kind, transport, pages=256) for kind in kinds)
    join(source, destination)
    submit_all(source, 100)
    source.done.get(timeout=WAIT_S)
    destination.agent.close()
    assert any(source.outcomes(99).values())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_error_of_the_sources_device_fails_the_job_with_its_words(make: Make, transport: str) -> None:
    source, destination = make("cuda", transport), make("cuda", transport)
    join(source, destination)
    source.agent.submit(CopyJob("D", 1, [1], [2]))
    assert source.outcomes(1) == {1: None}
    assert source.device is not None
    source.device.broken = "cudaErrorIllegalAddress"
    source.agent.submit(CopyJob("D", 2, [1], [2]))
    assert "cudaErrorIllegalAddress" in (source.outcomes(1)[2] or "")
    source.agent.submit(CopyJob("D", 3, [1], [2]))
    assert "cudaErrorIllegalAddress" in (source.outcomes(1)[3] or "")
    source.device.broken = ""


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_an_error_of_the_destinations_device_reaches_the_source(make: Make, transport: str, kind: str) -> None:
    source, destination = make(kind, transport), make("cuda", transport)
    join(source, destination)
    source.agent.submit(CopyJob("D", 1, [1], [2]))
    assert source.outcomes(1) == {1: None}
    assert destination.device is not None
    destination.device.broken = "cudaErrorIllegalAddress"
    source.agent.submit(CopyJob("D", 2, [1], [2]))
    assert "cudaErrorIllegalAddress" in (source.outcomes(1)[2] or "")
    destination.device.broken = ""


def test_a_ring_that_the_destination_cannot_pin_is_refused_with_the_reason(make: Make) -> None:
    source, destination = make("cuda", "shm"), make("cuda", "shm")
    assert destination.device is not None
    destination.device.pinnable = False
    with pytest.raises(RouteUnavailable, match=r"at the peer: .*cudaHostRegister"):
        join(source, destination)
    destination.device.pinnable = True
    join(source, destination)


def test_a_ring_that_the_source_cannot_pin_is_refused_with_the_reason(make: Make) -> None:
    source, destination = make("cuda", "shm"), make("cpu", "shm")
    assert source.device is not None
    source.device.pinnable = False
    with pytest.raises(RouteUnavailable, match=r"staged: cudaHostRegister"):
        join(source, destination)


@pytest.mark.parametrize("side", ["source", "destination"])
def test_memory_that_cannot_be_staged_for_tcp_fails_the_first_write_with_the_reason(make: Make, side: str) -> None:
    source, destination = make("cuda", "tcp"), make("cuda", "tcp")
    device = (source if side == "source" else destination).device
    assert device is not None

    def refuse(size: int) -> int:
        raise CudaError("cudaHostAlloc", "cudaErrorMemoryAllocation", "out of memory")

    device.allocate_pinned = refuse  # type: ignore[method-assign]
    join(source, destination)
    source.agent.submit(CopyJob("D", 1, [1], [2]))
    assert "cudaErrorMemoryAllocation" in (source.outcomes(1)[1] or "")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_staged_agents_leave_no_thread_no_descriptor_and_no_pinned_memory(make: Make, transport: str) -> None:
    def descriptors() -> int:
        links = [os.path.join("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd")]
        return sum("slipstream-kv" not in os.readlink(link) for link in links if os.path.lexists(link))

    def round_trip() -> None:
        for kinds in KINDS:
            sides = [make(kind, transport) for kind in kinds]
            join(sides[0], sides[1])
            sides[0].agent.submit(CopyJob("D", 1, [1], [2]))
            assert sides[0].outcomes(1) == {1: None}
            for side in sides:
                side.agent.close()
                assert side.device is None or not side.device._pinned
                assert side.device is None or not side.device._streams

    round_trip()
    threads, fds = threading.active_count(), descriptors()
    round_trip()
    wait_until(lambda: threading.active_count() <= threads and descriptors() <= fds)


# ------------------------------------------------------------------------------------------------------- strangers


@pytest.mark.parametrize(
    ("slot", "count", "total", "table"),
    [
        (0, 1, 64, [(1 << 40, 64)]),
        (0, 1, 64, [(-64, 64)]),
        (0, 1, 64, [(0, -64)]),
        (0, 2, 64, [(0, 32), (64, 64)]),
        (9, 1, 64, [(0, 64)]),
        (0, 0, 0, []),
        (0, 1 << 20, 64, []),
        (0, 1, 1 << 20, [(0, 1 << 20)]),
    ],
)
@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_the_ring_checks_the_bounds_of_an_admitted_source(
    make: Make, kind: str, slot: int, count: int, total: int, table: list[tuple[int, int]]
) -> None:
    destination = make(kind, "shm")
    destination.agent.admit("S", [msgspec.structs.replace(destination.exports, agent="me")])
    address = msgspec.msgpack.decode(destination.exports.descriptions[0].detail, type=ShmAddress)
    connection, _, fds = knock(Address(address.name, address.ring_token), "me")
    connection.close()
    with mmap.mmap(fds[0], address.ring.bytes) as ring, socket.socket(fileno=fds[1]) as stream:
        os.close(fds[0])
        stream.settimeout(WAIT_S)
        assert stream.recv(4096) == EMPTIED.pack(0)
        rows = b"".join(struct.pack("<qq", *row) for row in table)
        ring[address.ring.data_bytes : address.ring.data_bytes + len(rows)] = rows
        ring[:64] = bytes([255]) * 64
        stream.send(FILLED.pack(1, slot, count, total))
        assert b"its memory could not be written" in stream.recv(4096)
        assert stream.recv(4096) == b""
    assert not destination.view.any()
    assert destination.agent.source_gone("S")


def test_a_gpus_pool_itself_is_not_handed_out(make: Make) -> None:
    destination = make("cuda", "shm")
    destination.agent.admit("S", [msgspec.structs.replace(destination.exports, agent="me")])
    address = msgspec.msgpack.decode(destination.exports.descriptions[0].detail, type=ShmAddress)
    with pytest.raises(RouteUnavailable, match="the token is wrong"):
        knock(address, "me")


# ------------------------------------------------------------------------------------------------------- the pipeline


def staging_of(device: QueueDevice, pages: int, **settings: Any) -> tuple[Staging, np.ndarray]:
    memory = DeviceMemory(device, pages, PAGE, 0)  # type: ignore[arg-type]
    staging = Staging(memory.region, device=device, copiers=device.copier, **settings)  # type: ignore[arg-type]
    return staging, device.view(memory.region.address, memory.region.bytes)


def test_pieces_come_out_in_order_and_packed_while_others_are_being_fetched() -> None:
    device = QueueDevice(3)
    staging, memory = staging_of(device, 64, slots=3, slot_bytes=3 * PAGE + 100)
    memory[:] = np.random.default_rng(1).integers(0, 256, len(memory), dtype=np.uint8)
    pages = np.random.default_rng(2).permutation(64).astype(np.int64)
    runs = Runs(pages * PAGE, pages[::-1] * PAGE, np.full(64, PAGE, np.int64))
    found = [(piece.total, packed.copy()) for piece, packed in staging.out(runs)]
    assert all(total == len(packed) for total, packed in found)
    expected = memory[: 64 * PAGE].reshape(64, PAGE)[pages].reshape(-1)
    assert np.array_equal(np.concatenate([packed for _, packed in found]), expected)
    staging.close()
    assert not device._pinned


def test_leaving_out_in_the_middle_gives_all_slots_back() -> None:
    device = QueueDevice(4)
    staging, _ = staging_of(device, 64, slots=3, slot_bytes=4 * PAGE)
    runs = Runs(np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([64 * PAGE], np.int64))
    for _ in staging.out(runs):
        break
    assert sum(len(packed) for _, packed in staging.out(runs)) == 64 * PAGE
    staging.close()


def test_an_exception_while_a_slot_is_filled_drops_it() -> None:
    device = QueueDevice(5)
    staging, memory = staging_of(device, 8, slots=2, slot_bytes=PAGE)
    one = Runs(np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([PAGE], np.int64))
    for _ in range(3):
        with contextlib.suppress(EOFError), staging.into(one) as room:
            room[:] = 1
            raise EOFError
    staging.flush()
    assert not memory[:PAGE].any()
    with staging.into(one) as room:
        room[:] = 2
    staging.flush()
    assert (memory[:PAGE] == 2).all()
    large = Runs(one.source, one.destination, one.length * 2)
    with pytest.raises(ValueError, match="does not fit a slot"), staging.into(large):
        pass
    staging.close()


def test_cpu_lists_read_as_sysfs_writes_them() -> None:
    assert cpu_list("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert cpu_list("\n") == set()


def test_a_thread_runs_on_the_cpus_of_a_node_only_inside() -> None:
    before = os.sched_getaffinity(0)
    one = frozenset([min(before)])
    with running_on(one):
        assert os.sched_getaffinity(0) == one
    assert os.sched_getaffinity(0) == before
    with running_on(frozenset([1 << 20])):
        assert os.sched_getaffinity(0) == before
