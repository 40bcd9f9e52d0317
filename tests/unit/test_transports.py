"""Each transport of CPU memory between two agents of this process: contents, bounds, ends, admission."""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest
from tests.unit.transfer_sides import WAIT_S, Outcomes, Side, join, many_jobs_end_once_each

from slipstream.config import TransferConfig
from slipstream.errors import PeerLost, RouteUnavailable
from slipstream.kv.layout import KVLayout
from slipstream.kv.pool import HostPool
from slipstream.transfer.agent import CopyJob, TransferAgent
from slipstream.transfer.copies import HeadRange, head_range
from slipstream.transfer.job import Behind
from slipstream.transfer.transports.base import Description, Exports, Region, Runs
from slipstream.transfer.transports.door import Address, knock
from slipstream.transfer.transports.local import Neighbourhood
from slipstream.transfer.transports.tcp import Listening
from slipstream.transfer.transports.tcp_frames import ANSWER, GREETING, MAGIC, PIECE

LAYOUT = KVLayout(page_tokens=4, layers=3, kv_heads=2, head_dim=32, dtype="float32", total_kv_heads=2)
REAL = ("local", "shm", "tcp")


Make = Callable[..., Side]


@pytest.fixture
def make() -> Iterator[Make]:
    sides: list[Side] = []
    neighbours = Neighbourhood()

    def side(transport: str = "auto", *, pages: int = 64, layout: KVLayout = LAYOUT, **settings: object) -> Side:
        pool = HostPool.allocate(layout, pages, 64 << 10)
        done: Outcomes = queue.Queue()
        agent = TransferAgent(
            pool.region,
            layout,
            TransferConfig(transport=transport),  # type: ignore[arg-type]
            on_done=lambda job, error: done.put((job, error)),
            neighbours=neighbours,
            **settings,  # type: ignore[arg-type]
        )
        sides.append(Side(agent, pool, pool.array, pages, done=done))
        return sides[-1]

    yield side
    for one in sides:
        one.release()


@pytest.mark.parametrize("transport", [*REAL, "fake"])
def test_random_page_lists_arrive_and_nothing_else_changes(make: Make, transport: str) -> None:
    source, destination = make(transport), make("auto")
    join(source, destination)
    rng = np.random.default_rng(5)
    expected = destination.pages.copy()
    for xfer in range(60):
        source.fill(xfer)
        count = int(rng.integers(0, 65))
        origin, to = rng.permutation(64)[:count], rng.permutation(64)[:count]
        source.agent.submit(CopyJob("D", xfer, origin, to))
        error = source.outcomes(1)[xfer]
        if error is None:
            expected[to] = source.pages[origin]
        else:
            assert transport == "fake"
            expected[to] = destination.pages[to]  # lost in part: anything, but only there
        assert np.array_equal(destination.pages, expected)


@pytest.mark.parametrize("transport", REAL)
def test_many_jobs_in_flight_end_once_each(make: Make, transport: str) -> None:
    many_jobs_end_once_each(make(transport, pages=512), make("auto", pages=512), jobs=128)


@pytest.mark.parametrize("transport", REAL)
def test_large_and_small_runs_in_one_copy_arrive(make: Make, transport: str) -> None:
    layout = msgspec.structs.replace(LAYOUT, page_tokens=1, layers=1, head_dim=8)  # 128 bytes a page
    source, destination = make(transport, pages=80_000, layout=layout), make("auto", pages=80_000, layout=layout)
    join(source, destination)
    source.fill(3)
    scattered = np.random.default_rng(4).permutation(8_000)
    origin = np.concatenate((np.arange(8_000), np.arange(8_000, 80_000)))
    to = np.concatenate((scattered, np.arange(8_000, 80_000)))
    source.agent.submit(CopyJob("D", 1, origin, to))
    assert source.outcomes(1) == {1: None}
    assert np.array_equal(destination.pages[to], source.pages[origin])


@pytest.mark.parametrize("transport", REAL)
@pytest.mark.parametrize(("sources", "destinations", "heads"), [(1, 4, 4), (4, 1, 4), (2, 8, 2), (8, 2, 4), (4, 4, 2)])
def test_ranks_of_unequal_workers_exchange_their_heads(
    make: Make, transport: str, sources: int, destinations: int, heads: int
) -> None:
    def ranks(count: int) -> list[KVLayout]:
        held = [head_range(heads, count, rank) for rank in range(count)]
        return [
            msgspec.structs.replace(LAYOUT, total_kv_heads=heads, first_head=h.first, kv_heads=h.size) for h in held
        ]

    from_layouts, to_layouts = ranks(sources), ranks(destinations)
    held = [HeadRange(layout.first_head, layout.kv_heads) for layout in from_layouts]
    prefill = [
        make(transport, pages=8, layout=layout, rank=rank, ranks=held) for rank, layout in enumerate(from_layouts)
    ]
    decode = [make("auto", pages=8, layout=layout, rank=rank) for rank, layout in enumerate(to_layouts)]
    model = np.random.default_rng(9).integers(1, 256, (8, heads, LAYOUT.head_bytes), dtype=np.uint8)
    for side, layout in zip(prefill, from_layouts, strict=True):
        side.pages[:] = model[:, layout.first_head : layout.first_head + layout.kv_heads].reshape(8, -1)
    for side in decode:
        side.agent.admit("S", [one.exports for one in prefill])
    origin, to = [0, 3, 5, 6], [7, 2, 3, 0]
    for side in prefill:
        side.agent.connect("D", [one.exports for one in decode])
        if side.agent.moves_to([one.exports for one in decode]):
            side.agent.submit(CopyJob("D", 1, origin, to))
            assert side.outcomes(1) == {1: None}
    for side, layout in zip(decode, to_layouts, strict=True):
        expected = model[origin, layout.first_head : layout.first_head + layout.kv_heads].reshape(4, -1)
        assert np.array_equal(side.pages[to], expected)


@pytest.mark.parametrize("transport", [*REAL, "fake"])
@pytest.mark.parametrize("run", [(0, 1 << 40, 8), (1 << 40, 0, 8), (-8, 0, 8), (0, -8, 8), (0, 0, 0)])
def test_a_run_out_of_bounds_is_refused_and_writes_nothing(
    make: Make, transport: str, run: tuple[int, int, int]
) -> None:
    source, destination = make(transport), make("auto")
    join(source, destination)
    route = source.agent.connect("D", [destination.exports])[0]
    source.fill(1)
    before = destination.view.copy()
    good = (0, 0, 4096)
    runs = Runs(*(np.array(column, np.int64) for column in zip(good, run, strict=True)))
    with pytest.raises(ValueError, match="leaves the"):
        source.agent.time_writes(route, runs, 1).result(WAIT_S)
    assert np.array_equal(destination.view, before)


def test_pages_that_do_not_exist_fail_the_job_and_not_the_probe_area(make: Make) -> None:
    source, destination = make("shm"), make("auto", pages=32)
    join(source, destination)
    source.agent.submit(CopyJob("D", 1, [0], [32]))
    source.agent.submit(CopyJob("D", 2, [64], [0]))
    source.agent.submit(CopyJob("D", 3, [1, 2], [0, 0]))
    errors = source.outcomes(3)
    assert errors[1] == "destination page 32 does not exist; the pool has 32 pages"
    assert errors[2] == "source page 64 does not exist; the pool has 64 pages"
    assert errors[3] == "destination page 0 is named twice"
    assert not destination.view.any()


def test_a_job_for_an_unknown_peer_says_so(make: Make) -> None:
    source = make("shm")
    source.agent.submit(CopyJob("nobody", 1, [0], [0]))
    assert source.outcomes(1) == {1: "there is no route to nobody"}


def test_a_job_after_close_is_answered_as_failed(make: Make) -> None:
    source = make("shm")
    source.agent.close()
    source.agent.submit(CopyJob("D", 1, [0], [0]))
    assert source.outcomes(1) == {1: "the transfer agent of this worker is closed"}
    source.agent.disconnect("D")


@pytest.mark.parametrize("transport", [*REAL, "fake"])
def test_an_agent_that_was_not_admitted_opens_nothing(make: Make, transport: str) -> None:
    source, destination = make(transport), make("auto")
    with pytest.raises(RouteUnavailable, match=r"not admitted|does not know this worker"):
        source.agent.connect("D", [destination.exports])


@pytest.mark.parametrize("transport", [*REAL, "fake"])
def test_a_source_that_was_cut_off_is_proven_gone_and_may_be_admitted_again(make: Make, transport: str) -> None:
    source, destination = make(transport), make("auto")
    join(source, destination)
    assert destination.agent.source_gone("S")
    with pytest.raises(RouteUnavailable):
        source.agent.connect("D", [destination.exports])
    source.agent.submit(CopyJob("D", 1, [0], [1]))
    assert source.outcomes(1)[1] is not None
    source.agent.disconnect("D")
    join(source, destination)
    source.fill(1)
    while True:
        source.agent.submit(CopyJob("D", 2, [0], [1]))
        if source.outcomes(1)[2] is None:
            break
        assert transport == "fake"
    assert np.array_equal(destination.pages[1], source.pages[0])


@pytest.mark.parametrize("transport", REAL)
def test_cutting_a_source_off_in_the_middle_fails_its_jobs_and_ends_its_writes(make: Make, transport: str) -> None:
    layout = msgspec.structs.replace(LAYOUT, layers=64)
    source, destination = make(transport, pages=512, layout=layout), make("auto", pages=512, layout=layout)
    join(source, destination)
    source.fill(1)
    order = np.random.default_rng(1).permutation(512)
    for xfer in range(200):  # more than can be done before the main thread goes on
        source.agent.submit(CopyJob("D", xfer, order, order))
    source.done.get(timeout=WAIT_S)
    assert destination.agent.source_gone("S")
    destination.pages[:] = 0  # the destination uses its memory again, at once
    errors = source.outcomes(199)
    assert any(errors.values())
    assert not destination.pages.any()


@pytest.mark.parametrize("transport", REAL)
def test_disconnect_returns_when_every_job_is_reported(make: Make, transport: str) -> None:
    layout = msgspec.structs.replace(LAYOUT, layers=64)
    source, destination = make(transport, pages=512, layout=layout), make("auto", pages=512, layout=layout)
    join(source, destination)
    order = np.random.default_rng(1).permutation(512)
    for xfer in range(20):
        source.agent.submit(CopyJob("D", xfer, order, order))
    source.agent.disconnect("D")
    assert source.done.qsize() == 20
    source.agent.submit(CopyJob("D", 99, [0], [0]))
    assert source.outcomes(21)[99] == "there is no route to D"


@pytest.mark.parametrize("transport", REAL)
def test_closing_the_destination_fails_jobs_in_flight(make: Make, transport: str) -> None:
    layout = msgspec.structs.replace(LAYOUT, layers=64)
    source, destination = make(transport, pages=512, layout=layout), make("auto", pages=512, layout=layout)
    join(source, destination)
    order = np.random.default_rng(1).permutation(512)
    for xfer in range(200):
        source.agent.submit(CopyJob("D", xfer, order, order))
    source.done.get(timeout=WAIT_S)
    destination.agent.close()
    assert any(source.outcomes(199).values())


@pytest.mark.parametrize("transport", REAL)
def test_one_lost_peer_leaves_the_others_alone(make: Make, transport: str) -> None:
    source, gone, stays = make(transport), make("auto"), make("auto")
    gone.agent.admit("S", [source.exports])
    stays.agent.admit("S", [source.exports])
    source.agent.connect("gone", [gone.exports])
    source.agent.connect("stays", [stays.exports])
    gone.agent.close()
    source.fill(1)
    source.agent.submit(CopyJob("stays", 1, [3], [4]))
    assert source.outcomes(1) == {1: None}
    assert np.array_equal(stays.pages[4], source.pages[3])


def test_agents_leave_no_thread_and_no_descriptor_behind(make: Make) -> None:
    def descriptors() -> int:
        """But for those of pools, which go with the last view of their memory."""
        fds = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        return sum("slipstream-kv" not in os.readlink(fd) for fd in fds if os.path.lexists(fd))

    def round_trip() -> None:
        sides = [make(transport) for transport in (*REAL, "fake")]
        destination = make("auto")
        for side in sides:
            join(side, destination)
        for side in [*sides, destination]:
            side.agent.close()
            side.memory.close()

    round_trip()
    threads, fds = threading.active_count(), descriptors()
    round_trip()
    assert threading.active_count() <= threads
    assert descriptors() <= fds


# ------------------------------------------------------------------------------------------------------- strangers


def listening(side: Side) -> Listening:
    return msgspec.msgpack.decode(detail(side.exports, "tcp"), type=Listening)


def detail(exports: Exports, transport: str) -> bytes:
    return {d.transport: d.detail for d in exports.descriptions}[transport]


def ended(sock: socket.socket) -> bool:
    """Whether the other side ends the connection, and sends nothing before."""
    sock.settimeout(WAIT_S)
    try:
        return sock.recv(64) == b""
    except ConnectionError:
        return True


def test_the_tcp_listener_ends_connections_that_send_garbage_and_serves_on(make: Make) -> None:
    source, destination = make("tcp"), make("auto")
    address = (listening(destination).host, listening(destination).port)
    before = destination.view.copy()
    for garbage in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b"x" * 64, b"\xff" * 4096, os.urandom(1 << 16)):
        with socket.create_connection(address, WAIT_S) as sock:
            sock.sendall(garbage)
            assert ended(sock)
    assert np.array_equal(destination.view, before)
    join(source, destination)


def test_a_wrong_token_opens_no_tcp_stream(make: Make) -> None:
    source, destination = make("tcp"), make("auto")
    destination.agent.admit("S", [source.exports])
    wrong = msgspec.structs.replace(listening(destination), token=bytes(16))
    forged = msgspec.structs.replace(
        destination.exports, descriptions=[Description("tcp", msgspec.msgpack.encode(wrong))]
    )
    with pytest.raises(RouteUnavailable, match="refused the connection: wrong token"):
        source.agent.connect("D", [forged])


def test_a_wrong_token_opens_no_shared_memory(make: Make) -> None:
    destination = make("auto")
    destination.agent.admit("S", [msgspec.structs.replace(destination.exports, agent="me")])
    address = msgspec.msgpack.decode(detail(destination.exports, "shm"), type=Address)
    connection, _, fds = knock(address, "me")
    connection.close()
    for fd in fds:
        os.close(fd)
    with pytest.raises(RouteUnavailable, match="the token is wrong"):
        knock(msgspec.structs.replace(address, token=bytes(16)), "me")
    with pytest.raises(RouteUnavailable, match="cannot be opened from here"):
        knock(msgspec.structs.replace(address, name="slipstream-none"), "me")


@pytest.mark.parametrize(
    ("count", "total", "runs"),
    [
        (1, 8, [(1 << 40, 8)]),
        (1, 8, [(-8, 8)]),
        (1, 8, [(0, -8)]),
        (2, 8, [(0, 8), (64, 8)]),
        (1 << 30, 8, []),
        (1, 1 << 60, [(0, 1 << 60)]),
        (0, 0, []),
    ],
)
def test_the_tcp_receiver_checks_the_bounds_of_an_admitted_sender(
    make: Make, count: int, total: int, runs: list[tuple[int, int]]
) -> None:
    destination = make("auto")
    destination.agent.admit("S", [msgspec.structs.replace(destination.exports, agent="me")])
    peer = listening(destination)
    before = destination.view.copy()
    with socket.create_connection((peer.host, peer.port), WAIT_S) as sock:
        sock.sendall(GREETING.pack(MAGIC, peer.token, 2) + b"me")
        assert sock.recv(len(MAGIC), socket.MSG_WAITALL) == MAGIC
        sock.sendall(PIECE.pack(77, count, total) + np.array(runs, np.int64).tobytes())
        sequence, size = ANSWER.unpack(sock.recv(ANSWER.size, socket.MSG_WAITALL))
        assert sequence == 77
        assert b"does not fit this pool" in sock.recv(size, socket.MSG_WAITALL)
        assert ended(sock)
    assert np.array_equal(destination.view, before)
    assert destination.agent.source_gone("S")


def test_a_receiver_that_refuses_breaks_the_route_and_fails_its_jobs_with_its_words(make: Make) -> None:
    source, destination = make("tcp"), make("auto")
    destination.agent.admit("S", [source.exports])
    larger = msgspec.structs.replace(destination.exports, bytes=1 << 40, pages=1 << 20)
    source.agent.connect("D", [larger])
    source.agent.submit(CopyJob("D", 1, [0], [1 << 19]))
    assert "does not fit this pool" in (source.outcomes(1)[1] or "")
    source.agent.submit(CopyJob("D", 2, [0], [0]))
    assert "does not fit this pool" in (source.outcomes(1)[2] or "")


def test_shared_memory_smaller_than_announced_is_refused(make: Make) -> None:
    source, destination = make("shm"), make("auto")
    destination.agent.admit("S", [source.exports])
    larger = msgspec.structs.replace(destination.exports, bytes=1 << 40)
    with pytest.raises(RouteUnavailable, match="it announced 1099511627776"):
        source.agent.connect("D", [larger])


@pytest.mark.parametrize(
    ("transport", "reason"),
    [
        ("local", "local moves memory of the CPU; the KV pool of this rank is on GPU-1"),
        ("shm", "the GPU's memory cannot be staged"),
        ("tcp", "the GPU's memory cannot be staged"),
    ],
)
def test_memory_of_a_gpu_that_is_not_here_is_refused_with_the_reason(transport: str, reason: str) -> None:
    region = Region(kind="cuda", address=0, bytes=1 << 20, page_bytes=4096, pages=8, probe_offset=32768, device="GPU-1")
    with pytest.raises(RouteUnavailable, match=reason):
        load_for(region, transport)


def load_for(region: Region, transport: str) -> None:
    from slipstream.transfer.transports import load
    from slipstream.transfer.transports.base import Context

    load(transport, Context(region, TransferConfig(), "me", "127.0.0.1", Neighbourhood()))


@pytest.mark.parametrize("transport", REAL)
def test_a_device_event_before_a_copy_of_cpu_memory_is_an_error(make: Make, transport: str) -> None:
    source, destination = make(transport), make("auto")
    join(source, destination)
    source.agent.submit(CopyJob("D", 1, [0], [0], after=Behind(object())))
    assert "device event" in (source.outcomes(1)[1] or "")


def test_a_broken_remote_refuses_writes_with_peer_lost(make: Make) -> None:
    source, destination = make("shm"), make("auto")
    destination.agent.admit("S", [source.exports])
    route = source.agent.connect("D", [destination.exports])[0]
    destination.agent.close()
    runs = Runs(*(np.array([value], np.int64) for value in (0, 0, 64)))
    with pytest.raises(PeerLost, match="has ended or has withdrawn its memory"):
        source.agent.time_writes(route, runs, 1 << 40).result(WAIT_S)
    with pytest.raises(PeerLost, match="has ended or has withdrawn its memory"):
        source.agent.time_writes(route, runs, 1).result(WAIT_S)
