"""Brings GPU memory to where sockets and shared mappings reach it: pinned slots, filled and emptied in a pipeline.

A transport that cannot touch device memory moves packed pieces of a batch of runs. `fetch` packs the runs of a piece
into a slot, `store` unpacks one into the region; both return at once and are waited for later, so that while one piece
is on its way the next ones are being copied. Slots are allocated here, or lie in a shared mapping that is pinned in
place. For transports that take one slot after the other:

    sender     for runs, piece in staging.out(runs): send(runs.destination, piece)
    receiver   with staging.into(runs) as piece: receive_into(piece)      ...      staging.flush()

The copies are those of `transfer.cuda.copier`, over PCIe: small pages are gathered by one kernel launch a piece that
writes the pinned memory itself, long runs go by the copy engine, whichever is measured to be faster. `HostStaging` does
the same for memory of the CPU, where one side of a pair has no GPU.

A staging belongs to one thread; threads that share a region have one each, from one `StagingMaker`.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import ConfigError, MissingExtra, RouteUnavailable
from slipstream.transfer.copies import check_bounds, split
from slipstream.transfer.cuda.copier import Copier, Copy
from slipstream.transfer.cuda.launcher import CopySettings
from slipstream.transfer.cuda.memory import PinnedMemory, read_seal
from slipstream.transfer.cuda.plan import CopyCosts, survey
from slipstream.transfer.cuda.runtime import CudaError, Device, Runtime
from slipstream.transfer.transports.base import Region, Runs
from slipstream.transfer.transports.memory import Copier as HostCopier

PIECE_RUNS = 1 << 15


class Slot(NamedTuple):
    """Memory that both the CPU (`array`) and the region's device (`address`) reach."""

    address: int
    array: NDArray[np.uint8]


class Stager(Protocol):
    """What rings and sockets use of a Staging, whichever memory is behind it."""

    slots: list[Slot]

    def fetch(self, runs: Runs, slot: Slot, after: int | None = None) -> Any:
        """Starts packing the bytes of `runs.source`, one run behind the other, into the slot."""
        ...

    def store(self, runs: Runs, slot: Slot) -> Any:
        """Starts unpacking the slot to the places that `runs.destination` names."""
        ...

    def wait(self, copy: Any) -> None:
        """Returns when it has ended: to be called once for each copy. Raises CudaError when it failed."""
        ...

    def close(self) -> None:
        """Frees the slots; all copies have been waited for."""
        ...


class Staging:
    """Pinned slots of one GPU region, which a DeviceMemory made.

    `slot_bytes` bounds a piece. `given` is memory to be cut into the slots, which remains its owner's; without it they
    are allocated. `costs` (out, in) saves measuring them again. Raises MissingExtra without the packages, CudaError
    when memory cannot be pinned or a copy fails; ValueError when a run leaves the region.
    """

    def __init__(
        self,
        region: Region,
        slots: int = 4,
        slot_bytes: int = 4 << 20,
        device: Device | None = None,
        copiers: Any = Copier,
        given: NDArray[np.uint8] | None = None,
        costs: tuple[CopyCosts, CopyCosts] | None = None,
    ) -> None:
        self.slot_bytes = slot_bytes
        self._region = region
        self._device = device or Device(region.device)
        self._device.use()
        self._pinned = PinnedMemory(self._device, slots * slot_bytes, given)
        try:
            self._copier: Copier = copiers(self._device, CopySettings(bulk=None))
            address, array = self._pinned.address, self._pinned.array
            places = range(0, slots * slot_bytes, slot_bytes)
            self.slots = [Slot(address + at, array[at : at + slot_bytes]) for at in places]
            self.costs_out, self.costs_in = costs or self._measure()
        except BaseException:
            self._pinned.close()
            raise
        self._free = list(self.slots)
        self._storing: deque[tuple[Slot, Copy]] = deque()

    def _measure(self) -> tuple[CopyCosts, CopyCosts]:
        seal = read_seal(self._device, self._region.address, self._region.bytes)
        scratch, host = self._region.address + seal.scratch_offset, self.slots[0].address
        self._copier.prepare(scratch, [self._region.page_bytes])
        region = self._region
        out = self._copier.measure(region.address, region.bytes, host, self.slot_bytes, time.perf_counter)
        back = self._copier.measure(host, self.slot_bytes, scratch, seal.scratch_bytes, time.perf_counter)
        return out, back

    def fetch(self, runs: Runs, slot: Slot, after: int | None = None) -> Copy:
        packed = Runs(runs.source, _packed(runs.length), runs.length)
        seen = survey(packed, self._region.bytes, self.slot_bytes)
        return self._copier.start(self._region.address, slot.address, packed, seen, self.costs_out, after)

    def store(self, runs: Runs, slot: Slot) -> Copy:
        packed = Runs(_packed(runs.length), runs.destination, runs.length)
        seen = survey(packed, self.slot_bytes, self._region.bytes)
        return self._copier.start(slot.address, self._region.address, packed, seen, self.costs_in)

    def wait(self, copy: Copy) -> None:
        self._copier.wait(copy)

    # ------------------------------------------------------------------------------------------- one after the other

    def out(
        self, runs: Runs, after: int | None = None, piece_runs: int = PIECE_RUNS
    ) -> Generator[tuple[Runs, NDArray[np.uint8]], None, None]:
        """The bytes of `runs.source` in pieces, in order: (the runs of a piece, its bytes packed one behind the other).

        The array is valid until the next step. `after` is an event that the source is ready behind.
        """
        if len(runs.length):
            survey(runs, self._region.bytes, 1 << 62)
        pieces = split(runs, self.slot_bytes, piece_runs)
        fetching: deque[tuple[Runs, Slot, Copy]] = deque()
        try:
            while True:
                while self._free and (piece := next(pieces, None)) is not None:
                    copy = self.fetch(piece, self._free[-1], after)
                    fetching.append((piece, self._free.pop(), copy))
                if not fetching:
                    if self._storing:  # slots are still being emptied
                        self._reclaim()
                        continue
                    return
                piece, slot, copy = fetching.popleft()
                try:
                    self.wait(copy)
                    yield piece, slot.array[: piece.total]
                finally:
                    self._free.append(slot)
        finally:
            for _, slot, copy in fetching:
                with contextlib.suppress(CudaError):  # the first failure is on its way to the caller
                    self.wait(copy)
                self._free.append(slot)

    @contextlib.contextmanager
    def into(self, runs: Runs) -> Iterator[NDArray[np.uint8]]:
        """A buffer of `runs.total` bytes, at most `slot_bytes`; when it has been filled, its bytes go to the places
        that `runs.destination` names. They are in place after `flush`; an exception inside drops them."""
        total = runs.total
        if total > self.slot_bytes:
            raise ValueError(f"a piece of {total} bytes does not fit a slot of {self.slot_bytes}")
        while not self._free:
            self._reclaim()
        slot = self._free.pop()
        try:
            yield slot.array[:total]
            copy = self.store(runs, slot)
        except BaseException:
            self._free.append(slot)
            raise
        self._storing.append((slot, copy))

    def _reclaim(self) -> None:
        slot, copy = self._storing.popleft()
        try:
            self.wait(copy)
        finally:
            self._free.append(slot)

    def flush(self) -> None:
        """Returns when all that was filled is in place."""
        while self._storing:
            self._reclaim()

    def close(self) -> None:
        """Waits for what is under way and frees the buffers."""
        while self._storing:
            with contextlib.suppress(CudaError):  # a lost context has nothing under way any more
                self._reclaim()
        self._copier.close()
        self._pinned.close()


class HostStaging:
    """The same for memory of the CPU: copies have ended when they have been started. Raises ValueError when a run
    leaves the region."""

    def __init__(self, region: Region, slots: int, slot_bytes: int, given: NDArray[np.uint8]) -> None:
        assert region.array is not None
        self._region = region
        self._copier = HostCopier()
        self.slot_bytes = slot_bytes
        address = int(given.ctypes.data)
        places = range(0, slots * slot_bytes, slot_bytes)
        self.slots = [Slot(address + at, given[at : at + slot_bytes]) for at in places]

    def fetch(self, runs: Runs, slot: Slot, after: int | None = None) -> None:
        packed = Runs(runs.source, _packed(runs.length), runs.length)
        check_bounds(packed, self._region.bytes, self.slot_bytes)
        self._copier.copy(slot.address, self._region.address, packed)

    def store(self, runs: Runs, slot: Slot) -> None:
        packed = Runs(_packed(runs.length), runs.destination, runs.length)
        check_bounds(packed, self.slot_bytes, self._region.bytes)
        self._copier.copy(self._region.address, slot.address, packed)

    def wait(self, copy: None) -> None:
        pass

    def close(self) -> None:
        self.slots = []


class StagingMaker:
    """Makes the stagings of one region for the threads of a transport; what copies cost is measured once.

    Raises RouteUnavailable when the region's GPU cannot be used by this process.
    """

    def __init__(self, region: Region, device: Device | None = None, copiers: Any = Copier) -> None:
        self.region = region
        self._device, self._copiers = device, copiers
        self._lock = threading.Lock()  # kernels are compiled by the first staging, and measured undisturbed
        self._costs: tuple[CopyCosts, CopyCosts] | None = None
        if region.kind == "cuda" and device is None:
            try:
                self._device = Device(region.device)
            except (MissingExtra, ConfigError, CudaError) as error:
                raise RouteUnavailable(f"the GPU's memory cannot be staged: {error}") from error

    def staging(self, slots: int, slot_bytes: int, given: NDArray[np.uint8] | None = None) -> Staging:
        """For the calling thread. Raises RouteUnavailable with the reason when that fails."""
        with self._lock:
            try:
                made = Staging(self.region, slots, slot_bytes, self._device, self._copiers, given, self._costs)
            except (MissingExtra, CudaError, ValueError) as error:
                raise RouteUnavailable(f"the GPU's memory cannot be staged: {error}") from error
            self._costs = made.costs_out, made.costs_in
            return made

    def stager(self, slots: int, slot_bytes: int, given: NDArray[np.uint8]) -> Stager:
        """Slots in `given`, for either kind of memory. Raises RouteUnavailable."""
        if self.region.kind == "cuda":
            return self.staging(slots, slot_bytes, given)
        return HostStaging(self.region, slots, slot_bytes, given)

    def near(self) -> contextlib.AbstractContextManager[None]:
        """Inside, this thread runs on the NUMA node of the region's GPU, so that memory it touches first lies there."""
        return running_on(gpu_cpus(self._device) if isinstance(self._device, Device) else frozenset())


def gpu_cpus(device: Device, system: Path = Path("/sys")) -> frozenset[int]:
    """The CPUs of the NUMA node that a GPU hangs on; empty when the system does not tell."""
    try:
        raw = Runtime().call("cudaDeviceGetPCIBusId", 32, device.index)
        bus = (raw.rstrip(b"\0").decode() if isinstance(raw, bytes) else str(raw)).lower()
        return cpu_list((system / "bus/pci/devices" / bus / "local_cpulist").read_text())
    except (CudaError, OSError, ValueError):
        return frozenset()


def cpu_list(text: str) -> frozenset[int]:
    """The numbers of a list as sysfs writes it: "0-3,8". Raises ValueError."""
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return frozenset(cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1))


@contextlib.contextmanager
def running_on(cpus: frozenset[int]) -> Iterator[None]:
    """Keeps this thread on those of `cpus` that it may use, while inside; without any, nothing changes."""
    before = os.sched_getaffinity(0)
    wanted = before & cpus
    if not wanted:
        yield
        return
    os.sched_setaffinity(0, wanted)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _packed(length: NDArray[np.int64]) -> NDArray[np.int64]:
    """Offsets of runs that lie one behind the other."""
    return np.cumsum(length) - length
