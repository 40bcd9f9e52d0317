"""Copies between the pools of two GPUs of one machine, each mapped into the other's address space.

The pool is one allocation of our own (`transfer.cuda.memory`). Its exporter hands the IPC handle through a door to
peers that are admitted; the importer opens it with its own GPU current, so that the copy engine and any kernel of that
GPU may read and write the mapping, and checks extent, generation and sizes before anything else. Then it measures what
a copy costs on this pair, once. A batch of runs is copied as `transfer.cuda.copier` says; an event behind it is its
end; the mover sleeps until that is due.

Why IPC handles and not descriptors of virtual memory: a handle is 64 bytes, opens without rights over the other process
and also when the exporter's GPU is not visible to the importer, and the memory under it stays until the importer closes
it, even when the exporter is killed. What handles cannot do, export memory of a framework's pool or reach another
machine, is not wanted here.

When the exporter ends, its tickets run to their end in memory that our mapping keeps alive and are then reported as
failed; the mapping is closed after the last of them.
"""

from __future__ import annotations

import itertools
import logging
import os
import select
import socket
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from slipstream.errors import ConfigError, MissingExtra, PeerLost, RouteUnavailable
from slipstream.transfer.cuda.alarm import Alarm
from slipstream.transfer.cuda.copier import Copier, Copy
from slipstream.transfer.cuda.door import ProcessDoor
from slipstream.transfer.cuda.launcher import CopySettings
from slipstream.transfer.cuda.memory import Seal, read_seal, seal_offset
from slipstream.transfer.cuda.plan import CopyCosts
from slipstream.transfer.cuda.runtime import CudaError, Device
from slipstream.transfer.transports.base import Completion, Context, Exports, Region, Runs
from slipstream.transfer.transports.bell import Bell
from slipstream.transfer.transports.door import Address, knock

logger = logging.getLogger(__name__)

_AWAKE_S = 60e-6  # around the moment when a copy is due the mover looks again at once: falling asleep costs as much
_SOONEST_S = 20e-6  # later, between two looks
_LATEST_S = 1e-3
_DROWSY_S = 300e-6  # most that is allowed for waking up late
_HOPE = 0.97  # of the expected time: looking a little early shows when a copy ends, and so when the next ones will
_FRESH_S = 200e-6  # a copy that was seen under way so long ago at most has ended now


class Handle(msgspec.Struct, frozen=True):
    """What the door hands out. `process` tells an importer in the exporter's own process to use `address` as it is."""

    handle: bytes
    address: int
    device: str
    process: str
    seal: Seal


class CudaRemote:
    """A peer's pool in our address space. `costs` are those of writing to it, `read_costs` of reading."""

    def __init__(self, connection: socket.socket, address: int, seal: Seal, mapped: bool) -> None:
        self.bytes = seal.region_bytes
        self.connection = connection
        self.address = address
        self.seal = seal
        self.mapped = mapped
        self.ended = ""  # why, once it is
        self.in_flight = 0
        self.costs: CopyCosts
        self.read_costs: CopyCosts


@dataclass(slots=True)
class _Flight:
    """A ticket under way. `due` is when it should end, the others before it considered."""

    copy: Copy
    remote: CudaRemote
    due: float


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
            programs=context.config.cuda_programs, engine_preference=context.config.cuda_engine_preference
        )
        self._copiers = copiers
        self._device.use()
        self._seal = _own_seal(self._device, region)
        self._tickets = itertools.count(1)
        self._flights: dict[int, _Flight] = {}
        self._done: list[Completion] = []
        self._lane_due = 0.0  # when the last copy under way should end
        self._looked = 0.0  # when one was last seen to be under way
        self._remotes: dict[int, CudaRemote] = {}
        try:
            handle = self._device.export_handle(region.address)
        except CudaError as error:
            raise RouteUnavailable(f"the pool cannot be exported: {error}") from error
        self._handle = Handle(handle, region.address, region.device, process_name(), self._seal)
        self._copier: Copier = copiers(self._device, self._settings)
        try:
            self._copier.prepare(region.address, _lengths(region.page_bytes))  # no copy waits for a compiler
        except MissingExtra as error:
            self._copier.close()
            raise RouteUnavailable(error.message) from error
        self._alarm, self._bell = Alarm(), Bell()
        self._set_for = 0.0  # when the alarm is due, by perf_counter; 0 when it is not set
        self._drowsy = 0.0  # how late this machine wakes a thread that has slept, as seen lately
        self._epoll = select.epoll()
        self._epoll.register(self._alarm, select.EPOLLIN)
        self._epoll.register(self._bell, select.EPOLLIN)
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
            remote = self._map(connection, msgspec.msgpack.decode(payload, type=Handle), exports)
        except BaseException:
            connection.close()
            raise
        try:
            self._learn(remote)
        except BaseException:
            self._unmap(remote)
            raise
        self._remotes[connection.fileno()] = remote
        self._epoll.register(connection, select.EPOLLIN | select.EPOLLRDHUP)
        return remote

    def _map(self, connection: socket.socket, handle: Handle, exports: Exports) -> CudaRemote:
        self._device.use()
        seal = handle.seal
        if (seal.region_bytes, seal.page_bytes) != (exports.bytes, exports.page_bytes):
            raise RouteUnavailable(
                f"the peer announced {exports.bytes} bytes in pages of {exports.page_bytes}, its pool has "
                f"{seal.region_bytes} in pages of {seal.page_bytes}"
            )
        if handle.process == process_name():
            reason = self._device.reach_peer(handle.device)
            if reason:
                raise RouteUnavailable(reason)
            return CudaRemote(connection, handle.address, seal, mapped=False)
        try:
            address = self._device.open_handle(handle.handle)
        except CudaError as error:
            raise RouteUnavailable(self._why_not_opened(handle.device, error)) from error
        remote = CudaRemote(connection, address, seal, mapped=True)
        try:
            self._check(remote)
        except BaseException:
            self._device.close_handle(address)
            raise
        return remote

    def _check(self, remote: CudaRemote) -> None:
        """That what is mapped is the pool that the peer meant."""
        start, size = self._device.extent(remote.address)
        needed = remote.seal.scratch_offset + remote.seal.scratch_bytes
        if start != remote.address or size < needed:
            raise RouteUnavailable(
                f"the mapping is {size} bytes from {start:#x}, the pool should be {needed} from {remote.address:#x}"
            )
        try:
            found = read_seal(self._device, remote.address, remote.bytes)
        except ValueError as error:
            raise RouteUnavailable(f"what was mapped is not the peer's pool: {error}") from error
        if found != remote.seal:
            raise RouteUnavailable(
                f"what was mapped is another pool: generation {found.generation.hex()} and {found.region_bytes} bytes, "
                f"announced were {remote.seal.generation.hex()} and {remote.seal.region_bytes}"
            )

    def _why_not_opened(self, device: str, error: CudaError) -> str:
        try:
            peer = self._device.reach_peer(device)
        except CudaError as other:
            peer = other.message
        reason = f"the memory of {device} cannot be mapped by {self._device.uuid}: {error}"
        return f"{reason}; {peer}" if peer else f"{reason}; the processes may have separate IPC namespaces"

    def _learn(self, remote: CudaRemote) -> None:
        """Compiles the kernels for this pool's pages and measures copies both ways, into the scratch areas."""
        copier: Copier = self._copiers(self._device, self._settings)
        try:
            copier.prepare(remote.address, _lengths(remote.seal.page_bytes))
            mine, theirs = (self._region.address, self._seal), (remote.address, remote.seal)
            for name, (source_at, source), (to, target) in (
                ("costs", mine, theirs),
                ("read_costs", theirs, mine),
            ):
                scratch = to + target.scratch_offset, target.scratch_bytes
                costs = copier.measure(source_at, source.region_bytes, *scratch, time.perf_counter)
                setattr(remote, name, costs)
        except CudaError as error:
            raise RouteUnavailable(f"copies to the peer's memory fail: {error}") from error
        except MissingExtra as error:
            raise RouteUnavailable(error.message) from error
        finally:
            copier.close()
        logger.info(
            "cuda_ipc %s to %s: %.0f GB/s by kernel, %.0f by copy engine and %.2f us a run, crossover at %.0f KiB",
            self._device.uuid,
            "the same process" if not remote.mapped else "a peer",
            1e-9 / remote.costs.kernel_byte,
            1e-9 / remote.costs.engine_byte,
            1e6 * remote.costs.engine_run,
            remote.costs.crossover(self._settings.engine_preference) / 1024,
        )

    def write(self, remote: CudaRemote, runs: Runs, after: Any = None) -> int:
        """`after`: a torch.cuda.Event, or the handle of an event as an integer."""
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
            self._bell.ring()
            return ticket
        mine, theirs = (self._region.address, self._region.bytes), (remote.address, remote.bytes)
        (source_at, source_bytes), (to, to_bytes) = (mine, theirs) if push else (theirs, mine)
        began = time.perf_counter()
        seen = self._copier.survey(runs, source_bytes, to_bytes)
        costs = remote.costs if push else remote.read_costs
        copy = self._copier.start(source_at, to, runs, seen, costs, event_handle(after))
        self._lane_due = max(self._lane_due, began) + _HOPE * copy.expected
        remote.in_flight += 1
        self._flights[ticket] = _Flight(copy, remote, self._lane_due)
        self._set_alarm(time.perf_counter())
        return ticket

    def poll(self) -> list[Completion]:
        self._wake_up()
        for fd, _ in self._epoll.poll(0):
            remote = self._remotes.get(fd)
            if remote is not None:
                self._end(remote, "the peer's process has ended or has withdrawn its memory")
        done, self._done = self._done, []
        if self._flights:
            self._device.use()
            done += self._landed()
        self._set_alarm(time.perf_counter())
        return done

    def _landed(self) -> list[Completion]:
        landed = []
        waiting: set[int] = set()  # lanes whose first copy is still under way: those behind it are too
        for ticket, flight in list(self._flights.items()):
            if id(flight.copy.lane) in waiting:
                continue
            error = flight.remote.ended or None
            try:
                if not self._copier.is_done(flight.copy):
                    waiting.add(id(flight.copy.lane))
                    self._looked = time.perf_counter()
                    continue
            except CudaError as failure:
                error = failure.message
            del self._flights[ticket]
            self._learn_end(flight)
            flight.remote.in_flight -= 1
            if flight.remote.ended and flight.remote.in_flight == 0:
                self._unmap(flight.remote)
            landed.append(Completion(ticket, error))
        return landed

    def _learn_end(self, flight: _Flight) -> None:
        """Moves what is expected of those behind by as much as this one ended early or late, where that is known."""
        now = time.perf_counter()
        shift = now - flight.due
        if shift > 0 and now - self._looked > _FRESH_S:
            return
        for other in self._flights.values():
            other.due += shift
        self._lane_due += shift

    def _wake_up(self) -> None:
        """Silences what has woken the mover, and learns how late a sleeping one is woken."""
        self._bell.hush()
        if self._set_for:
            self._alarm.hush()
            late = time.perf_counter() - self._set_for
            if late >= 0:
                self._drowsy += (min(late, _DROWSY_S) - self._drowsy) / 4
            self._set_for = 0.0

    def _set_alarm(self, now: float) -> None:
        """Sets the next look: when the first copy is due, then at intervals that grow with its lateness."""
        if self._done:
            self._bell.ring()
        elif self._flights:
            late = now - next(iter(self._flights.values())).due
            sleep = -late - _AWAKE_S / 2 - self._drowsy
            if late > _AWAKE_S:
                sleep = min(max(late / 4, _SOONEST_S), _LATEST_S)
            if sleep < _SOONEST_S:
                self._bell.ring()
            else:
                self._alarm.set(sleep)
                self._set_for = now + sleep
        else:
            self._lane_due = 0.0

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
            self._unmap(remote)

    def _unmap(self, remote: CudaRemote) -> None:
        """First the mapping, then the connection: its end says that nothing of ours is under way."""
        if remote.mapped:
            try:
                self._device.use()
                self._device.close_handle(remote.address)
            except CudaError as error:
                logger.warning("cannot unmap a peer's pool: %s", error)
        remote.connection.close()

    def shutdown(self) -> None:
        for remote in list(self._remotes.values()):
            self.close(remote)
        for flight in self._flights.values():
            try:
                self._copier.wait(flight.copy)
            except CudaError as error:
                logger.warning("a copy failed while the transport was shut down: %s", error)
            flight.remote.in_flight -= 1
            if flight.remote.in_flight == 0:
                self._unmap(flight.remote)
        self._flights.clear()
        self._door.close()
        self._copier.close()
        self._epoll.close()
        self._alarm.close()
        self._bell.close()


def _lengths(page_bytes: int) -> set[int]:
    """What ranks of equal and unequal numbers are likely to exchange of a page: all of its heads, a half, and so on."""
    return {page_bytes >> halving for halving in range(4)}


def _device(region: Region) -> Device:
    try:
        return Device(region.device)
    except (MissingExtra, ConfigError) as error:
        raise RouteUnavailable(error.message) from error


def _own_seal(device: Device, region: Region) -> Seal:
    """The seal of this rank's pool, which proves that it is a DeviceMemory and one allocation."""
    try:
        start, size = device.extent(region.address)
        if start == region.address and size > seal_offset(region.bytes):
            return read_seal(device, region.address, region.bytes)
    except (CudaError, ValueError) as error:
        raise RouteUnavailable(f"the pool was not made by DeviceMemory and cannot be exported: {error}") from error
    raise RouteUnavailable(
        f"the pool is a part of an allocation of {size} bytes; only a whole one, made by DeviceMemory, can be exported"
    )


def event_handle(after: Any) -> int | None:
    """The CUDA handle of what a copy has to wait for. Raises ValueError for what is no event or was never recorded."""
    if after is None:
        return None
    handle = getattr(after, "cuda_event", after)
    if not isinstance(handle, int) or handle == 0:
        raise ValueError(f"after must be a recorded torch.cuda.Event or the integer handle of an event, not {after!r}")
    return handle


def process_name() -> str:
    """Names this process uniquely on this machine, also when its process id is used again."""
    started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    namespace = os.stat("/proc/self/ns/pid").st_ino
    return f"{namespace}:{os.getpid()}:{started}"


def create(context: Context) -> CudaIpcTransport:
    return CudaIpcTransport(context)
