"""Copies batches of runs between addresses that one GPU reaches, several batches at a time.

`start` looks at a batch once (`plan.survey`), divides it between copy engine and kernel (`plan.divide`), writes the
offsets that the kernel needs into pinned memory, queues their upload, the launch and the copies on one of a few
streams, and puts an event behind them. It returns at once. The lists of a batch live in slots (`lists.Room`) until
it is done.

`launch` is how a kernel gets started; the one given by default compiles or imports what it needs when first called.

Batches that the copy engine takes as a whole have a stream of their own, since two of them side by side are slower than
one behind the other. So have those that wait for an event: what is ready does not stand behind them.

The link would wait for the host where lists are long. So `copy` has two threads look at them and write them, a column
each, from one end to the other; nothing is launched before all of it has been looked at. A batch that has the link for
itself is launched in growing parts, while the rest is written; one behind others as a whole, since each part would make
the two threads wait for each other once more. So it is with the calls for the copy engine, each of which has to get the
interpreter's lock back.

A copier is used by one thread at a time, and leaves its device current there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from slipstream.transfer.cuda.batches import FIRST_COPIES, MOST_COPIES
from slipstream.transfer.cuda.launcher import CopySettings, KernelLauncher, Launch
from slipstream.transfer.cuda.lists import (
    FIRST_RUNS,
    MOST_RUNS,
    KernelList,
    Room,
    Slot,
    kernel_lists,
    parts_of,
    rows_of,
)
from slipstream.transfer.cuda.plan import (
    ALL_BY_KERNEL,
    PIECE_BYTES,
    WORD,
    CopyCosts,
    Sizes,
    Survey,
    common_length,
    costs_from_times,
    divide,
    judged,
    look,
    survey,
)
from slipstream.transfer.cuda.runtime import CudaError, Device
from slipstream.transfer.transports.base import Runs

logger = logging.getLogger(__name__)

UNMEASURED = CopyCosts(
    kernel_start=30e-6, kernel_byte=1 / 300e9, engine_start=8e-6, engine_run=2e-6, engine_byte=1 / 350e9
)
"""For pools too small to measure with: of the order of two GPUs joined by NVLink. Only a choice of way hangs on it."""

KERNEL_ONLY = CopyCosts(0.0, 0.0, 1.0, 1.0, 1.0)
ENGINE_ONLY = CopyCosts(1.0, 1.0, 0.0, 0.0, 0.0)

_MEASURE_BYTES = 128 << 20
_MEASURE_BATCHES = 3
_TWO_THREADS = 1 << 16  # from so many runs on a list is worth a second thread
_READ_IN_PLACE = 64 << 10  # lists up to this size are read by the kernel over the bus, which takes less than an upload


Batch = tuple[int, int, Runs, Survey, CopyCosts]
"""What `Copier.start` takes."""


@dataclass(eq=False)
class Copy:
    """A batch under way. `event` happens when its last byte is in place; `expected` are the seconds it should take."""

    event: int
    lane: _Lane
    total: int
    expected: float
    slots: list[Slot] = field(default_factory=list)


@dataclass(eq=False)
class _Lane:
    stream: int
    in_flight: int = 0


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
        self._launch = launch or KernelLauncher(device)
        device.use()
        self._lanes = [_Lane(device.stream()) for _ in range(self.settings.streams)]
        self._engine_lane, self._waiting_lane = _Lane(device.stream()), _Lane(device.stream())
        self._second = ThreadPoolExecutor(1, thread_name_prefix="slipstream-lists")
        self._events: list[int] = []
        self._room = Room(device, short=self.settings.short_lists, ready=2 * self.settings.streams)

    # ------------------------------------------------------------------------------------------------ copies

    def start(
        self,
        source_at: int,
        destination_at: int,
        runs: Runs,
        seen: Survey,
        costs: CopyCosts,
        after: int | None = None,
        lane: _Lane | None = None,
    ) -> Copy:
        """Queues the copy of `runs`, which `survey` has seen, from one base address to another.

        `after` is an event that must have happened before the first byte is read. Without a `lane` the one that suits
        is taken.
        """
        self.device.use()
        division = divide(runs, seen, costs, self.settings.engine_preference)
        if lane is None:
            lane = self._lane(after, by_engine=division.engine is None)
        behind = self._behind(after)
        copies, first = (MOST_COPIES, MOST_RUNS) if behind else (FIRST_COPIES, FIRST_RUNS)

        def queue(copy: Copy) -> None:
            if division.engine is None or len(division.engine):
                self._by_engine(source_at, destination_at, rows_of(runs, division.engine), lane.stream, copies)
            if division.kernel is None or len(division.kernel):
                self._by_kernel(copy, source_at, destination_at, rows_of(runs, division.kernel), seen, first)

        expected = min(costs.kernel(seen.total), costs.engine(len(runs.length), seen.total))
        return self._queued(self._new_copy(lane, seen.total, expected), after, queue)

    def copy(
        self,
        source_at: int,
        source_bytes: int,
        destination_at: int,
        destination_bytes: int,
        runs: Runs,
        costs: CopyCosts,
        after: int | None = None,
    ) -> Copy:
        """`survey` and `start`, by two threads where the list is long.

        Raises ValueError when a run leaves the bytes of either region; nothing is copied then.
        """
        if len(runs.length) < _TWO_THREADS:
            seen = survey(runs, source_bytes, destination_bytes)
            return self.start(source_at, destination_at, runs, seen, costs, after)
        length = common_length(runs)
        alike = Survey(length, WORD, length * len(runs.length))
        ends = (source_at, destination_at)
        offsets = (int(runs.source[0]), int(runs.destination[0]))
        aligned = length > 0 and not any(number % WORD for number in (length, *ends, *offsets))
        if aligned and divide(runs, alike, costs, self.settings.engine_preference) is ALL_BY_KERNEL:
            self.device.use()
            copy = self._long(ends, (source_bytes, destination_bytes), runs, alike, costs.kernel(alike.total), after)
            if copy is not None:
                return copy
        seen = survey(runs, source_bytes, destination_bytes, self._second)
        return self.start(source_at, destination_at, runs, seen, costs, after)

    def _long(
        self,
        ends: tuple[int, int],
        sizes: tuple[int, int],
        runs: Runs,
        alike: Survey,
        expected: float,
        after: int | None,
    ) -> Copy | None:
        """A long list of runs that are `alike`; None, and nothing has been queued, when not all are aligned."""
        first = MOST_RUNS if self._behind(after) else FIRST_RUNS
        lists = list(parts_of(runs, alike.length, alike.length, first, MOST_RUNS))
        slots = [self._room.take(part.bytes) for part in lists]
        columns = [part.columns(slot.array) for part, slot in zip(lists, slots, strict=True)]
        theirs = self._second.submit(look, runs.destination, alike.length, sizes[1])
        written = [self._second.submit(np.copyto, *destination) for _, destination in columns]
        copy = None
        try:
            mine = look(runs.source, alike.length, sizes[0])
            np.copyto(*columns[0][0])
            if judged(runs, sizes, (mine, theirs.result())) % WORD == 0:
                copy = self._new_copy(self._lane(after, by_engine=False), alike.total, expected)
                copy.slots = slots

                def queue(copy: Copy) -> None:
                    for part, slot, (source, _), other in zip(lists, slots, columns, written, strict=True):
                        if part is not lists[0]:
                            np.copyto(*source)
                        other.result()
                        self._launch_list(copy, *ends, part, slot)

                return self._queued(copy, after, queue)
        finally:
            for other in written:
                other.exception()  # nobody writes into a slot that somebody else may have
            if copy is None:
                self._room.free(slots)
        return None

    def _lane(self, after: int | None, by_engine: bool) -> _Lane:
        if after is not None:
            return self._waiting_lane
        return self._engine_lane if by_engine else min(self._lanes, key=lambda lane: lane.in_flight)

    def _behind(self, after: int | None) -> bool:
        """Whether a batch has to wait for something, so that the GPU need not begin before all of it is queued."""
        return after is not None or any(lane.in_flight for lane in (*self._lanes, self._engine_lane))

    def _new_copy(self, lane: _Lane, total: int, expected: float) -> Copy:
        lane.in_flight += 1
        return Copy(self._events.pop() if self._events else self.device.event(), lane, total, expected)

    def _queued(self, copy: Copy, after: int | None, queue: Callable[[Copy], None]) -> Copy:
        """Has `queue` queue the copy, behind what it waits for and before its event."""
        try:
            if after is not None:
                self.device.wait_for(copy.lane.stream, after)
            queue(copy)
            self.device.record(copy.event, copy.lane.stream)
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
        if copy.slots:
            self._room.free(copy.slots)
            copy.slots = []

    def _by_engine(self, source_at: int, destination_at: int, runs: Runs, stream: int, first: int) -> None:
        self.device.copy_batch(runs.destination + destination_at, runs.source + source_at, runs.length, stream, first)

    def _by_kernel(self, copy: Copy, source_at: int, destination_at: int, runs: Runs, seen: Survey, first: int) -> None:
        for part in kernel_lists(source_at, destination_at, runs, seen, first):
            slot = self._room.take(part.bytes)
            copy.slots.append(slot)
            part.write(slot.array)
            self._launch_list(copy, source_at, destination_at, part, slot)

    def _launch_list(self, copy: Copy, source_at: int, destination_at: int, part: KernelList, slot: Slot) -> None:
        """Queues the launch of a list that has been written, behind its upload."""
        lists = slot.pinned_at
        if part.bytes > _READ_IN_PLACE:
            self.device.copy(slot.device_at, lists, part.bytes, copy.lane.stream)
            lists = slot.device_at
        launch = Launch(source_at, destination_at, lists, len(part.runs.length), part.length, part.longest)
        self._launch(launch, copy.lane.stream, self.settings)

    # ------------------------------------------------------------------------------------------------ costs

    def prepare(self, address: int, lengths: Iterable[int]) -> None:
        """Compiles and loads the kernels for runs of these lengths and for mixed ones: launches that move nothing."""
        self.device.use()
        for length in {0, *(length for length in lengths if length % WORD == 0)}:
            longest = length or PIECE_BYTES
            self._launch(Launch(address, address, address, 0, length, longest), self._lanes[0].stream, self.settings)

    def rehearse(self, scratch_at: int, scratch_bytes: int) -> None:
        """Copies garbage within `scratch_bytes` by every way, on every stream, behind an event, and waits: a stream
        gets what it needs of the GPU when it is first used, and so does each way of copying."""
        half, count = scratch_bytes // 2, 2
        each = min(4096, half // count)
        lanes = (*self._lanes, self._engine_lane, self._waiting_lane)
        before, copies = self.start(*_batch(scratch_at, half, 1, each, ENGINE_ONLY)), list[Copy]()
        for lane in lanes:
            for runs, costs in ((1, ENGINE_ONLY), (count, ENGINE_ONLY), (count, KERNEL_ONLY)):
                copies.append(self.start(*_batch(scratch_at, half, runs, each, costs), before.event, lane))
        for copy in (before, *copies):
            self.wait(copy)

    def measure(
        self, source_at: int, source_bytes: int, scratch_at: int, scratch_bytes: int, clock: Callable[[], float]
    ) -> CopyCosts:
        """Measures what copies cost from one address to another, writing garbage to `scratch_bytes` there.

        The source is only read, a wide stretch of it, since a small one would stay in the cache. Takes some tens of
        milliseconds, and the compilation of the kernel when it was never compiled on this machine.
        """
        few, small = 8, 4096
        each = min(_MEASURE_BYTES // few, source_bytes, scratch_bytes) // small * small
        if each < 16 * small:
            return UNMEASURED
        sizes = Sizes(small=small, many=min(256, scratch_bytes // small), large=few * each, few=few)
        times = []
        for count, length, costs, time in (
            (1, small, KERNEL_ONLY, self._latency),
            (few, each, KERNEL_ONLY, self._duration),
            (1, small, ENGINE_ONLY, self._latency),
            (sizes.many, small, ENGINE_ONLY, self._latency),
            (few, each, ENGINE_ONLY, self._duration),
        ):
            runs = _wrapped(count, length, source_bytes, scratch_bytes)
            seen = survey(runs, source_bytes, scratch_bytes)
            batch = (source_at, scratch_at, runs, seen, costs)
            times.append(time(batch, clock))
        # The large ones are measured on the GPU; alone they would also have taken what starting one takes.
        times[1] += times[0]
        times[4] += times[2]
        return costs_from_times(*times, sizes=sizes)

    def _latency(self, batch: Batch, clock: Callable[[], float]) -> float:
        """Seconds from the start of a batch to its end as this thread sees it: the least of some tries."""
        taken = []
        for _ in range(7):
            began = clock()
            copy = self.start(*batch)
            while not self.is_done(copy):  # a few microseconds each; sleeping would be what is measured
                pass
            taken.append(clock() - began)
        return min(taken[1:])

    def _duration(self, batch: Batch, clock: Callable[[], float]) -> float:
        """Seconds of the GPU for one batch among others: queueing the next is hidden behind the one before."""
        lane = self._lanes[0]
        start, end = self.device.timing_event(), self.device.timing_event()
        self.wait(self.start(*batch, lane=lane))
        taken = []
        for _ in range(2):
            first = self.start(*batch, lane=lane)
            self.device.record(start, lane.stream)
            copies = [first, *(self.start(*batch, lane=lane) for _ in range(_MEASURE_BATCHES))]
            self.device.record(end, lane.stream)
            for copy in copies:
                self.wait(copy)
            self.device.wait(end)
            taken.append(self.device.elapsed(start, end) / _MEASURE_BATCHES)
        for event in (start, end):
            self.device.destroy_event(event)
        return min(taken)

    def close(self) -> None:
        """Waits for nothing: copies must be done. Frees streams, events and lists."""
        self._second.shutdown()
        self.device.use()
        for lane in (*self._lanes, self._engine_lane, self._waiting_lane):
            self.device.destroy_stream(lane.stream)
        for event in self._events:
            self.device.destroy_event(event)
        self._lanes, self._events = [], []
        self._room.close()


def _batch(at: int, half: int, count: int, each: int, costs: CopyCosts) -> Batch:
    """Of `count` runs from the first half of 2 * half bytes to the second."""
    starts = np.arange(count, dtype=np.int64) * each
    runs = Runs(starts, starts + half, np.full(count, each, np.int64))
    return at, at, runs, survey(runs, 2 * half, 2 * half), costs


def _wrapped(count: int, each: int, source_bytes: int, destination_bytes: int) -> Runs:
    """`count` runs of `each` bytes side by side, beginning anew where a region ends."""
    rows = np.arange(count, dtype=np.int64)
    places = [rows % max(1, size // each) * each for size in (source_bytes, destination_bytes)]
    return Runs(places[0], places[1], np.broadcast_to(np.int64(each), (count,)))
