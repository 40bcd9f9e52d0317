"""Queues many copies by the copy engine, in few calls of the driver.

The lists go to the driver as they are, arrays of addresses and sizes: `cuda-bindings` would make an object of each
entry, which takes longer than the driver takes for the copy. Drivers older than CUDA 12.8 cannot take a list; they get
one call for each copy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.int64]

FIRST_COPIES = 16  # copies of the first call, so that an idle GPU begins before the rest is queued;
MOST_COPIES = 512  # the next calls take twice as many each, up to this
_ROOM = 1024  # copies that a table has room for at first
_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: sources are read when their turn on the stream has come


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes. The two locations count for managed memory alone."""

    _fields_ = [
        ("access_order", ctypes.c_int),
        ("source_kind", ctypes.c_int),
        ("source_id", ctypes.c_int),
        ("destination_kind", ctypes.c_int),
        ("destination_id", ctypes.c_int),
        ("flags", ctypes.c_uint),
    ]


class _Table:
    """Three columns of words at addresses that are known: to ask numpy for one takes longer than to copy a column."""

    def __init__(self, room: int) -> None:
        self.columns = np.empty((3, room), np.int64)
        self.at, self.room = int(self.columns.ctypes.data), room


class BatchCopies:
    """`fail(call, code)` is called, and has to raise, when the driver refuses. `library` is libcuda.

    Threads may call at the same time: each takes a table of its own, which the driver has read when a call returns.
    """

    def __init__(self, library: Any, fail: Callable[[str, int], None]) -> None:
        self._fail = fail
        self._attributes = _Attributes(_STREAM_ORDER)
        self._first = ctypes.c_size_t(0)  # the copy from which on the attributes count
        self._bad = ctypes.c_size_t(0)  # where CUDA 12 puts the number of a copy that it refuses
        new = getattr(library, "cuMemcpyBatchAsync_v2", None)
        self._batch = new or getattr(library, "cuMemcpyBatchAsync", None)
        self._single = library.cuMemcpyAsync
        self._single.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
        behind = [ctypes.addressof(self._attributes), ctypes.addressof(self._first), 1]
        self._behind = behind if new else [*behind, ctypes.addressof(self._bad)]
        if self._batch is not None:
            kinds = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p][: len(self._behind)]
            self._batch.argtypes = [*[ctypes.c_void_p] * 3, ctypes.c_size_t, *kinds, ctypes.c_void_p]
        self._tables: list[_Table] = []

    def __call__(
        self, destinations: Words, sources: Words, sizes: Words, stream: int, first: int = FIRST_COPIES
    ) -> None:
        """Queues the copy of `sizes[i]` bytes from `sources[i]` to `destinations[i]`, in no order among each other;
        `first` of them in the first call."""
        count = len(sizes)
        if self._batch is None or count == 1:
            for to, origin, size in zip(destinations.tolist(), sources.tolist(), sizes.tolist(), strict=True):
                code = self._single(to, origin, size, stream)
                if code != 0:
                    self._fail("cuMemcpyAsync", code)
            return
        try:
            table = self._tables.pop()
        except IndexError:
            table = _Table(_ROOM)
        if table.room < count:
            table = _Table(1 << (count - 1).bit_length())
        try:
            self._by_lists(self._batch, table, destinations, sources, sizes, stream, first)
        finally:
            self._tables.append(table)

    def _by_lists(
        self, call: Any, table: _Table, destinations: Words, sources: Words, sizes: Words, stream: int, first: int
    ) -> None:
        to, origin, size = table.columns
        count = len(sizes)
        to[:count], origin[:count], size[:count] = destinations, sources, sizes
        row = 8 * table.room
        start, most = 0, first
        while start < count:
            some = min(most, count - start)
            at = table.at + 8 * start
            code = call(at, at + row, at + 2 * row, some, *self._behind, stream)
            if code != 0:
                self._fail("cuMemcpyBatchAsync", code)
            start, most = start + some, min(2 * most, MOST_COPIES)
