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

FIRST_COPIES = 32  # copies of the first call, so that the GPU begins before the rest is queued;
MOST_COPIES = 512  # the next calls take twice as many each, up to this
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


class BatchCopies:
    """`fail(call, code)` is called, and has to raise, when the driver refuses. `library` is libcuda."""

    def __init__(self, library: Any, fail: Callable[[str, int], None]) -> None:
        self._fail = fail
        self._attributes = _Attributes(_STREAM_ORDER)
        self._first = ctypes.c_size_t(0)  # the copy from which on the attributes count
        self._bad = ctypes.c_size_t(0)  # where CUDA 12 puts the number of a copy that it refuses
        new = getattr(library, "cuMemcpyBatchAsync_v2", None)
        self._batch = new or getattr(library, "cuMemcpyBatchAsync", None)
        self._single = library.cuMemcpyAsync
        behind = [ctypes.byref(self._attributes), ctypes.byref(self._first), ctypes.c_size_t(1)]
        self._behind: list[Any] = behind if new else [*behind, ctypes.byref(self._bad)]

    def __call__(self, destinations: Words, sources: Words, sizes: Words, stream: int) -> None:
        """Queues the copy of `sizes[i]` bytes from `sources[i]` to `destinations[i]`, in no order among each other."""
        on = ctypes.c_void_p(stream)
        if self._batch is None or len(sizes) == 1:
            for to, origin, size in zip(destinations.tolist(), sources.tolist(), sizes.tolist(), strict=True):
                code = self._single(ctypes.c_uint64(to), ctypes.c_uint64(origin), ctypes.c_size_t(size), on)
                self._check("cuMemcpyAsync", code)
            return
        columns = [np.ascontiguousarray(column, np.int64) for column in (destinations, sources, sizes)]
        start, most = 0, FIRST_COPIES
        while start < len(sizes):
            count = min(most, len(sizes) - start)
            lists = [ctypes.c_void_p(column.ctypes.data + 8 * start) for column in columns]
            self._check("cuMemcpyBatchAsync", self._batch(*lists, ctypes.c_size_t(count), *self._behind, on))
            start, most = start + count, min(2 * most, MOST_COPIES)

    def _check(self, call: str, code: int) -> None:
        if code != 0:
            self._fail(call, code)
