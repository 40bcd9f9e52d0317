"""Lists of runs for the kernels that copy: what a launch moves, and the memory that it is written into.

A batch is launched in parts, the first of them short where the link would else wait for the list. A list lives in a
slot of pinned memory, and of the device's where the kernel does not read it in place, until its batch is done. Slots
are made as batches in flight need them, and stay. Short lists have theirs from the start (`CopySettings.short_lists`):
making one can wait for the GPU, which the threads that start short copies must not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipstream.transfer.cuda.launcher import SHORT_LIST_BYTES
from slipstream.transfer.cuda.memory import PinnedMemory
from slipstream.transfer.cuda.plan import WORD, Survey, cut_long_runs
from slipstream.transfer.cuda.runtime import Device
from slipstream.transfer.transports.base import Runs

FIRST_RUNS = 1 << 11  # runs of the first launch of a batch; while it runs, the list of the next is made, four times
_LAUNCH_RUNS = 1 << 19  # as long, and so on up to this
MOST_RUNS = 1 << 20  # of a launch behind others, whose list is made while they run
_LEAST_BYTES = 16 << 13  # smallest list buffer: 8192 runs of one length


class KernelList(NamedTuple):
    """What one launch moves. `length` is that of all runs, or 0 when they differ; `longest` is the length of the
    longest when all addresses and lengths are multiples of WORD, else 0."""

    runs: Runs
    length: int
    longest: int

    @property
    def bytes(self) -> int:
        return len(self.runs.length) * (16 if self.length else 24)

    def columns(self, room: NDArray[np.uint8]) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """(place, values) of each column, one behind the other, as the kernels read them: offsets in bytes, then
        unequal lengths."""
        values = [self.runs.source, self.runs.destination] + ([] if self.length else [self.runs.length])
        places = room[: self.bytes].view(np.int64).reshape(len(values), -1)
        return list(zip(places, values, strict=True))

    def write(self, room: NDArray[np.uint8]) -> None:
        for place, values in self.columns(room):
            place[:] = values


def kernel_lists(
    source_at: int, destination_at: int, runs: Runs, seen: Survey, first: int = FIRST_RUNS
) -> Iterator[KernelList]:
    """The launches that move `runs`, the first with `first` runs."""
    aligned = seen.alignment >= WORD and (source_at | destination_at) % WORD == 0
    length = seen.length if aligned else 0
    if not length:
        runs = cut_long_runs(runs)
    longest = length or (int(runs.length.max()) if aligned else 0)
    yield from parts_of(runs, length, longest, first, _LAUNCH_RUNS)


def parts_of(runs: Runs, length: int, longest: int, first: int, most: int) -> Iterator[KernelList]:
    """In launches that grow from `first` runs to `most`."""
    start, size = 0, min(first, most)
    while start < len(runs.length):
        yield KernelList(rows_of(runs, slice(start, start + size)), length, longest)
        start, size = start + size, min(4 * size, most)


def rows_of(runs: Runs, rows: NDArray[np.int64] | slice | None) -> Runs:
    return runs if rows is None else Runs(runs.source[rows], runs.destination[rows], runs.length[rows])


@dataclass(eq=False, slots=True)
class Slot:
    """Room for a list: pinned memory to write it and, unless it is short, device memory to read it from."""

    bytes: int
    array: NDArray[np.uint8]
    pinned_at: int
    device_at: int = 0


class Room:
    """The slots of a copier: `short` ones for short lists, and `ready` others, from the start."""

    def __init__(self, device: Device, *, short: int, ready: int) -> None:
        self._device = device
        self._pinned: list[PinnedMemory] = []
        self._on_device: list[int] = []
        self._slots: dict[int, list[Slot]] = {}  # that are free, by their bytes, the smallest first
        self.free(self._short(short))
        self.free([self._new(_LEAST_BYTES) for _ in range(ready)])

    def take(self, size: int) -> Slot:
        """The smallest free one that is large enough; a new one where there is none."""
        for have, slots in self._slots.items():
            if have >= size and slots:
                return slots.pop()
        return self._new(max(_LEAST_BYTES, 1 << (size - 1).bit_length()))

    def free(self, slots: list[Slot]) -> None:
        for slot in slots:
            if slot.bytes not in self._slots:
                self._slots = dict(sorted({**self._slots, slot.bytes: []}.items()))
            self._slots[slot.bytes].append(slot)

    def _new(self, size: int) -> Slot:
        pinned = PinnedMemory(self._device, size)
        self._pinned.append(pinned)
        self._on_device.append(self._device.allocate(size))
        return Slot(size, pinned.array, pinned.address, self._on_device[-1])

    def _short(self, count: int) -> list[Slot]:
        """In one piece of pinned memory; the kernel reads lists of this length in place."""
        if count == 0:
            return []
        size = SHORT_LIST_BYTES
        pinned = PinnedMemory(self._device, count * size)
        self._pinned.append(pinned)
        starts = range(0, count * size, size)
        return [Slot(size, pinned.array[start : start + size], pinned.address + start) for start in starts]

    def close(self) -> None:
        """Nothing may be under way any more."""
        self._slots = {}
        for pinned in self._pinned:
            pinned.close()
        for address in self._on_device:
            self._device.free(address)
        self._pinned, self._on_device = [], []
