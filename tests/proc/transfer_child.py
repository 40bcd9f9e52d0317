"""A process with one transfer agent, driven through a connection: (method name, arguments) in, (ok, answer) out.

python transfer_child.py FD TRANSPORT PAGES LAYERS

TRANSPORT may be `shm@device` or `tcp@device`: the pool then lies in memory of `tests.unit.device_queue`.
"""

from __future__ import annotations

import queue
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from slipstream.config import TransferConfig
from slipstream.errors import SlipstreamError
from slipstream.kv.layout import KVLayout
from slipstream.kv.pool import HostPool
from slipstream.transfer.agent import CopyJob, TransferAgent
from slipstream.transfer.cuda.memory import DeviceMemory
from slipstream.transfer.transports import load_all
from slipstream.transfer.transports.base import Context, Exports, Transport
from slipstream.transfer.transports.shm import ShmTransport
from slipstream.transfer.transports.shm_ring import RingShape
from slipstream.transfer.transports.tcp import TcpTransport

sys.path.insert(0, str(Path(__file__).parents[2]))  # as pytest has it
from tests.unit.device_queue import QueueDevice


def layout_of(layers: int) -> KVLayout:
    return KVLayout(page_tokens=4, layers=layers, kv_heads=2, head_dim=32, dtype="float32", total_kv_heads=2)


class Node:
    """An agent, its pool and the outcomes of its jobs; the same in the test's process and in the child's."""

    def __init__(self, transport: str, pages: int, layers: int) -> None:
        self.layout = layout_of(layers)
        self.done: queue.Queue[tuple[int, str | None]] = queue.Queue()
        name, _, place = transport.partition("@")
        self.pool: Any
        if place == "device":
            device: Any = QueueDevice()
            self.pool = DeviceMemory(device, pages, self.layout.page_bytes, 64 << 10)
            self._array = device.view(self.pool.region.address, self.pool.region.bytes)
        else:
            device = None
            self.pool = HostPool.allocate(self.layout, pages, 64 << 10)
            self._array = self.pool.array
        self.count = pages

        def load(names: Sequence[str], context: Context) -> tuple[dict[str, Transport], dict[str, str]]:
            if device is None:
                return load_all(names, context)
            if name == "shm":
                return {name: ShmTransport(context, RingShape(4, 1 << 20, 1024), device, device.copier)}, {}
            return {name: TcpTransport(context, device, device.copier)}, {}

        self.agent = TransferAgent(
            self.pool.region,
            self.layout,
            TransferConfig(transport=name),  # type: ignore[arg-type]
            on_done=lambda job, error: self.done.put((job.xfer, error)),
            memory=self.pool if device is not None else None,
            load=load,
        )

    @property
    def pages(self) -> np.ndarray:
        """[pages, page_bytes]"""
        return self._array[: self.count * self.layout.page_bytes].reshape(self.count, -1)

    def exports(self) -> bytes:
        return msgspec.msgpack.encode(self.agent.exports())

    def admit(self, peer: str, exports: bytes) -> None:
        self.agent.admit(peer, [msgspec.msgpack.decode(exports, type=Exports)])

    def connect(self, peer: str, exports: bytes) -> list[str]:
        routes = self.agent.connect(peer, [msgspec.msgpack.decode(exports, type=Exports)])
        return [route.transport for route in routes]

    def fill(self, seed: int) -> None:
        self.pages[:] = np.random.default_rng(seed).integers(1, 256, self.pages.shape, dtype=np.uint8)

    def submit(self, peer: str, xfer: int, origin: list[int], to: list[int]) -> None:
        self.agent.submit(CopyJob(peer, xfer, origin, to))

    def outcomes(self, count: int) -> dict[int, str | None]:
        return dict(self.done.get(timeout=60) for _ in range(count))

    def read(self) -> np.ndarray:
        return self.pages.copy()

    def zero(self) -> None:
        self.pages[:] = 0

    def write_for_ever(self, peer: str) -> None:
        """Copies all pages to all pages, one job behind the other; until it is killed, or a copy fails."""
        order = list(range(self.count))
        for xfer in range(1 << 30):
            self.submit(peer, xfer, order, order[::-1])
            if xfer >= 4 and self.done.get()[1] is not None:
                return

    def source_gone(self, peer: str) -> tuple[bool, float]:
        started = time.perf_counter()
        return self.agent.source_gone(peer), time.perf_counter() - started

    def disconnect(self, peer: str) -> None:
        self.agent.disconnect(peer)

    def close(self) -> None:
        self.agent.close()
        self._array = np.empty(0, np.uint8)
        self.pool.close()


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    node = Node(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    while True:
        try:
            name, arguments = connection.recv()
        except EOFError:
            break
        answer: Any = None
        try:
            answer = (True, getattr(node, name)(*arguments))
        except SlipstreamError as error:
            answer = (False, error.message)
        connection.send(answer)
    node.close()


if __name__ == "__main__":
    main()
