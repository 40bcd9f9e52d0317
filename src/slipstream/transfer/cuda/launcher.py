"""Starts the copy kernels: what a launch is told, which kernel takes it, and the way through Triton.

`transfer.cuda.kernel` needs triton and is imported with the first launch that it takes, so that this module and its
callers can be imported everywhere.
"""

from __future__ import annotations

import importlib
import logging
from dataclasses import dataclass
from typing import Any, NamedTuple

from slipstream.errors import MissingExtra
from slipstream.transfer.cuda.bulk import DEFAULT_SHAPE, BulkKernel, BulkShape, Unavailable
from slipstream.transfer.cuda.plan import WORD
from slipstream.transfer.cuda.runtime import Device

logger = logging.getLogger(__name__)

SHORT_LIST_BYTES = 8 << 10
BULK_BYTES = 256  # runs shorter than this go by the lanes of a warp, which move many of them at once


@dataclass(frozen=True, slots=True)
class CopySettings:
    """How the kernels run.

    programs: thread blocks at most: more of them fill the link, fewer leave more of the GPU to the model.
    bulk: how the kernel of bulk copies is cut; None for never. tile_bytes, warps: bytes that a program of the other
    kernels has under way, and its warps. streams: batches that can run at the same time. engine_preference: how many
    times longer than by the kernel a copy may take by the copy engine, which takes no multiprocessor, and still go that
    way. short_lists: room made beforehand for so many lists of up to SHORT_LIST_BYTES.
    """

    programs: int = 64
    bulk: BulkShape | None = DEFAULT_SHAPE
    tile_bytes: int = 64 << 10
    warps: int = 16
    streams: int = 2
    engine_preference: float = 1.0
    short_lists: int = 0

    def __post_init__(self) -> None:
        if self.programs < 1 or self.streams < 1 or self.warps not in (1, 2, 4, 8, 16):
            raise ValueError(f"programs and streams must be positive and warps 1, 2, 4, 8 or 16: {self}")
        if self.tile_bytes < 256 or self.tile_bytes & (self.tile_bytes - 1):
            raise ValueError(f"tile_bytes must be a power of two of at least 256: {self.tile_bytes}")


class Launch(NamedTuple):
    """One kernel launch: `runs` runs described by the list at `lists`, see KernelList."""

    source_at: int
    destination_at: int
    lists: int
    runs: int
    length: int
    longest: int


class KernelLauncher:
    """Starts each launch by the kernel that suits it: bulk copies where the GPU has them, else Triton's kernels."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._bulk: dict[BulkShape, BulkKernel | None] = {}
        self._triton = TritonLauncher(device.index)

    def __call__(self, launch: Launch, stream: int, settings: CopySettings) -> None:
        bulk = self.bulk(settings.bulk) if settings.bulk and launch.longest >= BULK_BYTES else None
        if bulk is None:
            self._triton(launch, stream, settings)
        else:
            bulk(*launch, settings.programs, stream)

    def bulk(self, shape: BulkShape) -> BulkKernel | None:
        """The kernel of bulk copies; None where it cannot run, which is said once."""
        if shape not in self._bulk:
            try:
                self._bulk[shape] = BulkKernel(self._device, shape)
            except Unavailable as reason:
                logger.info("copies use the kernels of triton: %s", reason)
                self._bulk[shape] = None
        return self._bulk[shape]


class TritonLauncher:
    """Starts the kernels of `transfer.cuda.kernel`. Raises MissingExtra when triton is not installed.

    Triton looks at the type and the alignment of each argument at every launch to find the compiled kernel. Ours vary
    in few ways, so the compiled one is kept and launched directly (`compiled[grid](*arguments, stream=...)`, as
    Triton's tutorials do); where the installed version does not know that, the usual way stays.
    """

    def __init__(self, device_index: int) -> None:
        self._index = device_index
        self._modules: tuple[Any, Any] | None = None  # torch and the kernels, once they are loaded
        self._compiled: dict[tuple[object, ...], Any] = {}
        self._direct = True

    def __call__(self, launch: Launch, stream: int, settings: CopySettings) -> None:
        _, kernel = self._modules or self._load()
        if launch.length:
            rows, columns, chunks = kernel.equal_tile(launch.length, settings.tile_bytes)
            tiles, shape = -(-launch.runs // rows) * chunks, (rows, columns)
            numbers = (launch.runs, launch.length // WORD, chunks)
            function = kernel.move_equal
        else:
            tiles, shape = launch.runs, (settings.tile_bytes // 8, 1024)
            numbers = (launch.runs,)
            function = kernel.move_any
        grid = (max(1, min(settings.programs, tiles)), 1, 1)
        addresses = (launch.source_at, launch.destination_at, launch.lists)
        key = (function is kernel.move_equal, shape, settings.warps, *(address % WORD == 0 for address in addresses))
        arguments = (*addresses, *numbers, *shape)
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled[grid](*arguments, stream=stream)
        else:
            self._first(key, function, grid, arguments, stream, settings.warps)

    def _first(
        self, key: tuple[object, ...], function: Any, grid: Any, arguments: tuple[int, ...], stream: int, warps: int
    ) -> None:
        """Launches the usual way, which compiles, and keeps the compiled kernel when it can be launched directly."""
        assert self._modules is not None
        torch, _ = self._modules
        with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=self._index)):
            compiled = function[grid](*arguments, num_warps=warps)
        if not self._direct:
            return
        nothing = (*arguments[:3], 0, *arguments[4:])  # the fourth is the number of runs
        try:
            compiled[grid](*nothing, stream=stream)
        except (TypeError, AttributeError, KeyError, ValueError, RuntimeError) as error:
            self._direct = False
            logger.info("triton's compiled kernels cannot be launched directly, copies start slower: %s", error)
        else:
            self._compiled[key] = compiled

    def _load(self) -> tuple[Any, Any]:
        try:
            import torch

            kernel: Any = importlib.import_module("slipstream.transfer.cuda.kernel")
        except ImportError as error:
            raise MissingExtra("triton", "gpu") from error
        torch.cuda.set_device(self._index)
        self._modules = torch, kernel
        return self._modules
