"""Opens a model for a worker: files, config, layout, device, weights; then its KV pool and its runner.

The one entry from the engine into `model` and `run`. Cheap checks come first: a wrong device, an unsupported
architecture or too little memory is said before the first weight is read. Of a worker with several ranks, each opens
its own part on its own device; `join` is where they meet.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor

from slipstream.config import EngineConfig
from slipstream.errors import ConfigError
from slipstream.kv.layout import HeadRange, KVLayout, head_range
from slipstream.kv.pool import HostPool
from slipstream.model.config import ModelConfig, read_config, refuse_indivisible, refuse_length
from slipstream.model.files import ModelFiles, locate
from slipstream.model.llama import Llama
from slipstream.model.loader import Progress, load
from slipstream.model.shard import Shard
from slipstream.run.device import (
    CHUNK_TOKENS,
    MIXED_CHUNK_TOKENS,
    Placement,
    free_bytes,
    place,
    pool_pages,
    refuse_pool,
    usable_cores,
)
from slipstream.run.parallel import Group, MemoryGroup
from slipstream.run.runner import Runner
from slipstream.transfer.transports.base import Region

logger = logging.getLogger(__name__)


class Pool(Protocol):
    """KV memory of its own, until `close`."""

    @property
    def region(self) -> Region: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A loaded model, or one rank's part of it, with all that a worker tells others about it.

    `config` is the whole model's; `engine.device` is this rank's, and its `chunk_tokens` are chosen if they were not.
    """

    engine: EngineConfig
    files: ModelFiles
    config: ModelConfig
    layout: KVLayout
    model: Llama
    placement: Placement

    @property
    def served_name(self) -> str:
        return self.engine.served_model_name or self.files.short_name

    @property
    def device(self) -> torch.device:
        return self.placement.device

    @property
    def device_name(self) -> str:
        return self.placement.name

    @property
    def pool_pages(self) -> int:
        """Pages that a pool may have now, one scratch page included."""
        if self.device.type == "cpu":
            return pool_pages(self.engine, self.layout, self.device)
        return pool_pages(self.engine, self.layout, self.device, self._step_bytes())

    @property
    def prompt_rows(self) -> int:
        """Tokens of the largest step that runs as prompt graphs; 0 without these."""
        from slipstream.run.cuda.pieces import MOST_ROWS

        most = self.engine.chunk_tokens + self.engine.max_sequences
        return min(MOST_ROWS, most) if self.engine.prompt_graphs else 0

    def _step_bytes(self) -> int:
        """What the largest step takes beside weights and pool: tried where one rank alone can run it, else reckoned;
        and what prompt graphs take."""
        from slipstream.run.cuda.memory import dry_run, step_bytes
        from slipstream.run.cuda.pieces import piece_bytes
        from slipstream.run.cuda.runner import why_not

        engine, sequences = self.engine, self.engine.max_sequences
        tokens = max(engine.chunk_tokens, sequences + engine.page_tokens)
        item_bytes = self.placement.dtype.itemsize
        graphs = piece_bytes(self.model.config, item_bytes, self.prompt_rows) if engine.prompt_graphs else 0
        if engine.kv_tokens or engine.tp > 1 or why_not(self.model, self.layout):
            return graphs + step_bytes(self.model.config, item_bytes, tokens, sequences)
        context = engine.max_model_len or self.config.max_position
        return graphs + dry_run(self.model, self.layout, tokens, sequences, context)

    @property
    def head_ranges(self) -> list[HeadRange]:
        """The KV heads of every rank of the worker."""
        return [head_range(self.config.kv_heads, self.engine.tp, rank) for rank in range(self.engine.tp)]

    def join(self, fds: Sequence[int], nccl_id: bytes = b"") -> Group:
        """Joins the other ranks; on GPUs this waits for all of them. To be called before `runner`.

        `fds` are this rank's of a `parallel.Meeting`, `nccl_id` is `parallel_nccl.new_id`'s where the ranks have GPUs.
        """
        shard = self.model.shard
        group: Group = MemoryGroup(fds, shard.rank)
        if self.device.type == "cuda":
            from slipstream.run.parallel_nccl import NcclGroup

            group.close()
            group = NcclGroup(nccl_id, shard.rank, shard.size, self.device)
        self.model.parallel = group
        return group

    def allocate_pool(self, probe_bytes: int, pages: int | None = None) -> Pool:
        """The KV pool, in host or device memory; of `pool_pages` pages unless told. Raises PoolTooSmall."""
        pages = self.pool_pages if pages is None else pages
        if self.device.type == "cpu":
            return HostPool.allocate(self.layout, pages, probe_bytes)
        from slipstream.transfer.cuda.memory import DeviceMemory

        return DeviceMemory.allocate(self.layout, pages, probe_bytes, str(self.device))

    def max_model_len(self, pages: int) -> int:
        """Longest prompt plus answer in tokens: what the user, the model and a pool of `pages` pages allow.

        Raises ConfigError when the user asks for more than the model has or for too little to answer anything,
        PoolTooSmall for more than the pool has.
        """
        pool_tokens = (pages - 1) * self.layout.page_tokens  # one page is scratch
        wanted = self.engine.max_model_len
        refuse_length(self.config, wanted, pool_tokens, self.engine.model)
        return wanted or min(self.config.max_position, pool_tokens)

    def runner(self, pool: Region | Tensor, max_sequences: int) -> Runner:
        """The executor of plans over a pool: its region, or its pages as a byte tensor."""
        memory = pool if isinstance(pool, Tensor) else region_tensor(pool, self.device)
        if self.device.type == "cuda":
            from slipstream.run.cuda.runner import CudaRunner, why_not

            reason = why_not(self.model, self.layout)
            wanted = self.engine.attention_backend
            if reason and wanted not in ("auto", "torch"):
                raise ConfigError(f"attention backend {wanted!r} cannot be used: {reason}.")
            if wanted == "torch":
                reason = "attention backend 'torch' was asked for"
            if not reason:
                max_pages = self.layout.pages_for(self.max_model_len(memory.numel() // self.layout.page_bytes))
                runner = CudaRunner(
                    self.model,
                    self.layout,
                    memory,
                    max_sequences,
                    max_pages,
                    prompt_graphs=self.engine.prompt_graphs,
                    prompt_rows=self.prompt_rows,
                )
                runner.settle(wanted)
                runner.warm_up(max_pages, self.engine.chunk_tokens)
                return runner
            logger.warning("steps run in plain torch, many times slower than with kernels: %s", reason)
        return Runner(self.model, self.layout, memory, max_sequences, threads=self.placement.threads)


def open_model(engine: EngineConfig, progress: Progress | None = None, *, rank: int = 0) -> OpenedModel:
    """Loads the model that a worker was configured with, or the part of it that is rank `rank`'s.

    `engine.device` names that rank's device alone. Before a weight is read it raises ConfigError for a device that is
    not there, a model that `engine.tp` ranks cannot share, or a context that it does not have, PoolTooSmall for a pool
    that cannot hold what was asked for or does not fit; ModelError for whatever is wrong with the model.
    """
    if engine.tp > 1 and not engine.threads:
        engine = msgspec.structs.replace(engine, threads=max(1, len(usable_cores()) // engine.tp))
    placement = place(engine)
    chunk_tokens = engine.chunk_tokens or CHUNK_TOKENS[placement.device.type]
    mixed = engine.mixed_chunk_tokens or MIXED_CHUNK_TOKENS[placement.device.type]
    engine = msgspec.structs.replace(engine, chunk_tokens=chunk_tokens, mixed_chunk_tokens=min(mixed, chunk_tokens))
    dummy = engine.load_format == "dummy"
    files = locate(engine.model, need_weights=not dummy)
    config = read_config(files)
    refuse_indivisible(config, engine.tp)
    if placement.device.type == "cpu" and engine.attention_backend not in ("auto", "torch"):
        raise ConfigError(
            f"attention backend {engine.attention_backend!r} needs an NVIDIA GPU, and this worker computes on a CPU; "
            "give --attention-backend auto or torch, or another --device."
        )
    kv_dtype = placement.dtype_name if engine.kv_dtype == "auto" else engine.kv_dtype
    layout = config.layout(engine.page_tokens, kv_dtype, engine.tp, rank)
    if placement.threads:
        torch.set_num_threads(placement.threads)
    refuse_length(config, engine.max_model_len, layout.pages_for(engine.kv_tokens) * engine.page_tokens, engine.model)
    free = free_bytes(placement.device)
    refuse_pool(engine, layout, placement.device, free)
    model = load(
        files,
        config,
        placement.device,
        placement.dtype,
        progress,
        free_bytes=free,
        dummy=dummy,
        shard=Shard(config, rank, engine.tp),
    )
    return OpenedModel(engine, files, config, layout, model, placement)


class _DeviceBytes:
    """Device memory in the words of the CUDA array interface, which torch wraps without a copy."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def region_tensor(region: Region, device: torch.device) -> Tensor:
    """The pages of a pool as a byte tensor over the same memory."""
    size = region.pages * region.page_bytes
    if region.array is not None:
        return torch.frombuffer(region.array, dtype=torch.uint8, count=size)
    return torch.as_tensor(_DeviceBytes(region.address, size), device=device)
