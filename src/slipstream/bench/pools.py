"""Memory for transfer benchmarks, and the proof that what arrived is what was sent.

Every 8-byte word of a filled pool is a function of its place and a seed, so that the receiver knows what must lie
where without being told any byte of it; a poisoned pool holds one value everywhere, so that a byte written outside the
pages that were meant is seen. The same arithmetic runs in numpy on the host and in torch on a GPU.
"""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from slipstream.kv.layout import KVLayout
from slipstream.kv.pool import HostPool
from slipstream.transfer.transports.base import Region

MULTIPLIER = -7046029254386353131  # odd, so that no two places of a pool hold the same word
POISON = -6148914691236517206  # 0xAAAA...
PROBE_BYTES = 64 << 10
_AT_ONCE = 4 << 20  # words checked together


class BenchPool(Protocol):
    """`region` is what transports see; offsets and pages count 8-byte words and pages from its start."""

    region: Region
    bytes: int

    def fill(self, seed: int) -> None: ...

    def poison(self) -> None: ...

    def check(self, page: int, here: NDArray[np.int64], there: NDArray[np.int64], seed: int) -> str:
        """Empty when page here[i] holds what there[i] of a pool filled with `seed` held, and all else is poison."""
        ...

    def close(self) -> None: ...


class HostBenchPool:
    """A pool that other processes can map."""

    def __init__(self, size: int) -> None:
        self.bytes = size
        self._pool = HostPool(_layout(size), 1, PROBE_BYTES)
        self.region = self._pool.region
        self._words: NDArray[np.int64] | None = self._pool.array[:size].view(np.int64)

    @property
    def words(self) -> NDArray[np.int64]:
        assert self._words is not None
        return self._words

    def fill(self, seed: int) -> None:
        for start in range(0, len(self.words), _AT_ONCE):
            part = self.words[start : start + _AT_ONCE]
            part[:] = np.arange(start, start + len(part), dtype=np.int64) * np.int64(MULTIPLIER) + np.int64(seed)

    def poison(self) -> None:
        self.words[:] = POISON

    def check(self, page: int, here: NDArray[np.int64], there: NDArray[np.int64], seed: int) -> str:
        rows = self.words[: self.bytes // page * (page // 8)].reshape(-1, page // 8)
        column = np.arange(page // 8, dtype=np.int64)
        step = max(1, _AT_ONCE * 8 // page)
        for start in range(0, len(here), step):
            part = slice(start, start + step)
            want = (there[part, None] * (page // 8) + column) * np.int64(MULTIPLIER) + np.int64(seed)
            if not bool((rows[here[part]] == want).all()):
                return _wrong(page, start, step)
        kept = np.ones(len(rows), bool)
        kept[here] = False
        return "" if bool((rows[kept] == POISON).all()) else "bytes outside the destination pages have changed"

    def close(self) -> None:
        self._words = None
        self._pool.close()


class DeviceBenchPool:
    """A DeviceMemory, looked at through torch."""

    def __init__(self, size: int, device: str) -> None:
        import torch

        from slipstream.transfer.cuda.memory import DeviceMemory

        self.bytes = size
        self.memory = DeviceMemory.allocate(_layout(size), 1, PROBE_BYTES, device)
        self.region = self.memory.region
        self.torch: Any = torch
        torch.cuda.set_device(self.region.device_index)
        whole = torch.as_tensor(self.memory, device=f"cuda:{self.region.device_index}")
        self.words: Any = whole[:size].view(torch.int64)

    def fill(self, seed: int) -> None:
        for start in range(0, self.words.numel(), 8 * _AT_ONCE):
            part = self.words[start : start + 8 * _AT_ONCE]
            places = self.torch.arange(start, start + part.numel(), device=part.device)
            part.copy_(places * MULTIPLIER + seed)
        self.torch.cuda.synchronize()

    def poison(self) -> None:
        self.words.fill_(POISON)
        self.torch.cuda.synchronize()

    def check(self, page: int, here: NDArray[np.int64], there: NDArray[np.int64], seed: int) -> str:
        torch, device = self.torch, self.words.device
        torch.cuda.synchronize()
        rows = self.words[: self.bytes // page * (page // 8)].view(-1, page // 8)
        mine, theirs = (torch.as_tensor(pages, device=device) for pages in (here, there))
        column = torch.arange(page // 8, device=device)
        step = max(1, 8 * _AT_ONCE * 8 // page)
        for start in range(0, len(here), step):
            want = (theirs[start : start + step, None] * (page // 8) + column) * MULTIPLIER + seed
            if not bool((rows[mine[start : start + step]] == want).all()):
                return _wrong(page, start, step)
        kept = torch.ones(len(rows), dtype=torch.bool, device=device)
        kept[mine] = False
        others = kept.nonzero().flatten()
        for start in range(0, len(others), step):
            if not bool((rows[others[start : start + step]] == POISON).all()):
                return "bytes outside the destination pages have changed"
        return ""

    def close(self) -> None:
        self.words = None
        self.memory.close()


def make_pool(memory: str, size: int) -> BenchPool:
    """`memory` is "cpu" or a GPU (an index, cuda:N, a UUID)."""
    return HostBenchPool(size) if memory == "cpu" else DeviceBenchPool(size, memory)


def move(destination: int, source: int, size: int) -> None:
    """The host's plain copy."""
    ctypes.memmove(destination, source, size)


def _layout(size: int) -> KVLayout:
    """One page of `size` bytes: transports do not look inside."""
    return KVLayout(
        page_tokens=1, layers=1, kv_heads=1, head_dim=size // 8, dtype="float32", total_kv_heads=1, model="bench"
    )


def _wrong(page: int, first: int, count: int) -> str:
    return f"wrong contents in one of the pages {first} to {first + count - 1} of {page} bytes each"
