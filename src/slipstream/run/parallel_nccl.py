"""The ranks of one worker talk, on GPUs: NCCL, called directly on the current stream.

Nothing stands between a call here and NCCL's: no stream of its own, no thread that watches, so that exchanges are
captured into CUDA graphs like kernels. The library is the one that torch brings. `abort` ends exchanges that wait for a
rank which is gone: they return, with results that mean nothing, and the worker ends. NCCL lets go of a group only when
no CUDA graph holds it any more (seen on two H200: the call returns no earlier), so that is left to a thread.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.run.parallel import OutOfStep

ID_BYTES = 128
SUM = 0
TYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9, torch.int32: 2, torch.int64: 4, torch.uint8: 1}


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * ID_BYTES),)


class Library:
    """NCCL's functions. Raises ConfigError when the library cannot be found."""

    def __init__(self) -> None:
        try:
            self.nccl = ctypes.CDLL("libnccl.so.2")  # loaded with torch already, or found by the system
        except OSError as error:
            raise ConfigError(
                f"several ranks on GPUs need NCCL, and libnccl.so.2 cannot be loaded ({error}). Install a torch with "
                "CUDA from its wheels, which bring it, or use --tp 1."
            ) from error
        self.nccl.ncclGetErrorString.restype = ctypes.c_char_p
        self.nccl.ncclGetUniqueId.argtypes = [ctypes.POINTER(_UniqueId)]
        self.nccl.ncclCommInitRank.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, _UniqueId, ctypes.c_int]
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        self.nccl.ncclAllReduce.argtypes = [pointer, pointer, size, number, number, pointer, pointer]
        self.nccl.ncclAllGather.argtypes = [pointer, pointer, size, number, pointer, pointer]
        self.nccl.ncclCommAbort.argtypes = [pointer]
        self.nccl.ncclCommDestroy.argtypes = [pointer]

    def check(self, result: int) -> None:
        if result:
            raise OutOfStep(f"NCCL: {self.nccl.ncclGetErrorString(result).decode()} (code {result})")


def new_id() -> bytes:
    """What the ranks of one group have to know to find each other; made by one of them."""
    library, unique = Library(), _UniqueId()
    library.check(library.nccl.ncclGetUniqueId(ctypes.byref(unique)))
    return bytes(unique)


class NcclGroup:
    """Rank `rank` of `size` on a GPU. Blocks until all ranks with this id have come. Raises OutOfStep."""

    def __init__(self, unique: bytes, rank: int, size: int, device: torch.device, library: Any = None) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.exchanges = 0
        self._library = library or Library()
        self._nccl = self._library.nccl
        self._lock = threading.Lock()
        self._comm: ctypes.c_void_p | None = None
        comm = ctypes.c_void_p()
        with torch.cuda.device(device):
            torch.zeros(1, device=device)  # the context has to be there
            self._library.check(
                self._nccl.ncclCommInitRank(ctypes.byref(comm), size, _UniqueId.from_buffer_copy(unique), rank)
            )
        self._comm = comm

    def reduce(self, x: Tensor) -> Tensor:
        assert x.is_contiguous()
        stream = self._stream()
        at = x.data_ptr()
        self._library.check(self._nccl.ncclAllReduce(at, at, x.numel(), TYPES[x.dtype], SUM, self._there(), stream))
        self.exchanges += 1
        return x

    def gather(self, x: Tensor) -> Tensor:
        whole = x.new_empty(self.size, *x.shape)
        self.gather_into(x, whole)
        return whole

    def gather_into(self, x: Tensor, whole: Tensor) -> None:
        """x of every rank into whole [ranks, *x.shape]; both contiguous."""
        assert x.is_contiguous()
        assert whole.is_contiguous()
        stream = self._stream()
        result = self._nccl.ncclAllGather(
            x.data_ptr(), whole.data_ptr(), x.numel(), TYPES[x.dtype], self._there(), stream
        )
        self._library.check(result)
        self.exchanges += 1

    def _stream(self) -> int:
        if torch.cuda.current_device() != self.device.index:
            torch.cuda.set_device(self.device)
        return torch.cuda.current_stream(self.device).cuda_stream

    def _there(self) -> ctypes.c_void_p:
        if self._comm is None:
            raise OutOfStep("the ranks of this worker do not talk to each other any more")
        return self._comm

    def abort(self) -> None:
        with self._lock:
            comm, self._comm = self._comm, None
        if comm is not None:
            name = "slipstream-nccl"
            threading.Thread(target=self._nccl.ncclCommAbort, args=(comm,), name=name, daemon=True).start()

    def close(self) -> None:
        """Ends the group. Others may be gone already, so this does not wait for them."""
        self.abort()
