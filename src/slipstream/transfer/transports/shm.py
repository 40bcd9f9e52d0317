"""Moves pages between processes of one machine through memory that both have mapped.

Between two pools of the CPU: a pool is a memfd. Its exporter hands the descriptor through a door (`door.py`); the
importer maps it and copies page runs with memmove: one copy, no system call for data, no buffer between. The importer
watches the connection to the door too: when the exporter ends, or withdraws the memory, all tickets of that peer fail
at once, the mapping is closed, then the connection, which is the exporter's proof. The memory itself lives as long as
any mapping of it, so a peer that is killed in the middle of a copy cannot make the survivor fault.

Where either pool is a GPU's, there is nothing to map, and the pages go through a ring of pinned slots (`shm_ring.py`),
which the same door hands out for another token.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import mmap
import os
import secrets
import select
import socket
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, ClassVar

import msgspec
import numpy as np

from slipstream.errors import PeerLost, RouteUnavailable
from slipstream.transfer.copies import check_bounds
from slipstream.transfer.cuda.copier import Copier
from slipstream.transfer.cuda.runtime import Device
from slipstream.transfer.staging import StagingMaker
from slipstream.transfer.transports.base import Completion, Context, Exports, Runs
from slipstream.transfer.transports.bell import Bell
from slipstream.transfer.transports.cuda_ipc import event_handle
from slipstream.transfer.transports.door import Address, Door, knock
from slipstream.transfer.transports.memory import CopyQueue
from slipstream.transfer.transports.shm_ring import RingInlet, RingOutlet, RingShape


class ShmAddress(Address, frozen=True):
    """Where to knock: with `token` for the pool itself, with `ring_token` for a ring of this shape."""

    ring_token: bytes
    ring: RingShape


class ShmRemote:
    """A peer's pool in our address space."""

    def __init__(self, connection: socket.socket, mapping: mmap.mmap) -> None:
        self.bytes = len(mapping)
        self.connection = connection
        self.ended = ""  # why, once it is
        self._mapping = mapping
        view = np.frombuffer(mapping, np.uint8)
        self.address = int(view.ctypes.data)

    def unmap(self) -> None:
        """First the mapping, then the connection: its end says that the mapping is gone."""
        self._mapping.close()
        self.connection.close()


class ShmDoor(Door):
    """Hands out the pool, where it is of the CPU, and makes a ring for each agent that asks for one."""

    def __init__(self, fds: Sequence[int], maker: StagingMaker, shape: RingShape) -> None:
        self.ring_token = secrets.token_bytes(16)
        self._maker, self._shape = maker, shape
        self._inlets: list[RingInlet] = []
        self._new: RingInlet | None = None
        super().__init__(b"", fds)

    def _opens(self, token: bytes) -> bool:
        return hmac.compare_digest(token, self.ring_token) or (bool(self._fds) and super()._opens(token))

    def _goods(self, token: bytes, agent: str) -> Sequence[int]:
        if not hmac.compare_digest(token, self.ring_token):
            return super()._goods(token, agent)
        self._new = RingInlet(agent, self._maker, self._shape)
        with self._lock:
            self._inlets = [inlet for inlet in self._inlets if not inlet.ended.done()] + [self._new]
        return [self._new.fd, self._new.theirs.fileno()]

    def _answer(self, fd: int, connection: socket.socket, message: bytes) -> bool:
        try:
            return super()._answer(fd, connection, message)
        finally:
            inlet, self._new = self._new, None
            if inlet is not None:
                inlet.handed_over()

    def cut_off(self, agent: str) -> Future[None]:
        """Done when no connection of the agent is open, and then, when none of its rings is: a knock that is being
        answered still makes a ring, which is known when its connection has ended."""
        done: Future[None] = Future()
        self._end_rings(agent)
        super().cut_off(agent).add_done_callback(lambda door: self._door_left(door, agent, done))
        return done

    def _door_left(self, door: Future[None], agent: str, done: Future[None]) -> None:
        if door.cancelled():
            done.cancel()
            return
        left = self._end_rings(agent)
        remaining = itertools.count(len(left) - 1, -1)

        def ended(_: Future[None]) -> None:
            if next(remaining) == 0:
                done.set_result(None)

        for inlet in left:
            inlet.ended.add_done_callback(ended)
        if not left:
            done.set_result(None)

    def _end_rings(self, agent: str) -> list[RingInlet]:
        with self._lock:
            rings = [inlet for inlet in self._inlets if inlet.agent == agent]
        for inlet in rings:
            inlet.end()
        return rings

    def close(self) -> None:
        super().close()
        for inlet in self._inlets:
            inlet.end()
            inlet.join()


class ShmTransport:
    """Shared memory between processes of one machine. Raises RouteUnavailable when this rank's pool can be neither
    mapped by others nor staged."""

    name: ClassVar[str] = "shm"
    open_blocks: ClassVar[bool] = True
    inline_bytes: ClassVar[int] = 1 << 20
    copies_in_poll: ClassVar[bool] = True

    def __init__(
        self,
        context: Context,
        shape: RingShape = RingShape(),
        device: Device | None = None,
        copiers: Any = Copier,
    ) -> None:
        region = context.region
        if region.kind == "cpu" and (region.fd is None or region.array is None):
            raise RouteUnavailable("the pool is not backed by a file that a peer could map")
        self._agent = context.agent
        self._region = region
        self._maker = StagingMaker(region, device, copiers)
        self._shape = shape
        self._bell = Bell()
        self._queue = CopyQueue(region.address, self._bell)
        self._epoll = select.epoll()
        self._epoll.register(self._bell, select.EPOLLIN)
        self._remotes: dict[int, ShmRemote] = {}
        self._outlets: list[RingOutlet] = []
        self._ring_tickets = itertools.count(-1, -1)  # those of the queue count upwards
        self._lock = threading.Lock()
        self._finished: deque[Completion] = deque()
        self._door = ShmDoor([region.fd] if region.fd is not None else [], self._maker, shape)

    def export(self) -> bytes:
        address = self._door.address
        return msgspec.msgpack.encode(ShmAddress(address.name, address.token, self._door.ring_token, self._shape))

    def admit(self, agent: str) -> None:
        self._door.admit(agent)

    def cut_off(self, agent: str) -> Future[None]:
        return self._door.cut_off(agent)

    def fileno(self) -> int:
        return self._epoll.fileno()

    def open(self, exports: Exports, detail: bytes) -> ShmRemote | RingOutlet:
        address = msgspec.msgpack.decode(detail, type=ShmAddress)
        if (self._region.kind, exports.kind) == ("cpu", "cpu"):
            return self._open_pool(address, exports)
        return self._open_ring(address, exports)

    def _open_pool(self, address: ShmAddress, exports: Exports) -> ShmRemote:
        connection, _, fds = knock(address, self._agent)
        try:
            mapping = _map(fds, exports.bytes)
        except BaseException:
            connection.close()
            raise
        finally:
            for fd in fds:
                os.close(fd)
        remote = ShmRemote(connection, mapping)
        self._remotes[connection.fileno()] = remote
        self._epoll.register(connection, select.EPOLLIN | select.EPOLLRDHUP)
        return remote

    def _open_ring(self, address: ShmAddress, exports: Exports) -> RingOutlet:
        connection, _, fds = knock(Address(address.name, address.ring_token), self._agent)
        connection.close()
        outlet = RingOutlet(fds, self._maker, address.ring, exports.bytes, self._ring_finished)
        with self._lock:
            self._outlets.append(outlet)
        return outlet

    def _ring_finished(self, completion: Completion) -> None:
        self._finished.append(completion)
        self._bell.ring()

    def write(self, remote: ShmRemote | RingOutlet, runs: Runs, after: Any = None) -> int:
        """`after`, where this rank's pool is a GPU's: a torch.cuda.Event, or the handle of an event."""
        if after is not None and self._region.kind == "cpu":
            raise ValueError("shm copies memory of the CPU, which no device event stands before")
        if remote.ended:
            raise PeerLost(remote.ended)
        if isinstance(remote, RingOutlet):
            ticket = next(self._ring_tickets)
            remote.write(ticket, runs, after, event_handle(after))
            return ticket
        check_bounds(runs, self._region.bytes, remote.bytes)
        return self._queue.add(remote, remote.address, runs)

    def poll(self) -> list[Completion]:
        self._bell.hush()
        for fd, _ in self._epoll.poll(0):
            remote = self._remotes.get(fd)
            if remote is not None:
                self._end(remote, "the peer's process has ended or has withdrawn its memory")
        done = self._queue.advance()
        while self._finished:
            done.append(self._finished.popleft())
        return done

    def close(self, remote: ShmRemote | RingOutlet) -> None:
        if isinstance(remote, RingOutlet):
            remote.stop("the route was closed")
            with self._lock:
                self._outlets = [outlet for outlet in self._outlets if not outlet.over]
        else:
            self._end(remote, "the route was closed")

    def _end(self, remote: ShmRemote, reason: str) -> None:
        if remote.ended:
            return
        remote.ended = reason
        self._queue.fail(remote, reason)
        del self._remotes[remote.connection.fileno()]
        self._epoll.unregister(remote.connection)
        remote.unmap()

    def shutdown(self) -> None:
        for remote in list(self._remotes.values()):
            self.close(remote)
        for outlet in self._outlets:
            outlet.stop("the route was closed")
        for outlet in self._outlets:
            outlet.join()
        self._door.close()
        self._epoll.close()
        self._bell.close()


def _map(fds: list[int], size: int) -> mmap.mmap:
    if len(fds) != 1:
        raise RouteUnavailable(f"the peer sent {len(fds)} descriptors instead of one")
    have = os.fstat(fds[0]).st_size
    if have < size:
        raise RouteUnavailable(f"the peer's memory has {have} bytes, it announced {size}")
    with contextlib.suppress(ValueError):
        return mmap.mmap(fds[0], size)
    raise RouteUnavailable(f"the peer announced {size} bytes, which cannot be mapped")


def create(context: Context) -> ShmTransport:
    return ShmTransport(context)
