"""Copies batches of runs between addresses that one GPU reaches, several batches at a time.

`start` looks at a batch once (`plan.survey`), divides it between copy engine and kernel (`plan.divide`), writes the
offsets that the kernel needs into pinned memory, queues their upload, the launch and the copies on one of a few
streams, and puts an event behind them. It returns at once. The lists of a batch live in a slot that is used again when
the batch is done; slots are made as batches in flight need them and stay.

`launch` is how a kernel gets started; the one given by default imports triton and torch when it is first called.

A copier belongs to one thread, and leaves its device current there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import MissingExtra
from slipstream.transfer.cuda.memory import PinnedMemory
from slipstream.transfer.cuda.plan import (
    WORD,
    CopyCosts,
    Sizes,
    Survey,
    costs_from_times,
    cut_long_runs,
    divide,
    survey,
)
from slipstream.transfer.cuda.runtime import CudaError, Device
from slipstream.transfer.transports.base import Runs

logger = logging.getLogger(__name__)

UNMEASURED = CopyCosts(
    kernel_start=30e-6, kernel_byte=1 / 300e9, engine_start=8e-6, engine_run=2e-6, engine_byte=1 / 350e9
)
"""What is assumed until `measure` has run: of the order of two GPUs joined by NVLink, and only a choice of way hangs on it."""

_SLOT_BYTES = 1 << 20  # smallest list buffer: 131,072 runs of one length
_LAUNCH_RUNS = 1 << 15  # runs a launch: behind the first, lists are made while the GPU already copies


@dataclass(frozen=True, slots=True)
class CopySettings:
    """How the kernel runs.

    programs: thread blocks at most, each on a multiprocessor of its own: more of them fill the link, fewer leave
    more of the GPU to the model. tile_bytes: bytes that a program has under way. warps: warps a program.
    streams: batches that can run at the same time.
    """

    programs: int = 64
    tile_bytes: int = 32 << 10
    warps: int = 8
    streams: int = 2

    def __post_init__(self) -> None:
        if self.programs < 1 or self.streams < 1 or self.warps not in (1, 2, 4, 8, 16):
            raise ValueError(f"programs and streams must be positive and warps 1, 2, 4, 8 or 16: {self}")
        if self.tile_bytes < 256 or self.tile_bytes & (self.tile_bytes - 1):
            raise ValueError(f"tile_bytes must be a power of two of at least 256: {self.tile_bytes}")


class Launch(NamedTuple):
    """One kernel launch: `runs` runs described by the list at `lists`; `length` is that of all runs, 0 when they differ,
    and offsets count in units of 1 << shift bytes."""

    source_at: int
    destination_at: int
    lists: int
    runs: int
    length: int
    shift: int


@dataclass(eq=False)
class Copy:
    """A batch under way. `event` happens when its last byte is in place; `expected` is its estimated time in seconds."""

    event: int
    lane: _Lane
    total: int
    expected: float
    slots: list[_Slot] = field(default_factory=list)


@dataclass(eq=False)
class _Lane:
    stream: int
    in_flight: int = 0


class _Slot:
    """Room for a list: pinned memory to write it, device memory to read it from."""

    def __init__(self, device: Device, size: int) -> None:
        self.bytes = size
        self.pinned = PinnedMemory(device, size)
        self.address = device.allocate(size)

    def close(self, device: Device) -> None:
        self.pinned.close()
        device.free(self.address)


class Copier:
    """See the module. Raises CudaError when a call fails; a failed event makes `is_done` raise it for that copy."""

    def __init__(
        self,
        device: Device,
        settings: CopySettings | None = None,
        launch: Callable[[Launch, int, CopySettings], None] | None = None,
    ) -> None:
        self.device = device
        self.settings = settings or CopySettings()
        self._launch = launch or TritonLauncher(device.index)
        device.use()
        self._lanes = [_Lane(device.stream()) for _ in range(self.settings.streams)]
        self._events: list[int] = []
        self._slots: list[_Slot] = []
        self._all_slots: list[_Slot] = []

    # ------------------------------------------------------------------------------------------------ copies

    def start(
        self,
        source_at: int,
        destination_at: int,
        runs: Runs,
        seen: Survey,
        costs: CopyCosts,
        after: int | None = None,
    ) -> Copy:
        """Queues the copy of `runs`, which `survey` has seen, from one base address to another.

        `after` is an event that must have happened before the first byte is read.
        """
        self.device.use()
        lane = min(self._lanes, key=lambda lane: lane.in_flight)
        division = divide(runs, seen, costs)
        expected = min(costs.kernel(seen.total), costs.engine(len(runs.length), seen.total))
        copy = Copy(self._events.pop() if self._events else self.device.event(), lane, seen.total, expected)
        lane.in_flight += 1
        try:
            if after is not None:
                self.device.wait_for(lane.stream, after)
            if division.engine is None or len(division.engine):
                self._by_engine(source_at, destination_at, _rows(runs, division.engine), lane.stream)
            if division.kernel is None or len(division.kernel):
                self._by_kernel(copy, source_at, destination_at, _rows(runs, division.kernel), seen)
            self.device.record(copy.event, lane.stream)
        except BaseException:
            self._abandon(copy)
            raise
        return copy

    def _abandon(self, copy: Copy) -> None:
        """After a failure half way: waits for what was queued, so that nothing of it arrives later."""
        try:
            self.device.record(copy.event, copy.lane.stream)
            self.device.wait(copy.event)
        except CudaError as error:
            logger.warning("a copy that failed cannot be waited for, the GPU's context is lost: %s", error)
        self._forget(copy)

    def is_done(self, copy: Copy) -> bool:
        """Whether the copy is in place. After True, or an error, the copy is forgotten."""
        try:
            done = self.device.is_done(copy.event)
        except Exception:
            self._forget(copy)
            raise
        if done:
            self._forget(copy)
        return done

    def wait(self, copy: Copy) -> None:
        """Sleeps until the copy is in place."""
        try:
            self.device.wait(copy.event)
        finally:
            self._forget(copy)

    def _forget(self, copy: Copy) -> None:
        copy.lane.in_flight -= 1
        self._events.append(copy.event)
        self._slots += copy.slots
        copy.slots = []

    def _by_engine(self, source_at: int, destination_at: int, runs: Runs, stream: int) -> None:
        destinations = (runs.destination + destination_at).tolist()
        sources = (runs.source + source_at).tolist()
        self.device.copy_batch(destinations, sources, runs.length.tolist(), stream)

    def _by_kernel(self, copy: Copy, source_at: int, destination_at: int, runs: Runs, seen: Survey) -> None:
        for part, length, shift, columns in kernel_lists(source_at, destination_at, runs, seen):
            slot = self._slot(sum(column.nbytes for column in part))
            copy.slots.append(slot)
            position = 0
            for column in part:
                slot.pinned.array[position : position + column.nbytes] = column.view(np.uint8)
                position += column.nbytes
            self.device.copy(slot.address, slot.pinned.address, position, copy.lane.stream)
            launch = Launch(source_at, destination_at, slot.address, columns, length, shift)
            self._launch(launch, copy.lane.stream, self.settings)

    def _slot(self, size: int) -> _Slot:
        for index, slot in enumerate(self._slots):
            if slot.bytes >= size:
                return self._slots.pop(index)
        slot = _Slot(self.device, max(_SLOT_BYTES, 1 << (size - 1).bit_length()))
        self._all_slots.append(slot)
        return slot

    # ------------------------------------------------------------------------------------------------ costs

    def prepare(self, address: int, lengths: Iterable[int]) -> None:
        """Compiles and loads the kernels for runs of these lengths, and for mixed ones, by launches that move nothing."""
        self.device.use()
        for length in {0, *(length for length in lengths if length % WORD == 0)}:
            self._launch(Launch(address, address, address, 0, length, 4), self._lanes[0].stream, self.settings)

    def measure(self, source_at: int, destination_at: int, size: int, clock: Callable[[], float]) -> CopyCosts:
        """Measures what copies cost from one address to another, writing up to `size` bytes of garbage.

        Takes some tens of milliseconds, and the compilation of the kernel when it was never compiled on this machine.
        """
        large = size & -WORD
        sizes = Sizes(small=4096, large=large, many=min(64, large // 4096), few=4)
        kernel_only = CopyCosts(0.0, 0.0, 1.0, 1.0, 1.0)
        engine_only = CopyCosts(1.0, 1.0, 0.0, 0.0, 0.0)
        times = [
            self._time(source_at, destination_at, count, each, costs, clock)
            for count, each, costs in (
                (1, sizes.small, kernel_only),
                (1, sizes.large, kernel_only),
                (1, sizes.small, engine_only),
                (sizes.many, sizes.large // sizes.many, engine_only),
                (sizes.few, sizes.large // sizes.few, engine_only),
            )
        ]
        return costs_from_times(*times, sizes=sizes)

    def _time(
        self, source_at: int, destination_at: int, count: int, each: int, costs: CopyCosts, clock: Callable[[], float]
    ) -> float:
        """Seconds from the start of a batch to its end as this thread sees it: the least of some tries."""
        offsets = np.arange(count, dtype=np.int64) * each
        runs = Runs(offsets, offsets, np.broadcast_to(np.int64(each), (count,)))
        seen = survey(runs, count * each, count * each)
        taken = []
        for _ in range(7):
            began = clock()
            copy = self.start(source_at, destination_at, runs, seen, costs)
            while not self.is_done(copy):  # a few microseconds each; sleeping would be what is measured
                pass
            taken.append(clock() - began)
        return min(taken[1:])

    def close(self) -> None:
        """Waits for nothing: copies must be done. Frees streams, events and lists."""
        self.device.use()
        for lane in self._lanes:
            self.device.destroy_stream(lane.stream)
        for event in self._events:
            self.device.destroy_event(event)
        for slot in self._all_slots:
            slot.close(self.device)
        self._lanes, self._events, self._slots, self._all_slots = [], [], [], []


def _rows(runs: Runs, rows: NDArray[np.int64] | None) -> Runs:
    return runs if rows is None else Runs(runs.source[rows], runs.destination[rows], runs.length[rows])


def kernel_lists(
    source_at: int, destination_at: int, runs: Runs, seen: Survey
) -> Iterator[tuple[list[NDArray[Any]], int, int, int]]:
    """The launches that move `runs`: (columns of the list, common length or 0, shift, number of runs).

    Runs of one length go as 32-bit multiples of their alignment, others as 64-bit bytes.
    """
    shift = seen.alignment.bit_length() - 1
    count = len(runs.length)
    aligned = (source_at | destination_at) % WORD == 0
    fits = seen.reach >> shift < 1 << 31
    if seen.length and shift >= 4 and aligned and fits:
        for start in range(0, count, _LAUNCH_RUNS):
            part = slice(start, min(start + _LAUNCH_RUNS, count))
            units = [_units(runs.source[part], shift), _units(runs.destination[part], shift)]
            yield units, seen.length, shift, part.stop - part.start
        return
    pieces = cut_long_runs(runs)
    for start in range(0, len(pieces.length), _LAUNCH_RUNS):
        part = slice(start, min(start + _LAUNCH_RUNS, len(pieces.length)))
        columns = [np.ascontiguousarray(column[part]) for column in (pieces.source, pieces.destination, pieces.length)]
        yield columns, 0, 0, part.stop - part.start


def _units(offsets: NDArray[np.int64], shift: int) -> NDArray[np.int32]:
    return np.right_shift(offsets, shift, out=np.empty(len(offsets), np.int32), casting="unsafe")


class TritonLauncher:
    """Starts the kernels of `transfer.cuda.kernel`. Raises MissingExtra when triton is not installed."""

    def __init__(self, device_index: int) -> None:
        self._index = device_index
        self._streams: dict[int, Any] = {}
        self._kernel: Any = None
        self._torch: Any = None

    def __call__(self, launch: Launch, stream: int, settings: CopySettings) -> None:
        if self._kernel is None:
            self._load()
        torch, kernel = self._torch, self._kernel
        if stream not in self._streams:
            self._streams[stream] = torch.cuda.ExternalStream(stream, device=self._index)
        with torch.cuda.stream(self._streams[stream]):
            if launch.length:
                rows, columns, chunks = kernel.equal_tile(launch.length, settings.tile_bytes)
                programs = max(1, min(settings.programs, -(-launch.runs // rows) * chunks))
                arguments = (launch.lists, launch.runs, launch.length // WORD, chunks, launch.shift)
                kernel.move_equal[(programs,)](
                    launch.source_at, launch.destination_at, *arguments, rows, columns, num_warps=settings.warps
                )
            else:
                programs = max(1, min(settings.programs, launch.runs))
                words = settings.tile_bytes // 8
                kernel.move_any[(programs,)](
                    launch.source_at,
                    launch.destination_at,
                    launch.lists,
                    launch.runs,
                    words,
                    1024,
                    num_warps=settings.warps,
                )

    def _load(self) -> None:
        try:
            import torch

            from slipstream.transfer.cuda import kernel
        except ImportError as error:
            raise MissingExtra("triton", "gpu") from error
        torch.cuda.set_device(self._index)
        self._torch, self._kernel = torch, kernel
