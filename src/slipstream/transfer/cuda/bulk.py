"""Starts the kernel of `bulk.cu`, which moves runs by the bulk copy units of the multiprocessors (Hopper and later).

The source is compiled by NVRTC for the GPU at hand when the first copier of a process wants it, in a tenth of a second,
and loaded by the driver; torch and triton are not needed. What keeps a link busy is the number of bytes under way,
which here is shared memory: a program has warps * stages * stage_bytes of it, and few programs fill the link.

Where there is no such unit or no NVRTC, `Unavailable` says why, and `launcher` takes the kernels of `kernel.py`.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any, NamedTuple

from slipstream.transfer.cuda.runtime import CudaError, Device

SOURCE = Path(__file__).with_name("bulk.cu")
_LANES = 32
_GROUP = 16  # LANES of the source: most pieces in a stage


class Unavailable(Exception):
    """Why this kernel cannot run here."""


class BulkShape(NamedTuple):
    """How the kernel is compiled: `stages` of `stage_bytes` a warp, of which `ahead` are being filled."""

    warps: int = 4
    stages: int = 4
    stage_bytes: int = 4 << 10
    ahead: int = 3

    @property
    def shared_bytes(self) -> int:
        return self.warps * self.stages * self.stage_bytes


DEFAULT_SHAPE = BulkShape()


class Pieces(NamedTuple):
    """How runs are cut: into `parts` of `part_bytes` at most each, `group` of which fill a stage."""

    parts: int
    part_bytes: int
    group: int


def pieces(longest: int, stage_bytes: int) -> Pieces:
    """For runs of up to `longest` bytes, a multiple of 16."""
    if longest <= stage_bytes:
        return Pieces(1, longest, min(_GROUP, stage_bytes // longest))
    return Pieces(-(-longest // stage_bytes), stage_bytes, 1)


@functools.lru_cache(maxsize=64)
def compiled(capability: tuple[int, int], shape: BulkShape) -> bytes:
    """The machine code for GPUs of this capability. Raises Unavailable."""
    if capability < (9, 0):
        raise Unavailable(f"compute capability {capability[0]}.{capability[1]} has no bulk copies; 9.0 has")
    try:
        from cuda.bindings import nvrtc  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise Unavailable(f"cuda-bindings' nvrtc cannot be imported: {error}") from error
    options = [f"--gpu-architecture=sm_{capability[0]}{capability[1]}", "--std=c++17"]
    options += [f"-D{name.upper()}={value}" for name, value in shape._asdict().items()]
    try:
        return _compile(nvrtc, options)
    except RuntimeError as error:  # what cuda-bindings raises when it does not find the library
        raise Unavailable(f"NVRTC does not work: {error}") from error


def _compile(nvrtc: Any, options: list[str]) -> bytes:
    def call(name: str, *arguments: Any) -> Any:
        error, *values = getattr(nvrtc, name)(*arguments)
        if int(error) != 0:
            raise RuntimeError(f"{name} failed with {error.name}")
        return values[0] if values else None

    program = call("nvrtcCreateProgram", SOURCE.read_bytes(), SOURCE.name.encode(), 0, [], [])
    try:
        call("nvrtcCompileProgram", program, len(options), [option.encode() for option in options])
    except RuntimeError as error:
        log = bytearray(call("nvrtcGetProgramLogSize", program))
        call("nvrtcGetProgramLog", program, log)
        raise RuntimeError(f"{error}: {bytes(log).decode(errors='replace')[:500]}") from error
    code = bytearray(call("nvrtcGetCUBINSize", program))
    call("nvrtcGetCUBIN", program, code)
    return bytes(code)


_LONG = ("source", "destination", "lists", "length")
_SHORT = ("runs", "parts", "part_bytes", "group")


class _Arguments(ctypes.Structure):
    """The parameters of move_bulk, in order."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in _LONG),
        *((name, ctypes.c_uint32) for name in _SHORT),
    ]


class BulkKernel:
    """The kernel, loaded on one device. Raises Unavailable when it cannot be; launches raise CudaError."""

    def __init__(self, device: Device, shape: BulkShape) -> None:
        self._device = device
        self._shape = shape
        device.use()
        code = compiled(device.capability, shape)
        try:
            self._function = device.load_kernel(code, "move_bulk", shape.shared_bytes)
        except CudaError as error:
            raise Unavailable(f"the kernel does not load: {error.message}") from error
        self._arguments = _Arguments()
        at = ctypes.addressof(self._arguments)
        places = [at + getattr(_Arguments, name).offset for name in (*_LONG, *_SHORT)]
        self._places = (ctypes.c_void_p * len(places))(*places)
        self._parameters = ctypes.addressof(self._places)

    def __call__(
        self,
        source: int,
        destination: int,
        lists: int,
        runs: int,
        length: int,
        longest: int,
        programs: int,
        stream: int,
    ) -> None:
        """Queues the move of `runs` runs of `length` bytes, or of up to `longest` bytes when `length` is 0."""
        shape, arguments = self._shape, self._arguments
        parts, part_bytes, group = pieces(longest, shape.stage_bytes)
        arguments.source, arguments.destination, arguments.lists, arguments.length = source, destination, lists, length
        arguments.runs, arguments.parts, arguments.part_bytes, arguments.group = runs, parts, part_bytes, group
        steps = -(-runs * parts // group)
        grid = max(1, min(programs, steps))
        self._device.launch(self._function, grid, _LANES * shape.warps, shape.shared_bytes, stream, self._parameters)
