"""Copies between the pools of two GPUs of one machine, each mapped into the other's address space.

The pool is one allocation of our own (`transfer.cuda.memory`). Its exporter hands the IPC handle through a door to
peers that are admitted; the importer maps and proves it (`transfer.cuda.mapping`), and measures what a copy costs on
this pair, once. A batch of runs is copied as `transfer.cuda.copier` says; an event behind it is its end; the mover
sleeps until that is due (`transfer.cuda.lookout`).

Whoever has the mover's turn calls `write` and `poll`: the mover, the engine's loop thread or the IO thread. Each makes
the GPU its thread's current one, waits for nothing that the GPU does, and makes nothing that has to be compiled; `open`
runs on a thread of its own, with a copier of its own.

When the exporter ends, its tickets run to their end in memory that our mapping keeps alive and are then reported as
failed; the mapping is closed after the last of them.
"""

from __future__ import annotations

import itertools
import logging
import select
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from slipstream.errors import ConfigError, MissingExtra, PeerLost, RouteUnavailable
from slipstream.transfer.cuda.copier import Copier, Copy
from slipstream.transfer.cuda.door import ProcessDoor
from slipstream.transfer.cuda.launcher import CopySettings
from slipstream.transfer.cuda.lookout import Due, Lookout
from slipstream.transfer.cuda.mapping import (
    CudaRemote,
    Handle,
    Mapper,
    learn_costs,
    own_seal,
    process_name,
    run_lengths,
)
from slipstream.transfer.cuda.runtime import CudaError, Device
from slipstream.transfer.transports.base import Completion, Context, Exports, Region, Runs
from slipstream.transfer.transports.door import Address, knock

logger = logging.getLogger(__name__)

SHORT_LISTS = 64  # batches under way whose lists need no allocation, which could make the engine's thread wait


@dataclass(slots=True)
class _Flight:
    """A ticket under way."""

    ticket: int
    copy: Copy
    remote: CudaRemote
    due: Due
    event: int | None  # that it waits for, as far as is known


class CudaIpcTransport:
    """CUDA IPC between processes of one machine, or peer access between two GPUs of one process.

    Beyond the five verbs it can `read`. Raises RouteUnavailable at once when this rank's memory is not on a GPU, when
    the packages are missing, or when the GPU is a MIG slice.
    """

    name: ClassVar[str] = "cuda_ipc"
    open_blocks: ClassVar[bool] = True
    inline_bytes: ClassVar[int] = 1 << 62  # a copy of any size is only queued

    def __init__(self, context: Context, device: Device | None = None, copiers: Any = Copier) -> None:
        region = context.region
        if region.kind != "cuda":
            raise RouteUnavailable("cuda_ipc moves memory of GPUs; the KV pool of this rank is on the CPU")
        self._device = device or _device(region)
        if self._device.is_mig:
            raise RouteUnavailable(
                f"the GPU {region.device} is divided (MIG), and its slices cannot map each other's memory"
            )
        self._agent = context.agent
        self._region = region
        self._settings = CopySettings(
            programs=context.config.cuda_programs,
            engine_preference=context.config.cuda_engine_preference,
            short_lists=SHORT_LISTS,
        )
        self._copiers = copiers
        self._device.use()
        self._seal = own_seal(self._device, region)
        self._tickets = itertools.count(1)
        self._flights: dict[int, _Flight] = {}
        self._lanes: dict[int, deque[_Flight]] = {}  # stream -> what is under way there, in order
        self._done: list[Completion] = []
        self._remotes: dict[int, CudaRemote] = {}
        try:
            handle = self._device.export_handle(region.address)
        except CudaError as error:
            raise RouteUnavailable(f"the pool cannot be exported: {error}") from error
        process = process_name()
        self._mapper = Mapper(self._device, process)
        self._handle = Handle(handle, region.address, region.device, process, self._seal)
        self._copier: Copier = copiers(self._device, self._settings)
        try:
            self._copier.prepare(region.address, run_lengths(region.page_bytes))  # no copy waits for a compiler
            self._copier.rehearse(region.address + self._seal.scratch_offset, self._seal.scratch_bytes)
        except MissingExtra as error:
            self._copier.close()
            raise RouteUnavailable(error.message) from error
        self._lookout = Lookout()
        self._epoll = select.epoll()
        self._epoll.register(self._lookout.alarm, select.EPOLLIN)
        self._epoll.register(self._lookout.bell, select.EPOLLIN)
        self._door = ProcessDoor(msgspec.msgpack.encode(self._handle), [])

    # ------------------------------------------------------------------------------------------------ as exporter

    def export(self) -> bytes:
        return msgspec.msgpack.encode(self._door.address)

    def admit(self, agent: str) -> None:
        self._door.admit(agent)

    def cut_off(self, agent: str) -> Future[None]:
        return self._door.cut_off(agent)

    def fileno(self) -> int:
        return self._epoll.fileno()

    # ------------------------------------------------------------------------------------------------ as importer

    def open(self, exports: Exports, detail: bytes) -> CudaRemote:
        if exports.kind != "cuda":
            raise RouteUnavailable(f"cuda_ipc moves memory of GPUs; the peer's KV pool is of kind {exports.kind!r}")
        connection, payload, _ = knock(msgspec.msgpack.decode(detail, type=Address), self._agent)
        try:
            remote = self._mapper.map(connection, msgspec.msgpack.decode(payload, type=Handle), exports)
        except BaseException:
            connection.close()
            raise
        try:
            learn_costs(remote, self._region, self._seal, lambda: self._copiers(self._device, self._settings))
        except BaseException:
            self._mapper.unmap(remote)
            raise
        self._remotes[connection.fileno()] = remote
        self._epoll.register(connection, select.EPOLLIN | select.EPOLLRDHUP)
        return remote

    def write(self, remote: CudaRemote, runs: Runs, after: Any = None) -> int:
        """`after`: a torch.cuda.Event, or the handle of an event as an integer. When that has happened somebody should
        say so (`ripe`), or the end of the copy is noticed late."""
        return self._start(remote, runs, after, push=True)

    def read(self, remote: CudaRemote, runs: Runs, after: Any = None) -> int:
        """Like `write` in the other direction: `runs.source` counts in the peer's region, `runs.destination` here."""
        return self._start(remote, runs, after, push=False)

    def _start(self, remote: CudaRemote, runs: Runs, after: Any, push: bool) -> int:
        if remote.ended:
            raise PeerLost(remote.ended)
        ticket = next(self._tickets)
        if len(runs.length) == 0:
            self._done.append(Completion(ticket))
            self._lookout.bell.ring()
            return ticket
        mine, theirs = (self._region.address, self._region.bytes), (remote.address, remote.bytes)
        (source_at, source_bytes), (to, to_bytes) = (mine, theirs) if push else (theirs, mine)
        began = time.perf_counter()
        costs = remote.costs if push else remote.read_costs
        event = event_handle(after)
        if event is not None:
            self._device.use()
            event = None if self._device.is_done(event) else event
        copy = self._copier.copy(source_at, source_bytes, to, to_bytes, runs, costs, event)
        remote.in_flight += 1
        due = (self._lookout.started if event is None else self._lookout.waiting)(began, copy.expected)
        flight = self._flights[ticket] = _Flight(ticket, copy, remote, due, event)
        self._lanes.setdefault(copy.lane.stream, deque()).append(flight)
        self._lookout.look_again()
        return ticket

    def ripe(self, after: Any) -> None:
        """An event that writes may wait for has happened. For whoever may call `write`."""
        event = event_handle(after)
        for flight in self._flights.values():
            if flight.event == event:
                flight.event = None
                self._lookout.ripe(flight.due)
        self._lookout.look_again()

    def poll(self) -> list[Completion]:
        ready = [fd for fd, _ in self._epoll.poll(0)]
        self._lookout.woken(ready)
        for fd in ready:
            remote = self._remotes.get(fd)
            if remote is not None:
                self._end(remote, "the peer's process has ended or has withdrawn its memory")
        done, self._done = self._done, []
        if self._flights:
            self._device.use()
            done += self._landed()
        self._lookout.look_again()
        return done

    def _landed(self) -> list[Completion]:
        landed = []
        for lane in self._lanes.values():
            while lane:
                flight = lane[0]
                error = flight.remote.ended or None
                try:
                    if not self._copier.is_done(flight.copy):
                        self._lookout.under_way()
                        break  # those behind it are under way too
                except CudaError as failure:
                    error = failure.message
                lane.popleft()
                del self._flights[flight.ticket]
                self._lookout.done(flight.due)
                flight.remote.in_flight -= 1
                if flight.remote.ended and flight.remote.in_flight == 0:
                    self._mapper.unmap(flight.remote)
                landed.append(Completion(flight.ticket, error))
        return landed

    # ------------------------------------------------------------------------------------------------ ends

    def close(self, remote: CudaRemote) -> None:
        self._end(remote, "the route was closed")

    def _end(self, remote: CudaRemote, reason: str) -> None:
        if remote.ended:
            return
        remote.ended = reason
        del self._remotes[remote.connection.fileno()]
        self._epoll.unregister(remote.connection)
        if remote.in_flight == 0:
            self._mapper.unmap(remote)

    def shutdown(self) -> None:
        self._device.use()
        for remote in list(self._remotes.values()):
            self.close(remote)
        for flight in self._flights.values():
            try:
                self._copier.wait(flight.copy)
            except CudaError as error:
                logger.warning("a copy failed while the transport was shut down: %s", error)
            flight.remote.in_flight -= 1
            if flight.remote.in_flight == 0:
                self._mapper.unmap(flight.remote)
        self._flights.clear()
        self._lanes.clear()
        self._door.close()
        self._copier.close()
        self._epoll.close()
        self._lookout.close()


def _device(region: Region) -> Device:
    try:
        return Device(region.device)
    except (MissingExtra, ConfigError) as error:
        raise RouteUnavailable(error.message) from error


def event_handle(after: Any) -> int | None:
    """The CUDA handle of what a copy has to wait for. Raises ValueError for what is no event or was never recorded."""
    if after is None:
        return None
    handle = getattr(after, "cuda_event", after)
    if not isinstance(handle, int) or handle == 0:
        raise ValueError(f"after must be a recorded torch.cuda.Event or the integer handle of an event, not {after!r}")
    return handle


def create(context: Context) -> CudaIpcTransport:
    return CudaIpcTransport(context)
