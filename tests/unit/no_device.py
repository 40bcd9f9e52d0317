"""Triton for a GPU that is not there: kernels are looked up, compiled and launched as for Hopper, and nothing runs.

To be used in a process of its own: Triton's driver, and what this project thinks a GPU is, are replaced for good.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from slipstream.model.config import ModelConfig, RopeConfig
from slipstream.model.llama import Llama
from slipstream.model.shard import Shard
from slipstream.run.attention import PagedPool
from slipstream.run.cuda.kernels import hopper
from slipstream.run.cuda.kernels.ops import TritonOps
from slipstream.run.cuda.sampling import TritonTokens

SHARED_BYTES = 227 << 10  # that a program may have on Hopper
STREAM = 77

# As their checkpoints say; layers are all alike, so two of them do, and positions only make tables longer.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen-1.5b": {"hidden": 1536, "intermediate": 8960, "heads": 12, "kv_heads": 2, "head_dim": 128, "vocab": 151936},
    "llama-8b": {"hidden": 4096, "intermediate": 14336, "heads": 32, "kv_heads": 8, "head_dim": 128, "vocab": 128256},
    "smollm2": {"hidden": 576, "intermediate": 1536, "heads": 9, "kv_heads": 3, "head_dim": 64, "vocab": 49152},
    "qwen3": {"hidden": 1024, "intermediate": 3072, "heads": 16, "kv_heads": 8, "head_dim": 128, "vocab": 151936},
}
SHAPES["qwen-1.5b"] |= {"architecture": "qwen2", "qkv_bias": True, "tied": True}
SHAPES["smollm2"] |= {"tied": True}
SHAPES["qwen3"] |= {"architecture": "qwen3", "qk_norm": True, "tied": True}


def config(shape: str, **changes: Any) -> ModelConfig:
    given: dict[str, Any] = {"architecture": "llama", "layers": 2, "max_position": 4096, "norm_eps": 1e-6}
    given |= {"rope": RopeConfig(), "qkv_bias": False, "mlp_bias": False, **SHAPES[shape], **changes}
    return ModelConfig(**given)


class NoDevice:
    """Triton's driver of a GPU of `capability` that does not exist. `loaded` has the names of all that was loaded."""

    def __init__(self, capability: tuple[int, int] = (9, 0)) -> None:
        self.capability, self.loaded, self.utils = capability, [], self
        self.launcher_cls: Callable[..., Any] = lambda src, metadata: lambda *args: None

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 10 * self.capability[0] + self.capability[1], 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return STREAM

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_BYTES}

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        self.loaded.append(name)
        return 1, len(self.loaded), 0, 0, 1024


def use(driver: Any) -> None:
    """Triton's driver, and its capability that of every device, from now on."""
    from triton.runtime.driver import driver as chosen

    chosen.set_active(driver)
    hopper.capability = lambda device: driver.capability  # type: ignore[assignment]


def kernels_of(
    shape: ModelConfig,
    device: str,
    *,
    sequences: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: str = "bfloat16",
    page_tokens: int = 16,
    pages: int = 2,
    rank: int = 0,
    ranks: int = 1,
    make_tokens: Callable[..., TritonTokens] = TritonTokens,
) -> tuple[Llama, TritonOps, TritonTokens]:
    """A model, or a rank's part of one, whose weights are whatever memory holds, and its kernels over a pool."""
    place = torch.device(device)
    shard = Shard(shape, rank, ranks)
    model = Llama(shape, dtype=dtype, device=place, shard=shard)
    model.parallel = Same(rank, ranks)
    layout = shape.layout(page_tokens, kv_dtype, ranks, rank)
    pool = PagedPool(torch.zeros(pages * layout.page_bytes, dtype=torch.uint8, device=place), layout, dtype)
    ops = TritonOps(model.config, pool, model.rotary, sequences, pdl=hopper.capability(place) >= (9, 0))
    return model, ops, make_tokens(sequences, shape.vocab, dtype, place)


class Same:
    """Other ranks that always have what this one has."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x.expand(self.size, *x.shape)
