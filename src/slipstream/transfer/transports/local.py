"""Copies between two pools of one process.

Agents of a process that may reach each other share a Neighbourhood, which their maker passes to each of them; there is
no process-wide list. Opening a neighbour's memory is looking it up; a copy is a memmove.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import PeerLost, RouteUnavailable
from slipstream.transfer.copies import check_bounds
from slipstream.transfer.transports.base import Completion, Context, Exports, Runs
from slipstream.transfer.transports.bell import Bell
from slipstream.transfer.transports.memory import CopyQueue, host_array


class LocalRemote:
    """A neighbour's pool, opened by `importer`. `revoked` asks the importer to close it."""

    def __init__(self, importer: LocalTransport, exporter: str, array: NDArray[np.uint8]) -> None:
        self.bytes = len(array)
        self.importer, self.exporter, self.array = importer, exporter, array
        self.address = int(array.ctypes.data)
        self.revoked = False
        self.ended = ""


class Neighbourhood:
    """The pools of this process that may reach each other, by agent name. Methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._pools: dict[str, NDArray[np.uint8]] = {}
        self._admitted: dict[str, set[str]] = {}
        self._open: set[LocalRemote] = set()
        self._leaving: dict[tuple[str, str], list[Future[None]]] = {}

    def join(self, agent: str, pool: NDArray[np.uint8]) -> None:
        with self._lock:
            self._pools[agent] = pool
            self._admitted[agent] = set()

    def leave(self, agent: str) -> None:
        """Takes the pool away; returns when the neighbours that have it open have closed it, as they are asked to."""
        with self._lock:
            self._pools.pop(agent, None)
            self._admitted.pop(agent, None)
            self._revoke([remote for remote in self._open if remote.exporter == agent])
            self._lock.wait_for(lambda: all(remote.exporter != agent for remote in self._open))

    def admit(self, exporter: str, importer: str) -> None:
        with self._lock:
            self._admitted[exporter].add(importer)

    def open(self, importer: LocalTransport, exporter: str) -> LocalRemote:
        with self._lock:
            pool = self._pools.get(exporter)
            if pool is None:
                raise RouteUnavailable("the peer is not among the neighbours of this agent")
            if importer.agent not in self._admitted[exporter]:
                raise RouteUnavailable(f"the peer refused: agent {importer.agent!r} is not admitted")
            remote = LocalRemote(importer, exporter, pool)
            self._open.add(remote)
            return remote

    def cut_off(self, exporter: str, importer: str) -> Future[None]:
        future: Future[None] = Future()
        with self._lock:
            self._admitted.get(exporter, set()).discard(importer)
            remotes = [r for r in self._open if r.exporter == exporter and r.importer.agent == importer]
            if remotes:
                self._leaving.setdefault((exporter, importer), []).append(future)
                self._revoke(remotes)
            else:
                future.set_result(None)
        return future

    def closed(self, remote: LocalRemote) -> None:
        with self._lock:
            self._open.discard(remote)
            pair = (remote.exporter, remote.importer.agent)
            left = any((other.exporter, other.importer.agent) == pair for other in self._open)
            done = [] if left else self._leaving.pop(pair, [])
            self._lock.notify_all()
        for future in done:
            future.set_result(None)

    def _revoke(self, remotes: list[LocalRemote]) -> None:
        for remote in remotes:
            remote.revoked = True
            remote.importer.wake()


class LocalTransport:
    """One agent's part of a Neighbourhood."""

    name: ClassVar[str] = "local"
    open_blocks: ClassVar[bool] = False
    inline_bytes: ClassVar[int] = 1 << 20
    copies_in_poll: ClassVar[bool] = True

    def __init__(self, context: Context) -> None:
        if context.neighbours is None:
            raise RouteUnavailable("no Neighbourhood of agents in this process was given")
        array = host_array(context.region, "local")
        self.agent = context.agent
        self._neighbours = context.neighbours
        self._bytes = context.region.bytes
        self._bell = Bell()
        self._queue = CopyQueue(int(array.ctypes.data), self._bell)
        self._remotes: set[LocalRemote] = set()
        self._neighbours.join(self.agent, array)

    def export(self) -> bytes:
        return self.agent.encode()

    def admit(self, agent: str) -> None:
        self._neighbours.admit(self.agent, agent)

    def cut_off(self, agent: str) -> Future[None]:
        return self._neighbours.cut_off(self.agent, agent)

    def wake(self) -> None:
        self._bell.ring()

    def fileno(self) -> int:
        return self._bell.fileno()

    def open(self, exports: Exports, detail: bytes) -> LocalRemote:
        remote = self._neighbours.open(self, detail.decode())
        self._remotes.add(remote)
        return remote

    def write(self, remote: LocalRemote, runs: Runs, after: Any = None) -> int:
        if after is not None:
            raise ValueError("local copies memory of the CPU, which no device event stands before")
        if remote.ended:
            raise PeerLost(remote.ended)
        check_bounds(runs, self._bytes, remote.bytes)
        return self._queue.add(remote, remote.address, runs)

    def poll(self) -> list[Completion]:
        self._bell.hush()
        for remote in [remote for remote in self._remotes if remote.revoked]:
            self._end(remote, "the peer has withdrawn its memory")
        return self._queue.advance()

    def close(self, remote: LocalRemote) -> None:
        self._end(remote, "the route was closed")

    def _end(self, remote: LocalRemote, reason: str) -> None:
        if not remote.ended:
            remote.ended = reason
            self._queue.fail(remote, reason)
            self._remotes.discard(remote)
            self._neighbours.closed(remote)

    def shutdown(self) -> None:
        for remote in list(self._remotes):
            self.close(remote)
        self._neighbours.leave(self.agent)
        self._bell.close()


def create(context: Context) -> LocalTransport:
    return LocalTransport(context)
