"""What a worker computes on: device, dtype, threads, and how much memory its KV pool may take.

Every choice that `auto` leaves open is made here, from what this machine really has, and can be asked for by name.
"""

from __future__ import annotations

import logging
import os
import platform
import re
from dataclasses import dataclass

import torch

from slipstream.config import EngineConfig
from slipstream.errors import ConfigError, PoolTooSmall
from slipstream.kv.layout import KVLayout
from slipstream.kv.pool import available_bytes, in_words

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CPU_POOL_TOKENS = 32768  # default of a CPU worker, when memory allows
CPU_POOL_SHARE = 0.25  # of free memory, at most: several workers share a machine
CONTEXT_BYTES = 512 << 20  # what a process takes of a GPU besides its tensors
GPU_RESERVE_BYTES = 1 << 30  # left for compiled code, graphs and the runtime's own needs
CHUNK_TOKENS = {"cpu": 512, "cuda": 8192}  # of one step, unless told: what keeps a device busy
MIXED_CHUNK_TOKENS = {"cpu": 32, "cuda": 512}  # of one in which others decode; on a GPU at most (`engine.chunks`)
UUID = re.compile(r"(GPU-)?[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


@dataclass(frozen=True, slots=True)
class Placement:
    """Where and how a model runs: `dtype` is that of weights and KV, `name` what people call the device."""

    device: torch.device
    dtype: torch.dtype
    threads: int
    name: str

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def place(engine: EngineConfig) -> Placement:
    """Resolves device, dtype and threads. Raises ConfigError when a named device does not exist."""
    device = resolve_device(engine.device)
    dtype = resolve_dtype(engine.dtype, device)
    threads = 0
    if device.type == "cpu":
        threads = engine.threads or len(usable_cores())
    return Placement(device, dtype, threads, device_name(device))


def resolve_device(name: str) -> torch.device:
    """`auto`, `cpu`, `cuda`, `cuda:N` or a GPU's UUID as torch's device."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cpu" or (name == "auto" and not count):
        return torch.device("cpu")
    index = 0
    if UUID.fullmatch(name):
        found = [str(torch.cuda.get_device_properties(at).uuid).lower() for at in range(count)]
        wanted = name.lower().removeprefix("gpu-")
        if wanted not in found:
            raise ConfigError(f"no GPU {name} is visible to this process; visible: {', '.join(found) or 'none'}.")
        index = found.index(wanted)
    elif match := re.fullmatch(r"cuda:(\d+)", name):
        index = int(match[1])
    elif name not in ("auto", "cuda"):
        raise ConfigError(f"device {name!r} is not known; give auto, cpu, cuda, cuda:N or a GPU's UUID.")
    if index >= count:
        why = "torch was built without CUDA" if not torch.backends.cuda.is_built() else f"{count} GPUs are visible"
        raise ConfigError(f"device {name!r} does not exist here ({why}); give cpu or another device.")
    return torch.device("cuda", index)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on GPUs and on CPUs that multiply it in hardware, else float32."""
    fast_bfloat16 = device.type == "cuda" or _has_amx()
    if name == "auto":
        return torch.bfloat16 if fast_bfloat16 else torch.float32
    if name != "float32" and not fast_bfloat16:
        logger.warning("dtype %s is slow on this CPU, which multiplies only float32 fast: prompts take longer", name)
    return DTYPES[name]


def _has_amx() -> bool:
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and torch.cpu._is_amx_tile_supported()


def usable_cores() -> set[int]:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def device_name(device: torch.device) -> str:
    """A GPU's model and index, or `cpu` with the processor's architecture."""
    if device.type == "cuda":
        return f"cuda:{device.index} {torch.cuda.get_device_name(device)}"
    return f"cpu ({platform.machine()})"


def free_bytes(device: torch.device) -> int | None:
    """Memory that can still be had on the device; None when the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_bytes()


def refuse_pool(engine: EngineConfig, layout: KVLayout, device: torch.device, free: int | None) -> None:
    """Raises PoolTooSmall when a KV pool that was asked for would not fit into the `free` bytes of a device even
    without weights; None is not known."""
    needed = (layout.pages_for(engine.kv_tokens) + 1) * layout.page_bytes
    if engine.kv_tokens and free is not None and needed > free:
        raise PoolTooSmall(
            f"a KV pool of {engine.kv_tokens} tokens needs {in_words(needed)}, {in_words(free)} are free on {device} "
            f"before any weight is there. Lower --kv-tokens, to clearly less than {free // layout.token_bytes}, or "
            "free memory."
        )


def pool_pages(engine: EngineConfig, layout: KVLayout, device: torch.device, step_bytes: int = 0) -> int:
    """Pages of the KV pool, one scratch page included; asked for when the weights are already in memory.

    `kv_tokens` is obeyed when given. Otherwise a GPU gives what this worker may fill, `mem_fraction` of its memory,
    less what it has taken, as far as others have left that much; `step_bytes` stay free for the activations of steps.
    A CPU gives a modest pool: room for a whole context and for CPU_POOL_TOKENS, within CPU_POOL_SHARE of free memory.

    Raises PoolTooSmall when not even one page of tokens fits.
    """
    if engine.kv_tokens:
        return layout.pages_for(engine.kv_tokens) + 1
    free = free_bytes(device)
    if device.type == "cuda":
        total = torch.cuda.mem_get_info(device)[1]
        taken = torch.cuda.memory_reserved(device) + CONTEXT_BYTES
        share = engine.mem_fraction * total - taken
        if total - (free or 0) > taken + GPU_RESERVE_BYTES:  # others are there, whose steps take room at any time
            share -= step_bytes
        pages = int(min(share, (free or 0) - step_bytes - GPU_RESERVE_BYTES)) // layout.page_bytes
    else:
        pages = layout.pages_for(max(CPU_POOL_TOKENS, engine.max_model_len)) + 1
        if free is not None:
            pages = min(pages, int(free * CPU_POOL_SHARE) // layout.page_bytes)
    if pages < 2:
        raise PoolTooSmall(
            f"after the weights {in_words(free or 0)} are free on {device}, too little for a KV pool: one page "
            f"of {layout.page_tokens} tokens takes {layout.page_bytes} bytes. Use a smaller model, a shorter dtype, "
            "or a larger --mem-fraction."
        )
    return pages
