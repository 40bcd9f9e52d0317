"""The ring by which rank 0 hands its orders to the other ranks of its worker: one writer, several readers.

Orders lie in memory that all have mapped (a memfd, which no name outlives). An order is cut into frames of at most a
quarter of the ring, so that any order fits through any ring. For each reader there is a counter that only it writes:
up to there it has taken everything; the writer waits for the slowest when the ring is full. Beside it the reader keeps
notes that cost it a store: how far it is, and that it lives. So the writer can tell who is behind, without asking.

A reader sleeps on an eventfd of its own, which the writer raises by one for each frame, and it takes no frame that the
eventfd has not told of. That wakes it without a spinning core, and the kernel's lock inside makes sure that what it
then reads is what was written. Frames are numbered; a wrong number is an error, never a guess.
"""

from __future__ import annotations

import mmap
import os
import select
import struct
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import ConfigError, SlipstreamError

FRAME = struct.Struct("<QII")  # number, bytes, flags
ALIGNED = FRAME.size
CONTINUED = 1  # the order goes on in the next frame
SKIP = 2  # nothing here: the next frame is at the start of the ring
COUNTER_BYTES = 64  # a cache line each
FULL_PAUSE_S = 50e-6
LONGEST_PAUSE_S = 2e-3


class Notes(NamedTuple):
    """What a reader has said of itself: the last steps that it has begun and ended, and a count that grows while it
    lives; 0 before anything was said."""

    begun: int
    ended: int
    beats: int


class RingBroken(SlipstreamError):
    """An order could not be handed over, or what was read is no order."""

    code = "ring_broken"


class RingWriter:
    """Rank 0's end. `capacity` bytes for `readers` readers. Used by one thread.

    `fds(reader)` are the descriptors that reader `reader` has to inherit. `alive` is asked while the ring is full.
    """

    def __init__(self, readers: int, capacity: int = 4 << 20, alive: Callable[[], bool] = lambda: True) -> None:
        if not hasattr(os, "eventfd") or not hasattr(os, "memfd_create"):
            raise ConfigError("a worker of several ranks needs memfd and eventfd, which only Linux has; use --tp 1.")
        self.readers, self.capacity = readers, capacity // ALIGNED * ALIGNED
        self._alive = alive
        self._fd = os.memfd_create("slipstream-ranks", os.MFD_CLOEXEC)
        size = readers * COUNTER_BYTES + self.capacity
        os.ftruncate(self._fd, size)
        self._map = mmap.mmap(self._fd, size)
        self._taken, self._data = _views(self._map, readers)
        self._bells = [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(readers)]
        self._written = 0  # bytes since the start, skipped ones included
        self._frames = 0

    def fds(self, reader: int) -> tuple[int, int]:
        return self._fd, self._bells[reader]

    def notes(self, reader: int) -> Notes:
        """From any thread, while the ring is open."""
        return Notes(*self._taken[reader, 1:4].tolist())

    def put(self, parts: Sequence[bytes], wait_s: float = 60.0) -> None:
        """Hands over one order, the parts of which lie one behind the other.

        Waits while the ring is full. Raises RingBroken when that takes longer than `wait_s`, or a reader is gone.
        """
        order = b"".join(parts)
        most = self.capacity // 4 - FRAME.size
        for first in range(0, len(order) or 1, most):
            piece = order[first : first + most]
            self._put(piece, CONTINUED if first + most < len(order) else 0, wait_s)

    def _put(self, piece: bytes, flags: int, wait_s: float) -> None:
        size = FRAME.size + -(-len(piece) // ALIGNED) * ALIGNED
        at = self._written % self.capacity
        left = self.capacity - at
        if left < size:
            self._wait_for(left, wait_s)
            FRAME.pack_into(self._data.data, at, self._frames, 0, SKIP)
            self._written += left
            self._frames += 1
            self._ring()
            at = 0
        self._wait_for(size, wait_s)
        FRAME.pack_into(self._data.data, at, self._frames, len(piece), flags)
        self._data[at + FRAME.size : at + FRAME.size + len(piece)] = np.frombuffer(piece, np.uint8)
        self._written += size
        self._frames += 1
        self._ring()

    def _ring(self) -> None:
        for bell in self._bells:
            os.eventfd_write(bell, 1)

    def _wait_for(self, size: int, wait_s: float) -> None:
        if self._room() >= size:
            return
        deadline, pause = time.monotonic() + wait_s, FULL_PAUSE_S
        while self._room() < size:
            if not self._alive():
                raise RingBroken("a rank of this worker has ended")
            if time.monotonic() > deadline:
                slowest = int(self._taken[:, 0].argmin()) + 1
                raise RingBroken(f"rank {slowest} of this worker has taken no orders for {wait_s:.0f} s")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _room(self) -> int:
        return self.capacity - (self._written - int(self._taken[:, 0].min()))

    def close(self) -> None:
        """May be called twice."""
        if self._fd < 0:
            return
        for fd in (self._fd, *self._bells):
            os.close(fd)
        self._fd = -1
        del self._taken, self._data
        self._map.close()


class RingReader:
    """Another rank's end, number `reader` of `readers`, from the two inherited descriptors. Used by one thread."""

    def __init__(self, fds: tuple[int, int], reader: int, readers: int) -> None:
        fd, self._bell = fds
        self._map = mmap.mmap(fd, os.fstat(fd).st_size)
        os.close(fd)
        self._taken, self._data = _views(self._map, readers)
        self._reader, self._capacity = reader, len(self._data)
        self._told = 0  # frames that the bell has told of and that have not been taken
        self._frames = self._read = 0
        self._poll = select.poll()
        self._poll.register(self._bell, select.POLLIN)

    def get(self, timeout_s: float | None = None) -> bytes | None:
        """The next order, or None when none comes in time; without a time-out it sleeps until one comes.

        Raises RingBroken when what comes is no order.
        """
        pieces: list[bytes] = []
        while True:
            if not self._told and not self._wait(timeout_s if not pieces else None):
                return None
            piece, flags = self._take()
            if flags & SKIP:
                continue
            pieces.append(piece)
            if not flags & CONTINUED:
                return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def begin(self, step: int) -> None:
        """Notes that this step is being executed here."""
        self._taken[self._reader, 1] = step

    def end(self, step: int) -> None:
        """Notes that this step is over here."""
        self._taken[self._reader, 2] = step

    def beat(self) -> None:
        """Notes that this process lives. One other thread than that of the rest may call it."""
        self._taken[self._reader, 3] += 1

    def _wait(self, timeout_s: float | None) -> bool:
        if not self._poll.poll(None if timeout_s is None else max(0.0, 1000 * timeout_s)):
            return False
        self._told += os.eventfd_read(self._bell)
        return True

    def _take(self) -> tuple[bytes, int]:
        at = self._read % self._capacity
        number, size, flags = FRAME.unpack_from(self._data.data, at)
        if number != self._frames or size > self._capacity - at - FRAME.size:
            raise RingBroken(f"frame {self._frames} was expected, found was number {number} of {size} bytes")
        piece = self._data[at + FRAME.size : at + FRAME.size + size].tobytes()
        skipped = self._capacity - at
        self._read += skipped if flags & SKIP else FRAME.size + -(-size // ALIGNED) * ALIGNED
        self._frames += 1
        self._told -= 1
        self._taken[self._reader, 0] = self._read
        return piece, flags

    def close(self) -> None:
        os.close(self._bell)
        del self._taken, self._data
        self._map.close()


def _views(mapped: mmap.mmap, readers: int) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """The counters [readers, cache line], of which each reader uses the first, and the ring's bytes."""
    whole = np.frombuffer(mapped, np.uint8)
    edge = readers * COUNTER_BYTES
    return whole[:edge].view(np.int64).reshape(readers, -1), whole[edge:]
