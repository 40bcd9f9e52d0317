"""Copies runs between memories that this process can address, for `local` and `shm`.

The queue is worked off by the mover in slices, so that a large copy does not keep it from other peers, and several
copies advance in turn. Runs of some size go by memmove, which gives up the interpreter lock once a run; many small runs
go by one `process_vm_writev` of this process into itself, which gives it up once a batch: giving it up costs up to a
switch interval when the engine's thread is busy, and a batch of 512 pages must not pay that 512 times. Measured on two
AVX2 cores, scattered: below 16 KiB the call moves as much as a loop of memmoves (8 KiB: 3.6 against 3.4 GB/s), above it
less (128 KiB: 5.3 against 7.2).
"""

from __future__ import annotations

import ctypes
import itertools
import os
from collections import deque
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import RouteUnavailable
from slipstream.transfer.copies import split
from slipstream.transfer.transports.base import Completion, Region, Runs
from slipstream.transfer.transports.bell import Bell

SMALL_RUN = 16 << 10
BATCH = 512
SLICE_BYTES = 4 << 20
POLL_BYTES = 16 << 20


def host_array(region: Region, transport: str) -> NDArray[np.uint8]:
    """The region as bytes that the CPU may touch. Raises RouteUnavailable when it is memory of a device."""
    if region.kind != "cpu" or region.array is None:
        raise RouteUnavailable(f"{transport} moves memory of the CPU; the KV pool of this rank is on {region.device}")
    return region.array


class Copier:
    """Copies between two base addresses of this process. Whoever calls has checked the bounds."""

    def __init__(self) -> None:
        self._batched = _process_vm_writev()
        self._pid = os.getpid()

    def copy(self, destination: int, source: int, runs: Runs) -> None:
        small = runs.length < SMALL_RUN
        if self._batched is not None and small.any():
            self._copy_small(
                destination, source, Runs(*(c[small] for c in (runs.source, runs.destination, runs.length)))
            )
            large = ~small
            runs = Runs(runs.source[large], runs.destination[large], runs.length[large])
        self._copy_each(destination, source, runs)

    def _copy_each(self, destination: int, source: int, runs: Runs) -> None:
        move = ctypes.memmove
        destinations, sources = (runs.destination + destination).tolist(), (runs.source + source).tolist()
        for to, origin, length in zip(destinations, sources, runs.length.tolist(), strict=True):
            move(to, origin, length)

    def _copy_small(self, destination: int, source: int, runs: Runs) -> None:
        for first in range(0, len(runs.length), BATCH):
            part = slice(first, first + BATCH)
            piece = Runs(runs.source[part], runs.destination[part], runs.length[part])
            if self._batched is None or not self._copy_batch(destination, source, piece):
                self._batched = None  # a sandbox forbids the call; nothing is lost but speed
                self._copy_each(destination, source, piece)

    def _copy_batch(self, destination: int, source: int, runs: Runs) -> bool:
        count = len(runs.length)
        local, remote = np.empty((count, 2), np.int64), np.empty((count, 2), np.int64)
        local[:, 0], remote[:, 0] = runs.source + source, runs.destination + destination
        local[:, 1] = remote[:, 1] = runs.length
        assert self._batched is not None
        copied = self._batched(self._pid, local.ctypes.data, count, remote.ctypes.data, count, 0)
        return copied == runs.total


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
