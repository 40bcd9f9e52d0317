"""shm and tcp with memory of real GPUs: two where there are two, else one that both sides use."""

from __future__ import annotations

import importlib.util
import queue
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.config import TransferConfig
from slipstream.kv.layout import KVLayout
from slipstream.kv.pool import HostPool
from slipstream.transfer.agent import CopyJob, TransferAgent
from slipstream.transfer.cuda.memory import DeviceMemory
from slipstream.transfer.cuda.runtime import Device
from slipstream.transfer.job import Behind
from slipstream.transfer.transports.base import Runs

HAVE_GPU = torch.cuda.is_available() and importlib.util.find_spec("cuda") is not None
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAVE_GPU, reason="needs an NVIDIA GPU and the extra gpu")]
LAST = torch.cuda.device_count() - 1
LAYOUT = KVLayout(page_tokens=4, layers=8, kv_heads=4, head_dim=32, dtype="float32", total_kv_heads=4)
PAGES = 2048
KINDS = [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")]
WAIT_S = 60.0


class Side:
    """An agent with a pool of 2,048 pages of 32 KiB, on a GPU or not."""

    def __init__(self, kind: str, transport: str, device: int) -> None:
        self.memory: Any = (
            DeviceMemory(Device(device), PAGES, LAYOUT.page_bytes, 1 << 20)
            if kind == "cuda"
            else HostPool.allocate(LAYOUT, PAGES, 1 << 20)
        )
        self.kind = kind
        self.done: queue.Queue[tuple[int, str | None]] = queue.Queue()
        self.agent = TransferAgent(
            self.memory.region,
            LAYOUT,
            TransferConfig(transport=transport),  # type: ignore[arg-type]
            on_done=lambda job, error: self.done.put((job.xfer, error)),
            memory=self.memory if kind == "cuda" else None,
        )

    def write(self, data: np.ndarray) -> None:
        if self.kind == "cuda":
            self.memory.write(0, data)
        else:
            self.memory.array[: len(data)] = data

    def read(self) -> np.ndarray:
        size = self.memory.region.bytes
        return self.memory.read(0, size) if self.kind == "cuda" else self.memory.array[:size].copy()

    def close(self) -> None:
        self.agent.close()
        self.memory.close()


Make = Callable[[tuple[str, str], str], tuple[Side, Side, Any]]


@pytest.fixture
def make() -> Iterator[Make]:
    sides: list[Side] = []

    def pair(kinds: tuple[str, str], transport: str) -> tuple[Side, Side, Any]:
        sides.extend(Side(kind, transport, device) for kind, device in zip(kinds, (0, LAST), strict=True))
        source, destination = sides[-2:]
        destination.agent.admit("S", [source.agent.exports()])
        routes = source.agent.connect("D", [destination.agent.exports()])
        assert [route.transport for route in routes] == [transport]
        return source, destination, routes[0]

    yield pair
    for side in sides:
        side.close()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
def test_pages_and_odd_runs_arrive_and_nothing_else_changes(make: Make, kinds: tuple[str, str], transport: str) -> None:
    source, destination, route = make(kinds, transport)
    rng = np.random.default_rng(1)
    sent = rng.integers(0, 256, source.memory.region.bytes, np.uint8)
    source.write(sent)
    expected = destination.read()
    page = LAYOUT.page_bytes
    for xfer, count in enumerate((1, 100, PAGES)):
        origin, to = rng.permutation(PAGES)[:count], rng.permutation(PAGES)[:count]
        source.agent.submit(CopyJob("D", xfer, origin, to))
        assert source.done.get(timeout=WAIT_S) == (xfer, None)
        rows = expected[: PAGES * page].reshape(PAGES, page)
        rows[to] = sent[: PAGES * page].reshape(PAGES, page)[origin]
    assert np.array_equal(destination.read(), expected)
    length = rng.integers(1, 90_000, 300)
    places = [np.cumsum(length + rng.integers(0, 9, 300)) - length for _ in range(2)]
    order = rng.permutation(300)
    source.agent.time_writes(route, Runs(*(c[order].astype(np.int64) for c in (*places, length))), 1).result(WAIT_S)
    for start, end, size in zip(*places, length, strict=True):
        expected[end : end + size] = sent[start : start + size]
    assert np.array_equal(destination.read(), expected)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_copy_waits_for_the_work_before_its_event(make: Make, transport: str) -> None:
    source, destination, _ = make(("cuda", "cuda"), transport)
    with torch.cuda.device(0):
        view = torch.as_tensor(source.memory, device="cuda:0")
        torch.cuda._sleep(200_000_000)
        view[: LAYOUT.page_bytes] = 77
        event = torch.cuda.Event()
        event.record()
    source.agent.submit(CopyJob("D", 1, [0], [5], after=Behind(event)))
    assert source.done.get(timeout=WAIT_S) == (1, None)
    assert (destination.memory.read(5 * LAYOUT.page_bytes, LAYOUT.page_bytes) == 77).all()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_source_that_is_cut_off_in_the_middle_writes_no_more(make: Make, transport: str) -> None:
    source, destination, _ = make(("cuda", "cuda"), transport)
    source.write(np.full(source.memory.region.bytes, 9, np.uint8))
    order = np.random.default_rng(2).permutation(PAGES)
    for xfer in range(20):
        source.agent.submit(CopyJob("D", xfer, order, order))
    source.done.get(timeout=WAIT_S)
    assert destination.agent.source_gone("S")
    view = torch.as_tensor(destination.memory, device=f"cuda:{LAST}")
    view.fill_(5)
    torch.cuda.synchronize(LAST)
    assert any(source.done.get(timeout=WAIT_S)[1] for _ in range(19))
    assert bool((view == 5).all())
