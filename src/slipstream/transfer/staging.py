"""Brings GPU memory to where sockets and shared mappings reach it: pinned buffers, filled and emptied in a pipeline.

A transport that cannot touch device memory moves packed pieces of a batch of runs:

    sender     for runs, piece in staging.out(runs): send(runs.destination, piece)
    receiver   with staging.into(runs) as piece: receive_into(piece)      ...      staging.flush()

While one piece is on its way, the next ones are being copied; `slots` of them at most. The copies are those of
`transfer.cuda.copier`, over PCIe: small pages are gathered by one kernel launch a piece that writes the pinned memory
itself, long runs go by the copy engine, whichever is measured to be faster.

A Staging belongs to one thread; threads that share a region have one each.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.transfer.copies import split
from slipstream.transfer.cuda.copier import Copier, Copy
from slipstream.transfer.cuda.launcher import CopySettings
from slipstream.transfer.cuda.memory import PinnedMemory, read_seal
from slipstream.transfer.cuda.plan import CopyCosts, survey
from slipstream.transfer.cuda.runtime import Device
from slipstream.transfer.transports.base import Region, Runs

PIECE_RUNS = 1 << 15


class Staging:
    """Pinned pieces of one GPU region, which a DeviceMemory made.

    `slot_bytes` bounds a piece. Raises MissingExtra without the packages, CudaError when a copy fails; ValueError when
    a run leaves the region.
    """

    def __init__(
        self,
        region: Region,
        slots: int = 4,
        slot_bytes: int = 4 << 20,
        device: Device | None = None,
        copiers: Any = Copier,
    ) -> None:
        self.slot_bytes = slot_bytes
        self._region = region
        self._device = device or Device(region.device)
        self._device.use()
        self._copier: Copier = copiers(self._device, CopySettings())
        self._slots = [PinnedMemory(self._device, slot_bytes) for _ in range(slots)]
        self._free = list(self._slots)
        self._storing: deque[tuple[PinnedMemory, Copy]] = deque()
        self.costs_out, self.costs_in = self._measure()

    def _measure(self) -> tuple[CopyCosts, CopyCosts]:
        seal = read_seal(self._device, self._region.address, self._region.bytes)
        scratch, host = self._region.address + seal.scratch_offset, self._slots[0].address
        self._copier.prepare(scratch, [self._region.page_bytes])
        region = self._region
        out = self._copier.measure(region.address, region.bytes, host, self.slot_bytes, time.perf_counter)
        back = self._copier.measure(host, self.slot_bytes, scratch, seal.scratch_bytes, time.perf_counter)
        return out, back

    def out(self, runs: Runs, after: int | None = None) -> Iterator[tuple[Runs, NDArray[np.uint8]]]:
        """The bytes of `runs.source` in pieces, in order: (the runs of a piece, its bytes packed one behind the other).

        The array is valid until the next step. `after` is an event that the source is ready behind.
        """
        if len(runs.length):
            survey(runs, self._region.bytes, 1 << 62)
        pieces = split(runs, self.slot_bytes, PIECE_RUNS)
        fetching: deque[tuple[Runs, PinnedMemory, Copy]] = deque()
        try:
            while True:
                while self._free and (piece := next(pieces, None)) is not None:
                    slot = self._free.pop()
                    fetching.append((piece, slot, self._fetch(piece, slot, after)))
                if not fetching:
                    if self._storing:  # slots are still being emptied
                        self._reclaim()
                        continue
                    return
                piece, slot, copy = fetching.popleft()
                try:
                    self._copier.wait(copy)
                    yield piece, slot.array[: piece.total]
                finally:
                    self._free.append(slot)
        finally:
            for _, slot, copy in fetching:
                with contextlib.suppress(Exception):  # the first failure is on its way to the caller
                    self._copier.wait(copy)
                self._free.append(slot)

    def _fetch(self, piece: Runs, slot: PinnedMemory, after: int | None) -> Copy:
        packed = Runs(piece.source, _packed(piece.length), piece.length)
        seen = survey(packed, self._region.bytes, self.slot_bytes)
        return self._copier.start(self._region.address, slot.address, packed, seen, self.costs_out, after)

    @contextlib.contextmanager
    def into(self, runs: Runs) -> Iterator[NDArray[np.uint8]]:
        """A buffer of `runs.total` bytes, at most `slot_bytes`; when it has been filled, its bytes go to the places
        that `runs.destination` names. They are in place after `flush`; an exception inside drops them."""
        if runs.total > self.slot_bytes:
            raise ValueError(f"a piece of {runs.total} bytes does not fit a slot of {self.slot_bytes}")
        packed = Runs(_packed(runs.length), runs.destination, runs.length)
        seen = survey(packed, self.slot_bytes, self._region.bytes)
        while not self._free:
            self._reclaim()
        slot = self._free.pop()
        try:
            yield slot.array[: seen.total]
            copy = self._copier.start(slot.address, self._region.address, packed, seen, self.costs_in)
        except BaseException:
            self._free.append(slot)
            raise
        self._storing.append((slot, copy))

    def _reclaim(self) -> None:
        slot, copy = self._storing.popleft()
        try:
            self._copier.wait(copy)
        finally:
            self._free.append(slot)

    def flush(self) -> None:
        """Returns when all that was filled is in place."""
        while self._storing:
            self._reclaim()

    def close(self) -> None:
        """Waits for what is under way and frees the buffers."""
        with contextlib.suppress(Exception):  # a lost context has nothing under way any more
            self.flush()
        for slot in self._slots:
            slot.close()
        self._copier.close()


def _packed(length: NDArray[np.int64]) -> NDArray[np.int64]:
    """Offsets of runs that lie one behind the other."""
    return np.cumsum(length) - length
