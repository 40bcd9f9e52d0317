"""A GPU without a GPU, for what stages device memory.

Its memory is real, but not the CPU's: the addresses that it gives out are mapped without any right, so that a memmove
from there kills the process and a socket answers EFAULT; the device itself works through a second mapping. Its streams
are threads that work off their queues in order, some time after the call that queued; host memory takes part in copies
only when it was allocated or pinned by the device. The method names are those of `transfer.cuda.runtime.Device`.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import queue
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from slipstream.transfer.cuda.batches import Words
from slipstream.transfer.cuda.copier import Copier
from slipstream.transfer.cuda.launcher import CopySettings, Launch
from slipstream.transfer.cuda.runtime import CudaError

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_PROT_NONE, _PRIVATE_ANONYMOUS = 0, 0x22


class _Stream:
    def __init__(self, device: QueueDevice) -> None:
        self.work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._device = device
        self.at_work = False
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while (item := self.work.get()) is not None:
            self.at_work = True
            self._device.go.wait()
            item()
            self.at_work = False


class QueueDevice:
    """While `go` is cleared, streams stand still; while `broken` names an error, waiting for copies raises it."""

    def __init__(self, seed: int = 0, slowest_s: float = 0.001) -> None:
        self.index, self.uuid, self.is_mig = 0, f"GPU-{seed:08x}-0000-0000-0000-000000000000", False
        self.go = threading.Event()
        self.go.set()
        self.broken = ""
        self.pinnable = True
        self.slowest_s = slowest_s
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._names = itertools.count(1)
        self._memory: dict[int, tuple[int, int, mmap.mmap]] = {}  # address -> (where it is mapped, size, mapping)
        self._pinned: dict[int, tuple[int, Any]] = {}
        self._streams: dict[int, _Stream] = {}
        self._events: dict[int, threading.Event] = {}

    def delay(self) -> float:
        with self._lock:
            return self._random.uniform(0, self.slowest_s)

    def copier(self, device: Any, settings: CopySettings) -> Copier:
        """To be given as `copiers`."""
        return Copier(device, settings, launch=self.launch)

    def view(self, address: int, size: int) -> np.ndarray:
        """What the device has at an address."""
        memory: Any = (ctypes.c_uint8 * size).from_address(self._reach(address, size))
        return np.frombuffer(memory, np.uint8)

    @property
    def at_work(self) -> bool:
        """Whether a stream has something to do that it has not done."""
        return any(stream.at_work for stream in list(self._streams.values()))

    # ------------------------------------------------------------------------------------------- memory

    def use(self) -> None:
        pass

    def allocate(self, size: int) -> int:
        mapping = mmap.mmap(-1, size)
        inside = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        address = _LIBC.mmap(None, size, _PROT_NONE, _PRIVATE_ANONYMOUS, -1, 0)
        self._memory[address] = (inside, size, mapping)
        return address

    def free(self, address: int) -> None:
        _, size, _ = self._memory.pop(address)
        _LIBC.munmap(address, size)

    def available(self) -> tuple[int, int]:
        return 1 << 40, 1 << 40

    def allocate_pinned(self, size: int) -> int:
        block = (ctypes.c_uint8 * size)()
        self._pinned[ctypes.addressof(block)] = (size, block)
        return ctypes.addressof(block)

    def pin(self, address: int, size: int) -> None:
        if not self.pinnable:
            raise CudaError("cudaHostRegister", "cudaErrorMemoryAllocation", "out of memory")
        assert address % mmap.PAGESIZE == 0
        assert address not in self._pinned
        self._pinned[address] = (size, None)

    def free_pinned(self, address: int) -> None:
        del self._pinned[address]

    unpin = free_pinned

    def read(self, address: int, host_address: int, size: int) -> None:
        ctypes.memmove(host_address, self._reach(address, size), size)

    def write(self, address: int, host_address: int, size: int) -> None:
        ctypes.memmove(self._reach(address, size), host_address, size)

    def fill(self, address: int, value: int, size: int) -> None:
        ctypes.memset(self._reach(address, size), value, size)

    def _reach(self, address: int, size: int) -> int:
        for start, (inside, have, _) in list(self._memory.items()):
            if start <= address and address + size <= start + have:
                return inside + address - start
        for start, (have, _) in list(self._pinned.items()):
            if start <= address and address + size <= start + have:
                return address
        raise CudaError("cudaMemcpyAsync", "cudaErrorIllegalAddress", f"{size} bytes at {address:#x} are not reachable")

    # ------------------------------------------------------------------------------------------- streams and events

    def stream(self) -> int:
        with self._lock:
            name = next(self._names)
        self._streams[name] = _Stream(self)
        return name

    def destroy_stream(self, stream: int) -> None:
        gone = self._streams.pop(stream)
        gone.work.put(None)
        gone.thread.join()

    def event(self) -> int:
        with self._lock:
            name = next(self._names)
        self._events[name] = threading.Event()
        return name

    timing_event = event

    def elapsed(self, start: int, end: int) -> float:
        return 1e-4

    def destroy_event(self, event: int) -> None:
        del self._events[event]

    def record(self, event: int, stream: int) -> None:
        happened = self._events[event]
        happened.clear()
        self._streams[stream].work.put(lambda: time.sleep(self.delay()))
        self._streams[stream].work.put(happened.set)

    def wait_for(self, stream: int, event: int) -> None:
        self._streams[stream].work.put(lambda happened=self._events[event]: happened.wait())

    def is_done(self, event: int) -> bool:
        self._check()
        time.sleep(20e-6)  # whoever asks without a pause would keep the streams from running
        return self._events[event].is_set()

    def wait(self, event: int) -> None:
        self._events[event].wait()
        self._check()

    def _check(self) -> None:
        if self.broken:
            raise CudaError("cudaEventSynchronize", self.broken, "the device says so")

    # ------------------------------------------------------------------------------------------- copies

    def copy(self, destination: int, source: int, size: int, stream: int) -> None:
        to, origin = self._reach(destination, size), self._reach(source, size)
        self._streams[stream].work.put(lambda: ctypes.memmove(to, origin, size))

    def copy_batch(self, destinations: Words, sources: Words, sizes: Words, stream: int, first: int) -> None:
        for to, origin, size in zip(destinations.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            self.copy(to, origin, size, stream)

    def launch(self, launch: Launch, stream: int, settings: CopySettings) -> None:
        """Does what the kernels do, when its turn has come, from the list as it is then."""
        self._streams[stream].work.put(lambda: self._move(launch))

    def _move(self, launch: Launch) -> None:
        columns, kind = (2 if launch.length else 3), np.int64
        size = columns * launch.runs * np.dtype(kind).itemsize
        if size == 0:
            return
        lists = self.view(launch.lists, size).view(kind).reshape(columns, launch.runs)
        for row in range(launch.runs):
            length = launch.length or int(lists[2, row])
            source, destination = (int(lists[side, row]) for side in (0, 1))
            to, origin = launch.destination_at + destination, launch.source_at + source
            ctypes.memmove(self._reach(to, length), self._reach(origin, length), length)


def is_out_of_reach(address: int) -> bool:
    """Whether the CPU cannot read there: a pipe says so without a crash."""
    reader, writer = os.pipe()
    try:
        written = _LIBC.write(writer, ctypes.c_void_p(address), ctypes.c_size_t(1))
        return written != 1
    finally:
        os.close(reader)
        os.close(writer)
