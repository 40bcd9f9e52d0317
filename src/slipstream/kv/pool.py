"""The KV memory of a CPU rank.

One allocation of the worker's own: a memory file where the system has them, an unlinked temporary file elsewhere,
mapped shared, so that a peer on this machine can map the same pages through the file descriptor. The pages come first,
then the area that preflights of peers may write.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import PoolTooSmall
from slipstream.kv.layout import KVLayout
from slipstream.transfer.transports.base import Region

ALIGNMENT = 4096


class HostPool:
    """`pages` pages of `layout.page_bytes` bytes, zeroed, and `probe_bytes` bytes behind them.

    `array` is the whole memory as bytes; `region` is the same in the terms of the transports. The pool owns the file
    descriptor and the mapping until `close`.
    """

    def __init__(self, layout: KVLayout, pages: int, probe_bytes: int) -> None:
        self.layout = layout
        self.pages = pages
        self.probe_offset = _aligned(pages * layout.page_bytes)
        self.bytes = _aligned(self.probe_offset + probe_bytes)
        self.fd = _memory_file(self.bytes)
        self._map = mmap.mmap(self.fd, self.bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self._array: NDArray[np.uint8] | None = np.frombuffer(self._map, dtype=np.uint8)

    @classmethod
    def allocate(cls, layout: KVLayout, pages: int, probe_bytes: int) -> HostPool:
        """Raises PoolTooSmall when fewer than two pages are asked for, or more than this machine has memory for."""
        if pages < 2:
            missing = (2 - pages) * layout.page_bytes
            raise PoolTooSmall(
                f"a KV pool of {pages} pages ({pages * layout.page_tokens} tokens) cannot serve anything: one page is "
                f"scratch, so at least 2 are needed, {in_words(missing)} more. Raise --kv-tokens to at least "
                f"{2 * layout.page_tokens} or lower --page-tokens."
            )
        needed = pages * layout.page_bytes + probe_bytes
        available = available_bytes()
        if available is not None and needed > available:
            fits = max(0, (available - probe_bytes) // layout.page_bytes) * layout.page_tokens
            raise PoolTooSmall(
                f"a KV pool of {pages * layout.page_tokens} tokens needs {in_words(needed)}, {in_words(available)} are "
                f"available: {in_words(needed - available)} are missing. Lower --kv-tokens to at most {fits} or free "
                "memory."
            )
        return cls(layout, pages, probe_bytes)

    @property
    def array(self) -> NDArray[np.uint8]:
        """[bytes] of the whole pool. Raises ValueError after `close`."""
        if self._array is None:
            raise ValueError("the KV pool is closed")
        return self._array

    @property
    def region(self) -> Region:
        array = self.array
        return Region(
            kind="cpu",
            address=int(array.ctypes.data),
            bytes=self.bytes,
            page_bytes=self.layout.page_bytes,
            pages=self.pages,
            probe_offset=self.probe_offset,
            fd=self.fd,
            array=array,
        )

    def close(self) -> None:
        """Ends the pool; the memory goes when the last view of it does. May be called twice."""
        if self._array is None:
            return
        self._array = None
        os.close(self.fd)
        with contextlib.suppress(BufferError):  # a tensor or array still looks at it: the mapping ends with the last
            self._map.close()


def available_bytes() -> int | None:
    """Memory that can still be had, by /proc/meminfo and this process's cgroup; None where neither says."""
    found: list[int] = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    except (OSError, ValueError):
        pass
    try:
        cgroup = Path("/sys/fs/cgroup")
        limit = (cgroup / "memory.max").read_text().strip()
        if limit != "max":
            used = int((cgroup / "memory.current").read_text())
            stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
            found.append(int(limit) - used + int(stat.get("inactive_file", 0)))  # file cache gives way
    except (OSError, ValueError):
        pass
    return min(found) if found else None


def in_words(size: int) -> str:
    """Bytes for people: two decimals of GiB, and of smaller units below 0.1 of one."""
    for factor, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= factor / 10:
            return f"{size / factor:,.2f} {unit}"
    return f"{size} bytes"


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _memory_file(size: int) -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("slipstream-kv", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile(prefix="slipstream-kv-") as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size)
    return fd
