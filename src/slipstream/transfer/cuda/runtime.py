"""The CUDA calls that transfers make, each one checked, on one device.

`find_device` turns what a user or a peer writes ("cuda:1", 1, "GPU-5f3c...") into the index that this process has for
that GPU under its CUDA_VISIBLE_DEVICES; from there on a `Device` carries the index and the UUID, and UUIDs alone are
compared between processes. The calls go through the `cuda-bindings` package, which is imported here and nowhere else,
when the first device is asked for; only lists of copies go past it (`batches`). Handles (streams, events, addresses)
are plain integers.

CUDA keeps the current device a thread. `Device.use` sets it; all other methods expect that their thread has done so.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from slipstream.errors import ConfigError, MissingExtra, TransferError
from slipstream.transfer.cuda.batches import BatchCopies, Words

_NOT_READY = 600  # cudaErrorNotReady


class CudaError(TransferError):
    """A CUDA call failed. `call` names it, `name` is CUDA's name of the error."""

    def __init__(self, call: str, name: str, text: str) -> None:
        super().__init__(f"{call} failed with {name}: {text}")
        self.call = call
        self.name = name


class Runtime:
    """cuda-bindings' runtime and driver modules. Raises MissingExtra when the package is not installed."""

    def __init__(self) -> None:
        try:
            from cuda.bindings import driver, runtime  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise MissingExtra("cuda-bindings", "gpu") from error
        self.cudart: Any = runtime
        self.driver: Any = driver

    def call(self, name: str, *arguments: Any) -> Any:
        """Calls a function of the CUDA runtime; returns its result (a tuple if there are several), raises CudaError."""
        error, *values = getattr(self.cudart, name)(*arguments)
        if int(error) != 0:
            text = self.cudart.cudaGetErrorString(error)[1]
            raise CudaError(name, error.name, text.decode() if isinstance(text, bytes) else str(text))
        return values[0] if len(values) == 1 else tuple(values)

    @cached_property
    def batches(self) -> BatchCopies:
        """Copies by the list, through the driver's own library, which is loaded where there is a device."""

        def fail(call: str, code: int) -> None:
            error, name = self.driver.cuGetErrorName(self.driver.CUresult(code))
            raise CudaError(call, name.decode() if int(error) == 0 else str(code), "the driver refuses it")

        return BatchCopies(ctypes.CDLL("libcuda.so.1"), fail)

    def device_uuids(self) -> list[str]:
        """The UUIDs of the GPUs that this process may use, in the order of their indices; none without a driver."""
        try:
            count = self.call("cudaGetDeviceCount")
        except CudaError as error:
            if error.name in ("cudaErrorNoDevice", "cudaErrorInsufficientDriver", "cudaErrorStubLibrary"):
                return []
            raise
        return [uuid_text(bytes(self.call("cudaGetDeviceProperties", index).uuid.bytes)) for index in range(count)]


def uuid_text(raw: bytes) -> str:
    """The usual text of a GPU's UUID: 16 bytes as GPU-8-4-4-4-12."""
    digits = raw.hex()
    return "GPU-" + "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def find_device(device: str | int, uuids: Sequence[str]) -> int:
    """The index of `device` among the visible `uuids`.

    `device` is an index, "cuda", "cuda:N" or a UUID (a unique beginning of it is enough, as in CUDA_VISIBLE_DEVICES).
    Raises ConfigError naming what is visible.
    """
    visible = ", ".join(f"cuda:{index} = {uuid}" for index, uuid in enumerate(uuids)) or "none"
    text = str(device)
    numbered = re.fullmatch(r"(?:cuda:)?(\d+)", text) if text != "cuda" else re.fullmatch(r"cuda()", text)
    if numbered:
        index = int(numbered.group(1) or 0)
        if index < len(uuids):
            return index
    elif text.startswith("GPU-") and len(text) > 4:
        matches = [index for index, uuid in enumerate(uuids) if uuid.startswith(text)]
        if len(matches) == 1:
            return matches[0]
    raise ConfigError(
        f"there is no GPU {text!r} here; visible GPUs: {visible}. Give an index, cuda:N or a UUID, and check "
        f"CUDA_VISIBLE_DEVICES ({os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')})"
    )


class Device:
    """One GPU of this process, and the calls on it."""

    def __init__(self, device: str | int, runtime: Runtime | None = None) -> None:
        self._runtime = runtime or Runtime()
        uuids = self._runtime.device_uuids()
        self.index = find_device(device, uuids)
        self.uuid = uuids[self.index]
        self._kernels: dict[tuple[bytes, str, int], int] = {}

    @property
    def is_mig(self) -> bool:
        """Whether this is a slice of a GPU (MIG), as far as the environment and NVML tell; slices share no memory."""
        if "MIG-" in os.environ.get("CUDA_VISIBLE_DEVICES", ""):
            return True
        try:
            import pynvml  # pyright: ignore[reportMissingImports]
        except ImportError:
            return False
        bus = self._call("cudaDeviceGetPCIBusId", 32, self.index)
        try:
            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByPciBusId(bus.rstrip(b"\0") if isinstance(bus, bytes) else bus)
            return bool(pynvml.nvmlDeviceGetMigMode(handle)[0])
        except pynvml.NVMLError:
            return False  # not supported by this GPU, so not in use

    def use(self) -> None:
        """Makes this the calling thread's device; creates its context on first use."""
        self._call("cudaSetDevice", self.index)

    def _call(self, name: str, *arguments: Any) -> Any:
        return self._runtime.call(name, *arguments)

    # ------------------------------------------------------------------------------------------------ memory

    def allocate(self, size: int) -> int:
        return int(self._call("cudaMalloc", size))

    def free(self, address: int) -> None:
        self._call("cudaFree", address)

    def fill(self, address: int, value: int, size: int) -> None:
        """Sets `size` bytes and waits for it."""
        self._call("cudaMemset", address, value, size)
        self._call("cudaStreamSynchronize", 0)  # not the device: that would wait for steps, and spoil a graph's capture

    def available(self) -> tuple[int, int]:
        """(free, total) bytes of the device."""
        free, total = self._call("cudaMemGetInfo")
        return int(free), int(total)

    def allocate_pinned(self, size: int) -> int:
        return int(self._call("cudaHostAlloc", size, self._runtime.cudart.cudaHostAllocPortable))

    def free_pinned(self, address: int) -> None:
        self._call("cudaFreeHost", address)

    def pin(self, address: int, size: int) -> None:
        """Pins host memory of other origin, shared mappings too, so that the GPU reaches it."""
        self._call("cudaHostRegister", address, size, self._runtime.cudart.cudaHostRegisterPortable)

    def unpin(self, address: int) -> None:
        self._call("cudaHostUnregister", address)

    def read(self, address: int, host_address: int, size: int) -> None:
        """Copies to the host and waits."""
        kind = self._runtime.cudart.cudaMemcpyKind.cudaMemcpyDefault
        self._call("cudaMemcpy", host_address, address, size, kind)

    def write(self, address: int, host_address: int, size: int) -> None:
        """Copies from the host and waits."""
        kind = self._runtime.cudart.cudaMemcpyKind.cudaMemcpyDefault
        self._call("cudaMemcpy", address, host_address, size, kind)
        self._call("cudaStreamSynchronize", 0)  # as in `fill`

    # ------------------------------------------------------------------------------------------------ peers

    def export_handle(self, address: int) -> bytes:
        """The IPC handle (64 bytes) of the allocation that starts at `address`."""
        return bytes(self._call("cudaIpcGetMemHandle", address).reserved)

    def open_handle(self, handle: bytes) -> int:
        """Maps another process's allocation for this device. The exporter's GPU need not be visible."""
        cudart = self._runtime.cudart
        opened = cudart.cudaIpcMemHandle_t()
        opened.reserved = handle
        return int(self._call("cudaIpcOpenMemHandle", opened, cudart.cudaIpcMemLazyEnablePeerAccess))

    def close_handle(self, address: int) -> None:
        self._call("cudaIpcCloseMemHandle", address)

    def extent(self, address: int) -> tuple[int, int]:
        """(start, bytes) of the allocation or mapping that holds `address`."""
        driver = self._runtime.driver
        error, base, size = driver.cuMemGetAddressRange(driver.CUdeviceptr(address))
        if int(error) != 0:
            raise CudaError("cuMemGetAddressRange", error.name, f"address {address:#x} is no allocation of this GPU")
        return int(base), int(size)

    def reach_peer(self, uuid: str) -> str | None:
        """Enables access to another visible GPU's memory; None, or why that is impossible."""
        uuids = self._runtime.device_uuids()
        if uuid == self.uuid:
            return None
        if uuid not in uuids:
            return f"the GPU {uuid} is not visible to this process"
        other = uuids.index(uuid)
        if not self._call("cudaDeviceCanAccessPeer", self.index, other):
            return f"there is no peer access from {self.uuid} to {uuid}"
        try:
            self._call("cudaDeviceEnablePeerAccess", other, 0)
        except CudaError as error:
            if error.name != "cudaErrorPeerAccessAlreadyEnabled":
                raise
            self._runtime.cudart.cudaGetLastError()  # clears it, so that no later call reports it
        return None

    # ------------------------------------------------------------------------------------------------ kernels

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability: (9, 0) is Hopper."""
        names = self._runtime.cudart.cudaDeviceAttr
        major = self._call("cudaDeviceGetAttribute", names.cudaDevAttrComputeCapabilityMajor, self.index)
        minor = self._call("cudaDeviceGetAttribute", names.cudaDevAttrComputeCapabilityMinor, self.index)
        return int(major), int(minor)

    def load_kernel(self, code: bytes, name: str, shared_bytes: int) -> int:
        """The handle of a kernel in compiled code, allowed to use so much shared memory; it stays loaded.

        Loading may wait for all work of the device, so it is done once.
        """
        key = (code, name, shared_bytes)
        if key in self._kernels:
            return self._kernels[key]
        driver = self._runtime.driver
        module = self._drive("cuModuleLoadData", code)
        function = self._drive("cuModuleGetFunction", module, name.encode())
        most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._drive("cuFuncSetAttribute", function, most, shared_bytes)
        self._kernels[key] = int(function)
        return int(function)

    def launch(self, function: int, blocks: int, threads: int, shared_bytes: int, stream: int, parameters: int) -> None:
        """Queues a kernel; `parameters` is the address of an array of pointers to its parameters."""
        self._drive("cuLaunchKernel", function, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, parameters, 0)

    def _drive(self, name: str, *arguments: Any) -> Any:
        """Calls a function of the CUDA driver; raises CudaError."""
        error, *values = getattr(self._runtime.driver, name)(*arguments)
        if int(error) != 0:
            raise CudaError(name, error.name, "the driver refuses it")
        return values[0] if values else None

    # ------------------------------------------------------------------------------------------------ streams, events

    def stream(self) -> int:
        return int(self._call("cudaStreamCreateWithFlags", self._runtime.cudart.cudaStreamNonBlocking))

    def destroy_stream(self, stream: int) -> None:
        self._call("cudaStreamDestroy", stream)

    def wait_for(self, stream: int, event: int) -> None:
        """Work queued on `stream` from now on starts after `event`."""
        self._call("cudaStreamWaitEvent", stream, event, 0)

    def event(self) -> int:
        """An event without timing; waiting for it lets the thread sleep."""
        cudart = self._runtime.cudart
        flags = cudart.cudaEventDisableTiming | cudart.cudaEventBlockingSync
        return int(self._call("cudaEventCreateWithFlags", flags))

    def timing_event(self) -> int:
        """An event that knows when it happened, for `elapsed`."""
        return int(self._call("cudaEventCreateWithFlags", self._runtime.cudart.cudaEventBlockingSync))

    def elapsed(self, start: int, end: int) -> float:
        """Seconds between two timing events that have happened."""
        return float(self._call("cudaEventElapsedTime", start, end)) / 1e3

    def destroy_event(self, event: int) -> None:
        self._call("cudaEventDestroy", event)

    def record(self, event: int, stream: int) -> None:
        self._call("cudaEventRecord", event, stream)

    def is_done(self, event: int) -> bool:
        error = self._runtime.cudart.cudaEventQuery(event)[0]
        if int(error) == _NOT_READY:
            return False
        if int(error) != 0:
            self._call("cudaEventQuery", event)
        return True

    def wait(self, event: int) -> None:
        """Sleeps until the event has happened."""
        self._call("cudaEventSynchronize", event)

    # ------------------------------------------------------------------------------------------------ copies

    def copy(self, destination: int, source: int, size: int, stream: int) -> None:
        """Queues one copy between any two addresses that this device reaches."""
        kind = self._runtime.cudart.cudaMemcpyKind.cudaMemcpyDefault
        self._call("cudaMemcpyAsync", destination, source, size, kind, stream)

    def copy_batch(self, destinations: Words, sources: Words, sizes: Words, stream: int, first: int) -> None:
        """Queues many copies, in few calls, `first` of them in the first. Their order among each other is open."""
        self._runtime.batches(destinations, sources, sizes, stream, first)
