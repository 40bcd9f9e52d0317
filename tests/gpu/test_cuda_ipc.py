"""cuda_ipc on real GPUs: two where there are two, else one GPU used by both sides."""

from __future__ import annotations

import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from slipstream.bench.endpoint import choose
from slipstream.bench.transfer import Case, Child, Options, _measure, pool_bytes
from slipstream.config import TransferConfig
from slipstream.errors import PeerLost, RouteUnavailable
from slipstream.transfer.cuda.copier import Copier
from slipstream.transfer.cuda.launcher import CopySettings
from slipstream.transfer.cuda.memory import DeviceMemory
from slipstream.transfer.cuda.plan import CopyCosts, survey
from slipstream.transfer.cuda.runtime import Device
from slipstream.transfer.staging import Staging
from slipstream.transfer.transports.base import Completion, Context, Exports, Region, Runs
from slipstream.transfer.transports.cuda_ipc import CudaIpcTransport, CudaRemote

HAVE_GPU = torch.cuda.is_available() and importlib.util.find_spec("cuda") is not None
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAVE_GPU, reason="needs an NVIDIA GPU and the extra gpu")]
LAST = torch.cuda.device_count() - 1
BY_KERNEL = CopyCosts(0.0, 0.0, 1.0, 1.0, 1.0)
BY_ENGINE = CopyCosts(1.0, 1.0, 0.0, 0.0, 0.0)
SIZE = 8 << 20


class Rank:
    """A pool of 2,048 pages of 4 KiB and its transport."""

    def __init__(self, name: str, device: int, size: int = SIZE) -> None:
        self.name = name
        self.memory = DeviceMemory(Device(device), size // 4096, 4096, 1 << 16)
        self.transport = CudaIpcTransport(Context(self.memory.region, TransferConfig(), name, "127.0.0.1"))

    def exports(self) -> Exports:
        region = self.memory.region
        return Exports(
            rank=0,
            first_head=0,
            heads=1,
            kind="cuda",
            device=region.device,
            bytes=region.bytes,
            page_bytes=region.page_bytes,
            pages=region.pages,
            probe_offset=region.probe_offset,
            probe_bytes=1 << 16,
            machine="",
            process="",
            agent=self.name,
            descriptions=[],
        )

    def open(self, peer: Rank) -> CudaRemote:
        peer.transport.admit(self.name)
        return self.transport.open(peer.exports(), peer.transport.export())

    def contents(self) -> np.ndarray:
        return self.memory.read(0, self.memory.region.bytes)

    def completions(self, count: int, seconds: float = 10.0) -> list[Completion]:
        found: list[Completion] = []
        end = time.monotonic() + seconds
        while len(found) < count and time.monotonic() < end:
            if select.select([self.transport.fileno()], [], [], 0.2)[0]:
                found += self.transport.poll()
        return found

    def close(self) -> None:
        self.transport.shutdown()
        self.memory.close()


@pytest.fixture
def ranks() -> Iterator[tuple[Rank, Rank]]:
    pair = Rank("a", 0), Rank("b", LAST)
    for seed, rank in enumerate(pair):
        rank.memory.write(0, np.random.default_rng(seed).integers(0, 256, rank.memory.region.bytes, np.uint8))
    yield pair
    for rank in pair:
        rank.close()


def random_runs(random: np.random.Generator, count: int, longest: int, step: int, size: int) -> Runs:
    """Runs that do not overlap at the destination, in random order, of lengths and offsets that `step` divides."""
    length = random.integers(1, longest // step, count) * step
    columns = []
    for _ in range(2):
        gap = random.integers(0, 3, count) * step
        columns.append(np.cumsum(length + gap) - length)
        assert columns[-1][-1] + length[-1] <= size
    order = random.permutation(count)
    return Runs(*(column[order].astype(np.int64) for column in (*columns, length)))


def expected(source: np.ndarray, destination: np.ndarray, runs: Runs) -> np.ndarray:
    want = destination.copy()
    for s, d, n in zip(runs.source.tolist(), runs.destination.tolist(), runs.length.tolist(), strict=True):
        want[d : d + n] = source[s : s + n]
    return want


@pytest.mark.parametrize("costs", [BY_KERNEL, BY_ENGINE], ids=["kernel", "engine"])
@pytest.mark.parametrize("step", [1, 4, 16, 256])
@pytest.mark.parametrize("direction", ["push", "pull"])
def test_random_runs_arrive_and_nothing_else_changes(
    ranks: tuple[Rank, Rank], costs: CopyCosts, step: int, direction: str
):
    a, b = ranks
    remote = a.open(b)
    remote.costs = remote.read_costs = costs
    random = np.random.default_rng(step)
    giver, taker = (a, b) if direction == "push" else (b, a)
    for longest in (300, 200_000):
        runs = random_runs(random, 40, max(longest, 2 * step), step, SIZE)
        want = expected(giver.contents(), taker.contents(), runs)
        verb = a.transport.write if direction == "push" else a.transport.read
        ticket = verb(remote, runs)
        assert a.completions(1) == [Completion(ticket)]
        assert (taker.contents() == want).all()


@pytest.mark.parametrize("page", [16, 48, 1024, 4096, 36864, 1 << 18])
def test_pages_of_any_size_arrive(ranks: tuple[Rank, Rank], page: int):
    a, b = ranks
    remote = a.open(b)
    remote.costs = BY_KERNEL
    total = SIZE // page
    count = min(total, 70_000)
    runs = Runs(choose(total, count, 1, False) * page, choose(total, count, 2, False) * page, np.full(count, page))
    source, want = a.contents(), b.contents()
    size = total * page
    want[:size].reshape(total, page)[runs.destination // page] = source[:size].reshape(total, page)[runs.source // page]
    ticket = a.transport.write(remote, runs)
    assert a.completions(1) == [Completion(ticket)]
    assert (b.contents() == want).all()


def test_many_tickets_under_way_all_arrive(ranks: tuple[Rank, Rank]):
    a, b = ranks
    remote = a.open(b)
    pages = np.random.default_rng(1).permutation(2048).astype(np.int64) * 4096
    tickets = []
    for part in np.split(pages, 64):
        tickets.append(a.transport.write(remote, Runs(part, part, np.full(len(part), 4096, np.int64))))
    done = a.completions(64)
    assert sorted(completion.ticket for completion in done) == tickets
    assert all(completion.error is None for completion in done)
    assert (b.contents()[:SIZE] == a.contents()[:SIZE]).all()


def test_a_copy_waits_for_the_work_before_its_event(ranks: tuple[Rank, Rank]):
    a, b = ranks
    remote = a.open(b)
    with torch.cuda.device(0):
        view = torch.as_tensor(a.memory, device="cuda:0")
        view[:8192] = 76  # loads what the next such line needs: loading waits for the device
        torch.cuda.synchronize()
        torch.cuda._sleep(1_000_000_000)
        view[:8192] = 77
        event = torch.cuda.Event()
        event.record()
    page = np.zeros(1, np.int64)
    ticket = a.transport.write(remote, Runs(page, page, page + 8192), after=event)
    assert a.transport.poll() == []
    assert not event.query()
    assert a.completions(1) == [Completion(ticket)]
    assert (b.memory.read(0, 8192) == 77).all()


def test_costs_are_measured_and_of_a_plausible_order(ranks: tuple[Rank, Rank]):
    a, b = ranks
    remote = a.open(b)
    print(remote.costs, remote.read_costs, "crossover", remote.costs.crossover())
    for costs in (remote.costs, remote.read_costs):
        assert 1e9 < 1 / costs.kernel_byte < 1e13
        assert 1e9 < 1 / costs.engine_byte < 1e13
        assert costs.kernel_start < 5e-3


def test_a_pool_of_the_framework_is_refused():
    tensor = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda:0")
    region = Region("cuda", tensor.data_ptr(), 1 << 19, 4096, 128, 1 << 19, Device(0).uuid, 0)
    with pytest.raises(RouteUnavailable, match=r"DeviceMemory"):
        CudaIpcTransport(Context(region, TransferConfig(), "a", ""))


# ---------------------------------------------------------------------------------------------------- two processes


@pytest.fixture
def children(tmp_path: Path) -> Iterator[list[Child]]:
    """Two processes, each seeing only its own GPU, as cuda:0."""
    pair = [
        Child({"CUDA_VISIBLE_DEVICES": str(device)}, tmp_path / f"{name}.log")
        for name, device in (("source", 0), ("target", LAST))
    ]
    yield pair
    for child in pair:
        child.kill()


OPTIONS = Options(memory=("cuda:0", "cuda:0"), sizes=(4096,), batch_bytes=64 << 20, case_s=0.05, limit_s=60)


def connect(children: list[Child], size: int) -> None:
    for child in children:
        child.tell("make", engine="cuda_ipc", memory="cuda:0", bytes=size, programs=64, depth=4)
    hellos = [child.hear("make", 90) for child in children]
    children[0].ask("meet", 30, hello=hellos[1]["hello"])
    children[1].ask("meet", 30, hello=hellos[0]["hello"])
    print(children[0].ask("connect", 90))


def test_processes_that_see_different_gpus_exchange_pages(children: list[Child]):
    connect(children, pool_bytes(OPTIONS))
    for direction in ("push", "pull"):
        for case in (Case(1024, 65536, False), Case(4096, 16384, False), Case(1 << 20, 64, False)):
            row = _measure(children, "cuda_ipc", case, direction, 0.05, OPTIONS)
            print(row)
            assert (row.verified, row.problem) == (True, "")


PEER = """
import json, select, sys, time
import numpy as np
from slipstream.config import TransferConfig
from slipstream.transfer.cuda.memory import DeviceMemory
from slipstream.transfer.cuda.runtime import Device
from slipstream.transfer.transports.base import Context, Exports, Runs
from slipstream.transfer.transports.cuda_ipc import CudaIpcTransport
import msgspec

size = 1 << 30
memory = DeviceMemory(Device(int(sys.argv[1])), size // 4096, 4096, 0)
transport = CudaIpcTransport(Context(memory.region, TransferConfig(), "peer", "127.0.0.1"))
transport.admit("test")
print(json.dumps({"detail": transport.export().hex(), "bytes": memory.region.bytes}), flush=True)
line = json.loads(sys.stdin.readline())
if line["write"]:
    exports = msgspec.msgpack.decode(bytes.fromhex(line["exports"]), type=Exports)
    remote = transport.open(exports, bytes.fromhex(line["detail"]))
    pages = np.random.default_rng(3).permutation(size // 4096).astype(np.int64) * 4096
    runs = Runs(pages, pages, np.full(len(pages), 4096, np.int64))
    under_way = 0
    while True:
        while under_way < 8:
            transport.write(remote, runs)
            under_way += 1
            print("writing", flush=True)
        select.select([transport.fileno()], [], [], 1)
        under_way -= len(transport.poll())
else:
    while True:
        select.select([transport.fileno()], [], [], 1)
        transport.poll()
"""


class Peer:
    """A process with a pool of 1 GiB on the last GPU; writes into ours without end when told to."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", PEER, str(LAST)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.stdout = self.process.stdout
        hello = json.loads(self.stdout.readline())
        self.detail, self.bytes = bytes.fromhex(hello["detail"]), hello["bytes"]

    def tell(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)


@pytest.fixture
def peer() -> Iterator[Peer]:
    process = Peer()
    yield process
    process.process.kill()
    process.process.wait()


COPIES = 100  # of 1 GiB: at least 250 ms, longer than a killed process takes to end


def test_killing_the_destination_in_the_middle_of_copies_fails_them_and_harms_nothing(peer: Peer):
    rank = Rank("test", 0, 1 << 30)
    exports = msgspec.structs.replace(rank.exports(), bytes=peer.bytes, probe_offset=peer.bytes, probe_bytes=0)
    peer.tell({"write": False})
    remote = rank.transport.open(exports, peer.detail)
    pages = np.random.default_rng(3).permutation((1 << 30) // 4096).astype(np.int64) * 4096
    runs = Runs(pages, pages, np.full(len(pages), 4096, np.int64))
    for _ in range(COPIES):
        rank.transport.write(remote, runs)
    peer.kill()
    killed = time.monotonic()
    done, said = [], 0.0
    while not (said and len(done) == COPIES) and time.monotonic() < killed + 10:
        select.select([rank.transport.fileno()], [], [], 1)
        done += rank.transport.poll()
        if not said and remote.ended:
            said = time.monotonic() - killed
    print(f"told {said:.3f} s after the kill; {sum(c.error is None for c in done)} of {COPIES} copies had ended before")
    assert len(done) == COPIES
    assert 0 < said < 5
    assert "ended" in (done[-1].error or "")
    with pytest.raises(PeerLost, match="ended"):
        rank.transport.write(remote, runs)
    torch.cuda.synchronize(0)
    assert int(torch.ones(10, device="cuda:0").sum()) == 10
    rank.close()


def test_after_a_killed_source_is_proven_gone_nothing_more_arrives(peer: Peer):
    rank = Rank("test", 0, 1 << 30)
    rank.transport.admit("peer")
    exports = msgspec.msgpack.encode(rank.exports()).hex()
    peer.tell({"write": True, "exports": exports, "detail": rank.transport.export().hex()})
    for _ in range(30):
        assert peer.stdout.readline() == "writing\n"
    leaving = rank.transport.cut_off("peer")
    peer.kill()
    killed = time.monotonic()
    leaving.result(10)
    print(f"proven gone {time.monotonic() - killed:.3f} s after the kill")
    view = torch.as_tensor(rank.memory, device="cuda:0")
    view.fill_(5)
    torch.cuda.synchronize(0)
    time.sleep(0.5)
    assert bool((view == 5).all())
    del view
    rank.close()


# ---------------------------------------------------------------------------------------------------- staging


def test_staged_runs_come_out_and_go_in_as_they_were():
    memory = DeviceMemory(Device(0), 4096, 8192, 0)
    random = np.random.default_rng(9)
    memory.write(0, random.integers(0, 256, memory.region.bytes, np.uint8))
    before = memory.read(0, memory.region.bytes)
    staging = Staging(memory.region, slots=3, slot_bytes=1 << 20)
    for runs in (random_runs(random, 200, 90_000, 1, 16 << 20), random_runs(random, 40, 3_000_000 // 16, 16, 16 << 20)):
        want = np.concatenate([before[s : s + n] for s, n in zip(runs.source, runs.length, strict=True)])
        assert (np.concatenate([piece.copy() for _, piece in staging.out(runs)]) == want).all()
        memory.write(0, np.zeros(memory.region.bytes, np.uint8))
        position = 0
        for piece, packed in [(r, a.copy()) for r, a in _pieces(runs, want)]:
            with staging.into(piece) as slot:
                slot[:] = packed
            position += len(packed)
        staging.flush()
        assert (memory.read(0, memory.region.bytes) == expected(before, np.zeros_like(before), runs)).all()
        memory.write(0, before)
    staging.close()
    memory.close()


def _pieces(runs: Runs, packed: np.ndarray) -> Iterator[tuple[Runs, np.ndarray]]:
    from slipstream.transfer.copies import split

    position = 0
    for piece in split(runs, 1 << 20, 1 << 15):
        yield piece, packed[position : position + piece.total]
        position += piece.total


def test_a_copier_moves_between_two_places_of_one_gpu():
    memory = DeviceMemory(Device(0), 2, 1 << 20, 0)
    memory.write(0, np.arange(1 << 20, dtype=np.uint32).view(np.uint8)[: 1 << 20])
    copier = Copier(Device(0), CopySettings(programs=4, tile_bytes=4096, warps=4))
    runs = Runs(*(np.array([value], np.int64) for value in (0, 1 << 20, 1 << 20)))
    size = memory.region.bytes
    copier.wait(copier.start(memory.address, memory.address, runs, survey(runs, size, size), BY_KERNEL))
    assert (memory.read(1 << 20, 1 << 20) == memory.read(0, 1 << 20)).all()
    copier.close()
    memory.close()


@pytest.mark.parametrize("longest", [96, 4096, 300_000])
@pytest.mark.parametrize("equal", [True, False], ids=["equal runs", "any runs"])
def test_the_kernels_of_lanes_move_what_gpus_without_bulk_copies_are_given(equal: bool, longest: int):
    """Newer GPUs take them for runs of less than 256 bytes alone, so they are asked for by name."""
    memory = DeviceMemory(Device(0), 2048, 8192, 0)
    random = np.random.default_rng(longest)
    memory.write(0, random.integers(0, 256, memory.region.bytes, np.uint8))
    half, size = 8 << 20, memory.region.bytes
    if equal:
        places = [random.permutation(half // longest)[:25].astype(np.int64) * longest for _ in range(2)]
        runs = Runs(*places, np.full(25, longest, np.int64))
    else:
        runs = random_runs(random, 25, longest, 1, half)
    runs = Runs(runs.source, runs.destination + half, runs.length)
    before = memory.read(0, size)
    copier = Copier(Device(0), CopySettings(programs=8, bulk=None, tile_bytes=4096, warps=4))
    copier.wait(copier.start(memory.address, memory.address, runs, survey(runs, size, size), BY_KERNEL))
    assert (memory.read(0, size) == expected(before, before, runs)).all()
    copier.close()
    memory.close()
