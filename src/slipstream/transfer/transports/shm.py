"""Writes straight into the peer's pool, mapped into this process.

A CPU pool is a memfd. Its exporter hands the descriptor through a door (`door.py`); the importer maps it and copies
page runs with memmove: one copy, no system call for data, no buffer between. The importer watches the connection to
the door too: when the exporter ends, or withdraws the memory, all tickets of that peer fail at once, the mapping is
closed, then the connection, which is the exporter's proof. The memory itself lives as long as any mapping of it, so a
peer that is killed in the middle of a copy cannot make the survivor fault.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
from concurrent.futures import Future
from typing import Any, ClassVar

import msgspec
import numpy as np

from slipstream.errors import PeerLost, RouteUnavailable
from slipstream.transfer.copies import check_bounds
from slipstream.transfer.transports.base import Completion, Context, Exports, Runs
from slipstream.transfer.transports.bell import Bell
from slipstream.transfer.transports.door import Address, Door, knock
from slipstream.transfer.transports.memory import CopyQueue, host_array


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


class ShmTransport:
    """Shared memory between processes of one machine."""

    name: ClassVar[str] = "shm"
    open_blocks: ClassVar[bool] = True

    def __init__(self, context: Context) -> None:
        region = context.region
        array = host_array(region, "shm")
        if region.fd is None:
            raise RouteUnavailable("the pool is not backed by a file that a peer could map")
        self._agent = context.agent
        self._bytes = region.bytes
        self._bell = Bell()
        self._queue = CopyQueue(int(array.ctypes.data), self._bell)
        self._epoll = select.epoll()
        self._epoll.register(self._bell, select.EPOLLIN)
        self._remotes: dict[int, ShmRemote] = {}
        self._door = Door(b"", [region.fd])

    def export(self) -> bytes:
        return msgspec.msgpack.encode(self._door.address)

    def admit(self, agent: str) -> None:
        self._door.admit(agent)

    def cut_off(self, agent: str) -> Future[None]:
        return self._door.cut_off(agent)

    def fileno(self) -> int:
        return self._epoll.fileno()

    def open(self, exports: Exports, detail: bytes) -> ShmRemote:
        connection, _, fds = knock(msgspec.msgpack.decode(detail, type=Address), self._agent)
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

    def write(self, remote: ShmRemote, runs: Runs, after: Any = None) -> int:
        if after is not None:
            raise ValueError("shm copies memory of the CPU, which no device event stands before")
        if remote.ended:
            raise PeerLost(remote.ended)
        check_bounds(runs, self._bytes, remote.bytes)
        return self._queue.add(remote, remote.address, runs)

    def poll(self) -> list[Completion]:
        self._bell.hush()
        for fd, _ in self._epoll.poll(0):
            remote = self._remotes.get(fd)
            if remote is not None:
                self._end(remote, "the peer's process has ended or has withdrawn its memory")
        return self._queue.advance()

    def close(self, remote: ShmRemote) -> None:
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
