"""Ranking of transports, and the preflight that proves them, over a real link of this process."""

from __future__ import annotations

import asyncio
import queue
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from slipstream import wire
from slipstream.config import TransferConfig
from slipstream.errors import PeerLost, RouteUnavailable
from slipstream.kv.layout import KVLayout
from slipstream.kv.pool import HostPool
from slipstream.stream import Link
from slipstream.transfer import pattern
from slipstream.transfer.agent import CopyJob, TransferAgent
from slipstream.transfer.order import AUTOMATIC, RDMA, better, nearest_first
from slipstream.transfer.peer import DestinationProbes, open_as_source, source_gone
from slipstream.transfer.rank import RankHere
from slipstream.transfer.route import process_id, rank
from slipstream.transfer.transports import load, load_all
from slipstream.transfer.transports.base import Context, Description, Exports, Runs, Transport
from slipstream.transfer.transports.local import Neighbourhood
from slipstream.transfer.transports.shm import ShmRemote, ShmTransport
from slipstream.transfer.transports.tcp import TcpTransport

LAYOUT = KVLayout(page_tokens=4, layers=3, kv_heads=2, head_dim=32, dtype="float32", total_kv_heads=2)
WAIT_S = 60.0


def exports(
    *, kind: str = "cpu", machine: str = "m", process: str = "p", offers: Sequence[str] = AUTOMATIC, **more: Any
) -> Exports:
    return Exports(
        rank=0,
        first_head=0,
        heads=2,
        kind=kind,
        device="cpu",
        bytes=1 << 20,
        page_bytes=4096,
        pages=128,
        probe_offset=1 << 19,
        probe_bytes=1 << 19,
        machine=machine,
        process=process,
        agent=more.pop("agent", "a"),
        descriptions=[Description(name, b"") for name in offers],
        **more,
    )


# ------------------------------------------------------------------------------------------------------- ranking


@pytest.mark.parametrize(
    ("theirs", "order"),
    [
        ({}, ["local", "shm", "tcp", "nixl", "mooncake"]),
        ({"process": "q"}, ["shm", "tcp", "nixl", "mooncake"]),
        ({"process": "q", "machine": "n"}, ["tcp", "nixl", "mooncake"]),
    ],
)
def test_the_nearest_transport_comes_first(theirs: dict[str, str], order: list[str]) -> None:
    assert list(rank(exports(), exports(**theirs), AUTOMATIC, {}).candidates) == order


@pytest.mark.parametrize(
    ("here", "there", "order"),
    [
        (True, True, ["nixl", "mooncake", "tcp"]),
        (True, False, ["tcp", "nixl", "mooncake"]),
        (False, True, ["tcp", "nixl", "mooncake"]),
    ],
)
def test_packages_come_before_tcp_only_where_both_sides_have_rdma(here: bool, there: bool, order: list[str]) -> None:
    mine, theirs = exports(rdma=here), exports(process="q", machine="n", rdma=there)
    assert list(rank(mine, theirs, AUTOMATIC, {}).candidates) == order


def test_two_gpus_of_a_machine_take_cuda_ipc_first() -> None:
    ranking = rank(exports(kind="cuda"), exports(kind="cuda", process="q"), AUTOMATIC, {})
    assert ranking.candidates[0] == "cuda_ipc"
    mixed = rank(exports(kind="cuda"), exports(process="q"), AUTOMATIC, {})
    assert "cuda_ipc" not in mixed.candidates
    assert mixed.rejected["cuda_ipc"] == "it joins GPUs; the memory is cuda here and cpu there"


def test_every_transport_is_a_candidate_or_has_its_reason() -> None:
    ranking = rank(exports(), exports(process="q", offers=["tcp"]), ["shm", "tcp"], {"nixl": "no nixl"})
    assert ranking.candidates == ("tcp",)
    assert ranking.rejected == {
        "local": "the peer is another process",
        "cuda_ipc": "here: not set up by this worker",
        "shm": "at the peer: not set up by that worker",
        "nixl": "here: no nixl",
        "mooncake": "here: not set up by this worker",
    }


def test_the_reason_of_the_peer_is_repeated() -> None:
    theirs = exports(offers=[], refused={"tcp": "cannot listen"})
    with pytest.raises(RouteUnavailable, match="tcp: at the peer: cannot listen"):
        rank(exports(), theirs, AUTOMATIC, {})


def test_an_explicit_choice_is_the_only_candidate() -> None:
    ranking = rank(exports(), exports(), AUTOMATIC, {}, "tcp")
    assert ranking.candidates == ("tcp",)
    assert ranking.rejected == {}


def test_packages_are_better_than_tcp_only_where_both_ends_have_rdma() -> None:
    reasons = dict.fromkeys(AUTOMATIC, "because")
    assert list(better("tcp", reasons, rdma=True)) == ["cuda_ipc", "shm", *RDMA]
    assert list(better("tcp", reasons, rdma=False)) == ["cuda_ipc", "shm"]
    assert list(better("nixl", reasons, rdma=False)) == ["cuda_ipc", "shm", "tcp"]
    assert better("local", reasons, rdma=True) == better("cuda_ipc", reasons, rdma=True) == {}
    assert set(better("none", reasons, rdma=True)) == set(AUTOMATIC) - {"local"}


def test_both_orders_have_every_transport_once() -> None:
    assert sorted(nearest_first(True)) == sorted(nearest_first(False)) == sorted(AUTOMATIC)


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [("local", "the peer is another process"), ("shm", "another machine"), ("cuda_ipc", "it joins GPUs")],
)
def test_an_explicit_choice_that_cannot_serve_is_refused_and_not_replaced(wanted: str, reason: str) -> None:
    theirs = exports(process="q", machine="m" if wanted == "cuda_ipc" else "n")
    with pytest.raises(RouteUnavailable, match=f"the transport '{wanted}', which was asked for.*{reason}"):
        rank(exports(), theirs, AUTOMATIC, {}, wanted)


def test_a_process_name_is_that_of_one_process() -> None:
    assert process_id() == process_id()
    code = "from slipstream.transfer.route import process_id; print(process_id())"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert len(child.stdout.strip()) > 10
    assert child.stdout.strip() != process_id()


# ------------------------------------------------------------------------------------------------------- loading


def context(**more: Any) -> Context:
    pool = HostPool.allocate(LAYOUT, 2, 4096)
    return Context(pool.region, TransferConfig(), "me", "127.0.0.1", more.get("neighbours"))


def test_what_cannot_be_loaded_is_a_reason() -> None:
    with pytest.raises(RouteUnavailable, match="there is no transport 'pigeon'; there are local"):
        load("pigeon", context())
    with pytest.raises(RouteUnavailable, match="the package 'not_there' is not installed"):
        load("x", context(), {"x": "not_there.transport"})
    with pytest.raises(RouteUnavailable, match="this version of slipstream has no x transport"):
        load("x", context(), {"x": "slipstream.transfer.transports.not_there"})
    with pytest.raises(RouteUnavailable, match=r"json has no create\(context\)"):
        load("x", context(), {"x": "json"})
    usable, refused = load_all(["local"], context())
    assert usable == {}
    assert "no Neighbourhood" in refused["local"]


# ------------------------------------------------------------------------------------------------------- preflight


class Shifted(ShmTransport):
    """Writes every byte 64 bytes too far."""

    def write(self, remote: ShmRemote, runs: Runs, after: Any = None) -> int:
        return super().write(remote, Runs(runs.source, runs.destination + 64, runs.length), after)


class Forgetful(ShmTransport):
    """Loses the last run of every copy."""

    def write(self, remote: ShmRemote, runs: Runs, after: Any = None) -> int:
        kept = max(1, len(runs.length) - 1)
        return super().write(remote, Runs(runs.source[:kept], runs.destination[:kept], runs.length[:kept]), after)


class Ordered(ShmTransport):
    """Ignores where runs belong."""

    def write(self, remote: ShmRemote, runs: Runs, after: Any = None) -> int:
        return super().write(remote, Runs(runs.source, np.sort(runs.destination), runs.length), after)


class Side:
    """An agent, its pool, and the outcomes of its jobs."""

    def __init__(self, transport: str, shm: type[ShmTransport], probe_bytes: int, neighbours: Neighbourhood | None):
        self.pool = HostPool.allocate(LAYOUT, 32, probe_bytes)
        self.done: queue.Queue[tuple[int, str | None]] = queue.Queue()

        def made(names: Sequence[str], here: Context) -> tuple[dict[str, Transport], dict[str, str]]:
            usable, refused = load_all([name for name in names if name != "shm"], here)
            return ({"shm": shm(here)} if "shm" in names else {}) | usable, refused

        self.agent = TransferAgent(
            self.pool.region,
            LAYOUT,
            TransferConfig(transport=transport),  # type: ignore[arg-type]
            on_done=lambda job, error: self.done.put((job.xfer, error)),
            neighbours=neighbours,
            load=made,
        )
        self.rank = RankHere(self.agent)
        self.probes: DestinationProbes | None = None

    def close(self) -> None:
        self.agent.close()
        self.pool.close()


@asynccontextmanager
async def joined(source: Side, destination: Side, name: str = "S") -> AsyncIterator[Link]:
    """A link from source to destination whose other end serves preflights, as a worker does."""
    begun, served = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = Link(reader, writer, wire.Decoder(wire.ToWorker), "source")
        probes = DestinationProbes(link, [destination.rank], name)
        await probes.begin([source.agent.exports()])
        destination.probes = probes
        begun.set()
        while (message := await link.receive()) is not None:
            assert await probes.handle(message)
        await probes.close()
        assert await source_gone([destination.rank], name)
        served.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    link = await Link.connect(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", wire.Decoder(wire.FromDestination))
    await asyncio.wait_for(begun.wait(), WAIT_S)
    try:
        yield link
    finally:
        link.close()
        await asyncio.to_thread(source.agent.disconnect, "D")
        await asyncio.wait_for(served.wait(), WAIT_S)
        server.close()


@asynccontextmanager
async def sides(
    transport: str = "auto", shm: type[ShmTransport] = ShmTransport, *, probe_bytes: int = 1 << 20, near: bool = False
) -> AsyncIterator[tuple[Side, Side]]:
    neighbours = Neighbourhood() if near else None
    source = Side(transport, shm, probe_bytes, neighbours)
    destination = Side("auto", ShmTransport, probe_bytes, neighbours)
    try:
        yield source, destination
    finally:
        await asyncio.to_thread(source.close)
        await asyncio.to_thread(destination.close)


async def copy_arrives(source: Side, destination: Side) -> None:
    source.pool.array[: 32 * LAYOUT.page_bytes] = np.random.default_rng(1).integers(
        1, 256, 32 * LAYOUT.page_bytes, dtype=np.uint8
    )
    source.agent.submit(CopyJob("D", 5, [1, 9], [30, 2]))
    assert await asyncio.to_thread(source.done.get, timeout=WAIT_S) == (5, None)
    size = LAYOUT.page_bytes
    assert np.array_equal(destination.pool.array[30 * size : 31 * size], source.pool.array[size : 2 * size])


@pytest.mark.parametrize(
    ("transport", "near", "chosen"),
    [
        ("auto", True, "local"),
        ("auto", False, "shm"),
        ("tcp", True, "tcp"),
        ("shm", True, "shm"),
        ("fake", True, "fake"),
    ],
)
async def test_a_preflight_finds_the_nearest_or_the_named_transport_and_measures_it(
    transport: str, near: bool, chosen: str
) -> None:
    async with sides(transport, near=near) as (source, destination), joined(source, destination) as link:
        (report,) = await open_as_source(link, [source.rank], "D", [destination.agent.exports()])
        assert report.transport == chosen
        assert report.gb_per_s > 0
        assert report.latency_us > 0
        assert not destination.pool.array[: destination.pool.probe_offset].any()
        if transport != "fake":
            await copy_arrives(source, destination)


@pytest.mark.parametrize("probe_bytes", [4096, 8192, 1 << 16, (1 << 18) + 4096, 4 << 20])
async def test_a_probe_area_of_any_size_will_do(probe_bytes: int) -> None:
    async with (
        sides("shm", probe_bytes=probe_bytes) as (source, destination),
        joined(source, destination) as link,
    ):
        (report,) = await open_as_source(link, [source.rank], "D", [destination.agent.exports()])
        assert report.transport == "shm"


@pytest.mark.parametrize(
    ("liar", "reason"),
    [
        (Shifted, r"\d+ of \d+ bytes are wrong"),
        (Forgetful, r"bytes are wrong.*were never written"),
        (Ordered, r"\d+ of \d+ bytes are wrong"),
    ],
)
async def test_a_transport_that_delivers_wrong_bytes_is_rejected_and_the_next_one_taken(
    liar: type[ShmTransport], reason: str
) -> None:
    async with sides("auto", liar) as (source, destination), joined(source, destination) as link:
        (report,) = await open_as_source(link, [source.rank], "D", [destination.agent.exports()])
        assert report.transport == "tcp"
        assert "did not arrive as sent" in report.rejected["shm"]
        assert re.search(reason, report.rejected["shm"])
        await copy_arrives(source, destination)


async def test_a_named_transport_that_delivers_wrong_bytes_is_an_error_and_leaves_no_route() -> None:
    async with sides("shm", Shifted) as (source, destination), joined(source, destination) as link:
        with pytest.raises(RouteUnavailable, match=r"'shm', which was asked for.*bytes are wrong"):
            await open_as_source(link, [source.rank], "D", [destination.agent.exports()], wanted="shm")
        source.agent.submit(CopyJob("D", 1, [0], [0]))
        assert source.done.get(timeout=WAIT_S) == (1, "there is no route to D")


async def test_two_workers_may_probe_each_other_at_the_same_time() -> None:
    async with (
        sides() as (one, other),
        joined(one, other, "one") as there,
        joined(other, one, "other") as back,
    ):
        reports = await asyncio.gather(
            open_as_source(there, [one.rank], "D", [other.agent.exports()]),
            open_as_source(back, [other.rank], "D", [one.agent.exports()]),
        )
        assert [report.transport for (report,) in reports] == ["shm", "shm"]


async def test_a_destination_serves_many_sources_one_after_the_other() -> None:
    destination = Side("auto", ShmTransport, 1 << 20, None)
    sources = [Side("auto", ShmTransport, 1 << 20, None) for _ in range(5)]

    async def probe(number: int) -> str:
        async with joined(sources[number], destination, f"S{number}") as link:
            (report,) = await open_as_source(link, [sources[number].rank], "D", [destination.agent.exports()])
            await copy_arrives(sources[number], destination)
            return report.transport

    assert await asyncio.gather(*(probe(number) for number in range(5))) == ["shm"] * 5
    for side in [*sources, destination]:
        await asyncio.to_thread(side.close)


async def test_a_source_that_goes_away_with_the_probe_area_frees_it_for_others() -> None:
    async with sides() as (gone, destination):
        async with joined(gone, destination, "gone") as link:
            link.send(wire.ProbeOpen(probe=1))
            assert isinstance(await link.receive(), wire.ProbeGrant)
        other = Side("auto", ShmTransport, 1 << 20, None)
        async with joined(other, destination, "other") as link:
            (report,) = await open_as_source(link, [other.rank], "D", [destination.agent.exports()])
            assert report.transport == "shm"
        await asyncio.to_thread(other.close)


async def test_a_link_that_ends_during_the_preflight_is_peer_lost() -> None:
    async with sides() as (source, destination), joined(source, destination) as link:
        await destination.rank.arrival.acquire()
        opening = asyncio.create_task(open_as_source(link, [source.rank], "D", [destination.agent.exports()]))
        await asyncio.sleep(0.1)
        link.close()
        with pytest.raises(PeerLost):
            await opening


async def test_the_event_loop_is_not_held_up_by_a_preflight_in_tcp() -> None:
    beats = 0

    async def beat() -> None:
        nonlocal beats
        while True:
            await asyncio.sleep(0)
            beats += 1

    async with sides("tcp", probe_bytes=4 << 20) as (source, destination), joined(source, destination) as link:
        task = asyncio.create_task(beat())
        await open_as_source(link, [source.rank], "D", [destination.agent.exports()])
        task.cancel()
    assert beats > 20


# ------------------------------------------------------------------------------------------------------- the pattern


@pytest.mark.parametrize("size", [64, 1000, 4096, 100_000])
@pytest.mark.parametrize("block", [64, 192, 4096])
def test_the_pattern_is_found_only_where_it_belongs(size: int, block: int) -> None:
    guards = 64
    area = np.full(size + 2 * guards, pattern.BLANK, np.uint8)
    data, runs = pattern.pattern(7, size), pattern.scatter(7, size, block)
    for origin, to, length in zip(runs.source, runs.destination, runs.length, strict=True):
        area[guards + to : guards + to + length] = data[origin : origin + length]
    assert pattern.check(area, guards, 7, block) == ""
    assert "bytes are wrong" in pattern.check(area, guards, 8, block)
    area[guards + size // 2] ^= 1
    assert pattern.check(area, guards, 7, block).startswith(
        f"1 of {size} bytes are wrong, the first at offset {size // 2} "
    )
    area[guards + size // 2] ^= 1
    area[0] = area[-1] = 0
    assert pattern.check(area, guards, 7, block) == "2 bytes outside the written area were changed"


def test_tcp_listens_where_the_worker_does() -> None:
    transport = TcpTransport(context())
    try:
        with pytest.raises(RouteUnavailable, match=r"cannot listen on 192\.0\.2\.1 port 0"):
            TcpTransport(Context(context().region, TransferConfig(), "me", "192.0.2.1"))
    finally:
        transport.shutdown()
