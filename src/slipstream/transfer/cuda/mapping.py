"""A peer's pool in our address space: mapped, proven to be what the peer meant, measured, and unmapped.

The exporter hands its IPC handle out through a door; the importer opens it with its own GPU current, so that the copy
engine and any kernel of that GPU may read and write the mapping, and checks extent, generation and sizes before
anything else. A pool of the same process needs no mapping, only access from one GPU to the other.

Why IPC handles and not descriptors of virtual memory: a handle is 64 bytes, opens without rights over the other process
and also when the exporter's GPU is not visible to the importer, and the memory under it stays until the importer closes
it, even when the exporter is killed. What handles cannot do, export memory of a framework's pool or reach another
machine, is not wanted here.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from slipstream.errors import MissingExtra, RouteUnavailable
from slipstream.transfer.cuda.copier import Copier
from slipstream.transfer.cuda.memory import Seal, read_seal, seal_offset
from slipstream.transfer.cuda.plan import CopyCosts
from slipstream.transfer.cuda.runtime import CudaError, Device
from slipstream.transfer.transports.base import Exports, Region

logger = logging.getLogger(__name__)


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


class Mapper:
    """Maps pools of peers for `device`. `process` names this process (`process_name`)."""

    def __init__(self, device: Device, process: str) -> None:
        self._device = device
        self._process = process

    def map(self, connection: socket.socket, handle: Handle, exports: Exports) -> CudaRemote:
        """Raises RouteUnavailable with the reason; `connection` stays the caller's then."""
        self._device.use()
        seal = handle.seal
        if (seal.region_bytes, seal.page_bytes) != (exports.bytes, exports.page_bytes):
            raise RouteUnavailable(
                f"the peer announced {exports.bytes} bytes in pages of {exports.page_bytes}, its pool has "
                f"{seal.region_bytes} in pages of {seal.page_bytes}"
            )
        if handle.process == self._process:
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

    def unmap(self, remote: CudaRemote) -> None:
        """First the mapping, then the connection: its end says that nothing of ours is under way."""
        if remote.mapped:
            try:
                self._device.use()
                self._device.close_handle(remote.address)
            except CudaError as error:
                logger.warning("cannot unmap a peer's pool: %s", error)
        remote.connection.close()


def learn_costs(remote: CudaRemote, region: Region, seal: Seal, make: Callable[[], Copier]) -> None:
    """Compiles the kernels for this pool's pages and measures copies both ways, into the scratch areas, by a copier of
    its own. Raises RouteUnavailable."""
    copier = make()
    try:
        copier.prepare(remote.address, run_lengths(remote.seal.page_bytes))
        mine, theirs = (region.address, seal), (remote.address, remote.seal)
        for name, (source_at, source), (to, target) in (("costs", mine, theirs), ("read_costs", theirs, mine)):
            scratch = to + target.scratch_offset, target.scratch_bytes
            setattr(remote, name, copier.measure(source_at, source.region_bytes, *scratch, time.perf_counter))
    except CudaError as error:
        raise RouteUnavailable(f"copies to the peer's memory fail: {error}") from error
    except MissingExtra as error:
        raise RouteUnavailable(error.message) from error
    finally:
        copier.close()
    logger.info(
        "cuda_ipc %s to %s: %.0f GB/s by kernel, %.0f by copy engine and %.2f us a run, crossover at %.0f KiB",
        copier.device.uuid,
        "a peer" if remote.mapped else "the same process",
        1e-9 / remote.costs.kernel_byte,
        1e-9 / remote.costs.engine_byte,
        1e6 * remote.costs.engine_run,
        remote.costs.crossover(copier.settings.engine_preference) / 1024,
    )


def run_lengths(page_bytes: int) -> set[int]:
    """What ranks of equal and unequal numbers are likely to exchange of a page: all of its heads, a half, and so on."""
    return {page_bytes >> halving for halving in range(4)}


def own_seal(device: Device, region: Region) -> Seal:
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


def process_name() -> str:
    """Names this process uniquely on this machine, also when its process id is used again."""
    started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    namespace = os.stat("/proc/self/ns/pid").st_ino
    return f"{namespace}:{os.getpid()}:{started}"
