"""What this machine has to compute on, found without starting CUDA or importing torch.

GPUs are listed by NVML, the driver's own library, in the order and to the extent of `CUDA_VISIBLE_DEVICES`, so that
number N here is `cuda:N` in a worker. GPUs that the installed torch cannot use, because it is a CPU build, are not
offered; `Machine.note` says so.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Gpu:
    """One GPU: `index` is its number in `cuda:N`."""

    index: int
    uuid: str
    name: str
    memory_bytes: int

    @property
    def device(self) -> str:
        return f"cuda:{self.index}"


@dataclass(frozen=True)
class Machine:
    """The cores this process may use, and the GPUs that a worker can be put on."""

    cores: int
    gpus: tuple[Gpu, ...] = ()
    note: str = ""

    @property
    def devices(self) -> str:
        """What exists, as words for messages."""
        if not self.gpus:
            return "cpu" + (f" ({self.note})" if self.note else "")
        return "cpu, " + ", ".join(f"{gpu.device} ({gpu.name})" for gpu in self.gpus)


def this_machine(environment: Mapping[str, str] | None = None) -> Machine:
    """Looks at the machine that this process runs on."""
    environment = os.environ if environment is None else environment
    cores = usable_cores()
    found = _nvml_gpus()
    visible = select_visible(found, environment.get("CUDA_VISIBLE_DEVICES"))
    if visible and not _torch_has_cuda():
        note = f"{len(visible)} GPU(s) are left out: the installed torch is a build for CPUs"
        return Machine(cores, (), note)
    return Machine(cores, tuple(visible))


def usable_cores(cpu_max: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Cores that this process may use: its affinity, and the CPU time that its container is given."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = cpu_max.read_text().split()
    except (OSError, ValueError):
        return cores
    return max(1, min(cores, -(-int(quota) // int(period)))) if quota.isdigit() else cores


def select_visible(gpus: list[Gpu], visible: str | None) -> list[Gpu]:
    """The GPUs that CUDA shows under this value of CUDA_VISIBLE_DEVICES, renumbered as CUDA numbers them.

    Entries are indices or UUIDs (a unique beginning is enough); the first entry that names nothing hides all behind it.
    """
    if visible is None:
        return gpus
    chosen: list[Gpu] = []
    for entry in (part.strip() for part in visible.split(",")):
        if entry.isdigit():
            matching = [gpu for gpu in gpus if gpu.index == int(entry)]
        else:
            matching = [gpu for gpu in gpus if entry and gpu.uuid.startswith(entry)]
        if len(matching) != 1:
            break
        gpu = matching[0]
        chosen.append(Gpu(len(chosen), gpu.uuid, gpu.name, gpu.memory_bytes))
    return chosen


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def _nvml_gpus() -> list[Gpu]:
    """All GPUs of the driver in PCI order; empty where there is no driver."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    if nvml.nvmlInit_v2() != 0:
        return []
    try:
        count = ctypes.c_uint()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return []
        return [gpu for index in range(count.value) if (gpu := _nvml_gpu(nvml, index)) is not None]
    finally:
        nvml.nvmlShutdown()


def _nvml_gpu(nvml: ctypes.CDLL, index: int) -> Gpu | None:
    handle, memory = ctypes.c_void_p(), _Memory()
    uuid, name = ctypes.create_string_buffer(96), ctypes.create_string_buffer(96)
    if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) != 0:
        return None  # a GPU that fell off the bus is still counted
    nvml.nvmlDeviceGetUUID(handle, uuid, len(uuid))
    nvml.nvmlDeviceGetName(handle, name, len(name))
    nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    return Gpu(index, uuid.value.decode(), name.value.decode(), memory.total)


def _torch_has_cuda() -> bool:
    """Whether the installed torch was built with CUDA, read from its version file."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return False
    version = Path(spec.submodule_search_locations[0]) / "version.py"
    try:
        return re.search(r"^cuda\b[^=]*=\s*['\"]", version.read_text(), re.MULTILINE) is not None
    except OSError:
        return False
