"""Copies runs between memories that this process can address, for `local`, `shm` and the staging of CPU pools.

The queue is worked off by the mover in slices, so that a large copy does not keep it from other peers, and several
copies advance in turn. How a slice is copied follows from what a run costs beside its bytes, and from what it costs to
give up the interpreter lock: nothing while no other thread wants it, up to a switch interval (5 ms) when the engine's
thread is busy in Python.

* A few KiB in all: memmoves that keep the lock; they are over before anyone misses it.
* Runs below 12 KiB: numpy gathers 512 KiB of them into a buffer that stays in the processor's cache and scatters them
  from there, without the lock and without a step of Python a run; where the runs lie side by side at one end, there is
  no buffer. Two busy AVX2 cores, 32 MiB scattered, GB a processor second, beside a loop of memmoves: 1 KiB 2.8 against
  1.0, 4 KiB 3.6 against 2.7, 8 KiB 4.2 against 3.9, 16 KiB 4.5 against 5.5.
* Longer runs: a memmove each, without the lock.
* When such a step has taken so long that it must have waited for the lock, the rest of the slice goes by
  `process_vm_writev` of this process into itself, which gives the lock up once in 512 runs. It moves less (64 KiB
  4.3 against 6.7), but more beside a thread that is always busy in Python (4 KiB 0.5 GB/s against 0.2).
"""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import RouteUnavailable
from slipstream.transfer.copies import split
from slipstream.transfer.transports.base import Completion, Region, Runs
from slipstream.transfer.transports.bell import Bell

AT_ONCE = 64 << 10  # bytes that are copied without giving up the lock
SMALL_RUN = 12 << 10
LEAST_ROW = 64
STEP_BYTES = 512 << 10  # a core's second-level cache
BATCH = 512  # vectors of one system call, which takes 1,024
STALL_S = 0.002
SLOWEST = 1e9  # bytes a second: what takes STALL_S longer than at this rate has waited for the lock
CACHE_LINE = 64
SLICE_BYTES = 4 << 20
POLL_BYTES = 16 << 20

_MEMMOVE = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove_keeping_the_lock = ctypes.PYFUNCTYPE(*_MEMMOVE)(("memmove", ctypes.CDLL(None)))


def host_array(region: Region, transport: str) -> NDArray[np.uint8]:
    """The region as bytes that the CPU may touch. Raises RouteUnavailable when it is memory of a device."""
    if region.kind != "cpu" or region.array is None:
        raise RouteUnavailable(f"{transport} moves memory of the CPU; the KV pool of this rank is on {region.device}")
    return region.array


class Copier:
    """Copies between two base addresses of this process. Whoever calls has checked the bounds. For one thread."""

    def __init__(self) -> None:
        self._vectored = _process_vm_writev()
        self._pid = os.getpid()
        self._between: NDArray[np.uint8] | None = None

    def copy(self, destination: int, source: int, runs: Runs) -> None:
        if runs.total <= AT_ONCE:
            _move_each(_memmove_keeping_the_lock, destination, source, runs)
            return
        small = runs.length < SMALL_RUN
        if small.all():
            self._copy_small(destination, source, runs)
        elif not small.any():
            self._copy_large(destination, source, runs)
        else:
            self._copy_small(destination, source, _chosen(runs, small))
            self._copy_large(destination, source, _chosen(runs, ~small))

    def _copy_large(self, destination: int, source: int, runs: Runs) -> None:
        move, clock = ctypes.memmove, time.perf_counter
        began = clock()
        for index, (to, origin, length) in enumerate(_calls(destination, source, runs)):
            move(to, origin, length)
            now = clock()
            if now - began > STALL_S + length / SLOWEST:
                self._copy_vectored(destination, source, _chosen(runs, slice(index + 1, None)))
                return
            began = now

    def _copy_small(self, destination: int, source: int, runs: Runs) -> None:
        """Both ends seen as rows of one width."""
        low_from, low_to = int(runs.source.min()), int(runs.destination.min())
        offsets_from, offsets_to = runs.source - low_from, runs.destination - low_to
        width = _row_width(runs.length, offsets_from, offsets_to)
        if width < LEAST_ROW:
            self._copy_vectored(destination, source, runs)
            return
        rows_from, rows_to = offsets_from // width, offsets_to // width
        if runs.total > width * len(rows_to):
            count = runs.length // width
            inside = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
            rows_from, rows_to = np.repeat(rows_from, count) + inside, np.repeat(rows_to, count) + inside
        done = self._copy_rows(destination + low_to, rows_to, source + low_from, rows_from, width)
        left = len(rows_to) - done
        rest = Runs(rows_from[done:] * width, rows_to[done:] * width, np.full(left, width, np.int64))
        self._copy_vectored(destination + low_to, source + low_from, rest)

    def _copy_rows(
        self, destination: int, rows_to: NDArray[np.int64], source: int, rows_from: NDArray[np.int64], width: int
    ) -> int:
        """Copies rows until it has to wait for the lock; how many there were."""
        origin, target = (
            _rows(source, int(rows_from.max()) + 1, width),
            _rows(destination, int(rows_to.max()) + 1, width),
        )
        jumps_from, jumps_to = (np.cumsum(np.diff(rows, prepend=rows[0] - 1) != 1) for rows in (rows_from, rows_to))
        step = STEP_BYTES // width
        if self._between is None:
            self._between = _aligned(STEP_BYTES)
        for first in range(0, len(rows_to), step):
            began = time.perf_counter()
            end = min(first + step, len(rows_to))
            come_from, go_to = rows_from[first:end], rows_to[first:end]
            if jumps_to[first] == jumps_to[end - 1]:
                np.take(origin, come_from, out=target[go_to[0] : go_to[-1] + 1], mode="clip")
            elif jumps_from[first] == jumps_from[end - 1]:
                target[go_to] = origin[come_from[0] : come_from[-1] + 1]
            else:
                between = self._between[: (end - first) * width].view(origin.dtype)
                np.take(origin, come_from, out=between, mode="clip")
                target[go_to] = between
            if time.perf_counter() - began > STALL_S + STEP_BYTES / SLOWEST:
                return end
        return len(rows_to)

    def _copy_vectored(self, destination: int, source: int, runs: Runs) -> None:
        for first in range(0, len(runs.length), BATCH):
            piece = _chosen(runs, slice(first, first + BATCH))
            if self._vectored is None or not self._call(destination, source, piece):
                self._vectored = None  # a sandbox forbids the call; nothing is lost but speed
                _move_each(ctypes.memmove, destination, source, piece)

    def _call(self, destination: int, source: int, runs: Runs) -> bool:
        count = len(runs.length)
        local, remote = np.empty((count, 2), np.int64), np.empty((count, 2), np.int64)
        local[:, 0], remote[:, 0] = runs.source + source, runs.destination + destination
        local[:, 1] = remote[:, 1] = runs.length
        assert self._vectored is not None
        copied = self._vectored(self._pid, local.ctypes.data, count, remote.ctypes.data, count, 0)
        return copied == runs.total


def _row_width(length: NDArray[np.int64], *offsets: NDArray[np.int64]) -> int:
    """The largest width that divides all of these."""
    first = int(length[0])
    if (length == first).all() and not any((column % first).any() for column in offsets):
        return first
    return math.gcd(*(int(np.gcd.reduce(column)) for column in (length, *offsets)))


def _chosen(runs: Runs, rows: Any) -> Runs:
    return Runs(runs.source[rows], runs.destination[rows], runs.length[rows])


def _calls(destination: int, source: int, runs: Runs) -> Iterator[tuple[int, int, int]]:
    """The arguments of each memmove."""
    to, origin = (runs.destination + destination).tolist(), (runs.source + source).tolist()
    return zip(to, origin, runs.length.tolist(), strict=True)


def _move_each(move: Callable[[int, int, int], Any], destination: int, source: int, runs: Runs) -> None:
    for to, origin, length in _calls(destination, source, runs):
        move(to, origin, length)


def _aligned(size: int) -> NDArray[np.uint8]:
    """A buffer that starts a cache line: from 16 bytes behind one, copies take twice as long."""
    room = np.empty(size + CACHE_LINE, np.uint8)
    first = -int(room.ctypes.data) % CACHE_LINE
    return room[first : first + size]


class _Memory:
    """What numpy asks for when it is to look at memory that nothing owns."""

    def __init__(self, address: int, count: int, width: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "shape": (count,),
            "typestr": f"|V{width}",
            "data": (address, False),
        }


def _rows(address: int, count: int, width: int) -> Any:
    """`count` rows of `width` bytes each, from `address` on; to be forgotten before the memory goes."""
    return np.asarray(_Memory(address, count, width))


def _process_vm_writev() -> ctypes._CFuncPtr | None:  # type: ignore[name-defined]
    call = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_writev", None)
    if call is not None:
        size, pointer = ctypes.c_ulong, ctypes.c_void_p
        call.argtypes = [ctypes.c_int, pointer, size, pointer, size, size]
        call.restype = ctypes.c_ssize_t
    return call


class _Copy:
    """One ticket: what is left of it."""

    def __init__(self, ticket: int, destination: int, pieces: Iterator[Runs]) -> None:
        self.ticket, self.destination, self.pieces = ticket, destination, pieces


class CopyQueue:
    """Tickets of copies out of one source region, worked off by whoever calls `advance`: the remotes in turn, and the
    tickets of one remote in the order they came.

    All methods belong to the mover. Rings `bell` as long as there is work. Nothing is in flight between two calls, so
    a ticket can be failed at any of these moments.
    """

    def __init__(self, source: int, bell: Bell) -> None:
        self._source = source
        self._bell = bell
        self._copier = Copier()
        self._lines: dict[object, deque[_Copy]] = {}  # remote -> its tickets; the first remote is the next to be served
        self._failed: list[Completion] = []
        self._tickets = itertools.count(1)

    def add(self, owner: object, destination: int, runs: Runs) -> int:
        copy = _Copy(next(self._tickets), destination, split(runs, SLICE_BYTES, 1 << 20))
        self._lines.setdefault(owner, deque()).append(copy)
        self._bell.ring()
        return copy.ticket

    def fail(self, owner: object, reason: str) -> None:
        """Ends all tickets of one remote; `advance` reports them."""
        failed = self._lines.pop(owner, None)
        if failed:
            self._failed += [Completion(copy.ticket, reason) for copy in failed]
            self._bell.ring()

    def advance(self) -> list[Completion]:
        """Copies for a while and says what ended. The caller has hushed the bell."""
        done, self._failed = self._failed, []
        budget = POLL_BYTES
        while self._lines and budget > 0:
            owner = next(iter(self._lines))
            line = self._lines.pop(owner)
            copy = line[0]
            piece = next(copy.pieces, None)
            if piece is None:
                line.popleft()
                done.append(Completion(copy.ticket))
            else:
                self._copier.copy(copy.destination, self._source, piece)
                budget -= piece.total
            if line:
                self._lines[owner] = line
        if self._lines:
            self._bell.ring()
        return done
