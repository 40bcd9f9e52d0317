"""The KV pool of a GPU rank: one plain allocation of our own, which peers can map.

The allocator of a framework hands out pieces of larger blocks, from a pool that may itself be virtual memory, and what
a peer then maps is not what was meant. So the pool is one cudaMalloc: pages from its start, behind them the area that
preflights write, behind that a seal, and last a scratch area that peers may fill with anything while they measure:

    pages | probe | seal | scratch

A peer that has mapped the pool reads the seal through its mapping before it writes a byte: it holds the generation,
a number drawn for this allocation, and the sizes. So neither a stale handle, nor another allocation at the same
address, nor a mapping that starts elsewhere can be taken for the pool.
"""

from __future__ import annotations

import ctypes
import secrets
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from slipstream.errors import PoolTooSmall, TransferError
from slipstream.kv.layout import KVLayout
from slipstream.kv.pool import in_words
from slipstream.transfer.cuda.runtime import CudaError, Device
from slipstream.transfer.transports.base import Region

SEAL_BYTES = 256
SCRATCH_BYTES = 16 << 20
_GRANULE = 2 << 20  # allocations of whole granules share no block with others, so a handle means this pool alone
_MAGIC = b"slipstream pool\n"


class Seal(msgspec.Struct, frozen=True, array_like=True):
    """What stands behind the pages of a pool, for those who map it: the contract between exporter and importer."""

    generation: bytes
    region_bytes: int  # pages and probe area
    page_bytes: int
    scratch_offset: int
    scratch_bytes: int

    def to_bytes(self) -> bytes:
        payload = msgspec.msgpack.encode(self)
        packed = _MAGIC + bytes([len(payload)]) + payload
        return packed + bytes(SEAL_BYTES - len(packed))

    @staticmethod
    def from_bytes(raw: bytes) -> Seal:
        """Raises ValueError when this is no seal."""
        if not raw.startswith(_MAGIC):
            raise ValueError("no seal of a slipstream pool here")
        start = len(_MAGIC) + 1
        try:
            return msgspec.msgpack.decode(raw[start : start + raw[start - 1]], type=Seal)
        except msgspec.DecodeError as error:
            raise ValueError(f"the seal is damaged: {error}") from error


def seal_offset(region_bytes: int) -> int:
    return _up(region_bytes, SEAL_BYTES)


def read_seal(device: Device, address: int, region_bytes: int) -> Seal:
    """Reads the seal of the pool at `address`. Raises ValueError when there is none."""
    raw = np.empty(SEAL_BYTES, np.uint8)
    device.read(address + seal_offset(region_bytes), raw.ctypes.data, SEAL_BYTES)
    return Seal.from_bytes(raw.tobytes())


class DeviceMemory:
    """The KV memory of one GPU rank.

    `region` is what transports see; `__cuda_array_interface__` lets torch view all of it as bytes without a copy
    (`torch.as_tensor(memory, device=...)`). The memory is zeroed. It lives until `close`, which must come after the
    transports that export it are shut down.

    Raises PoolTooSmall when the GPU has no room for it; MissingExtra without cuda-bindings; ConfigError when there is
    no such device.
    """

    def __init__(self, device: Device, pages: int, page_bytes: int, probe_bytes: int) -> None:
        if pages < 1 or page_bytes < 1 or probe_bytes < 0:
            raise ValueError(f"a pool of {pages} pages of {page_bytes} bytes and {probe_bytes} probe bytes")
        probe_offset = _up(pages * page_bytes, 4096)
        size = probe_offset + probe_bytes
        scratch_offset = _up(seal_offset(size) + SEAL_BYTES, 4096)
        self.device = device
        device.use()
        whole = _up(scratch_offset + SCRATCH_BYTES, _GRANULE)
        try:
            self.address = device.allocate(whole)
        except CudaError as error:
            free, total = device.available()
            raise PoolTooSmall(
                f"the KV pool needs {in_words(whole)} on {device.uuid}, of whose {in_words(total)} {in_words(free)} "
                f"are free ({error}). "
                "Lower --kv-tokens or --mem-fraction, or free the GPU"
            ) from error
        self._interface = {"shape": (size,), "typestr": "|u1", "data": (self.address, False), "version": 3}
        device.fill(self.address, 0, size)
        seal = Seal(secrets.token_bytes(16), size, page_bytes, scratch_offset, SCRATCH_BYTES)
        raw = np.frombuffer(seal.to_bytes(), np.uint8)
        device.write(self.address + seal_offset(size), raw.ctypes.data, SEAL_BYTES)
        self.region = Region(
            kind="cuda",
            address=self.address,
            bytes=size,
            page_bytes=page_bytes,
            pages=pages,
            probe_offset=probe_offset,
            device=device.uuid,
            device_index=device.index,
        )

    @classmethod
    def allocate(
        cls, layout: KVLayout, pages: int, probe_bytes: int, device: str | int | Device = "cuda"
    ) -> DeviceMemory:
        """A pool of `pages` pages of this layout on `device` (an index, cuda:N or a UUID)."""
        chosen = device if isinstance(device, Device) else Device(device)
        return cls(chosen, pages, layout.page_bytes, probe_bytes)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self.address == 0:
            raise TransferError("the pool is closed")
        return self._interface

    def read(self, offset: int, size: int) -> NDArray[np.uint8]:
        """A copy of `size` bytes from `offset` in the region. Any thread."""
        data = np.empty(size, np.uint8)
        self.device.use()
        self.device.read(self._inside(offset, size), data.ctypes.data, size)
        return data

    def write(self, offset: int, data: NDArray[np.uint8]) -> None:
        """Puts bytes at `offset` in the region and waits for it. Any thread."""
        packed = np.ascontiguousarray(data, np.uint8)
        self.device.use()
        self.device.write(self._inside(offset, packed.nbytes), packed.ctypes.data, packed.nbytes)

    def _inside(self, offset: int, size: int) -> int:
        if offset < 0 or size < 0 or offset + size > self.region.bytes:
            raise ValueError(f"{size} bytes at {offset} leave the region of {self.region.bytes} bytes")
        return self.address + offset

    def close(self) -> None:
        """Frees the memory; harmless when done twice."""
        if self.address:
            address, self.address = self.address, 0
            self.device.use()
            self.device.free(address)


class PinnedMemory:
    """Host memory that the GPU reads and writes at PCIe speed; `array` is its bytes, `address` the same for both.

    Allocated here, or given: memory of other origin, such as a shared mapping, is pinned in place and remains its
    owner's.
    """

    def __init__(self, device: Device, size: int, given: NDArray[np.uint8] | None = None) -> None:
        self._device = device
        self._given = given
        device.use()
        if given is None:
            self.address = device.allocate_pinned(size)
            self.array: NDArray[np.uint8] = _view(self.address, size)
        else:
            self.address = int(given.ctypes.data)
            self.array = given
            device.pin(self.address, given.nbytes)

    def close(self) -> None:
        if self.address:
            address, self.address = self.address, 0
            self._device.use()
            if self._given is None:
                self.array = np.empty(0, np.uint8)
                self._device.free_pinned(address)
            else:
                self._device.unpin(address)


def _view(address: int, size: int) -> NDArray[np.uint8]:
    memory: Any = (ctypes.c_uint8 * size).from_address(address)
    return np.frombuffer(memory, np.uint8)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
