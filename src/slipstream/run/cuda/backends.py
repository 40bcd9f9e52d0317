"""Which kernels compute attention, and how that is decided.

Decode attention is the engine's own on every GPU: nothing measured was faster (docs/performance.md). Attention of
prompts has a choice, `PromptAttention`: the engine's kernels, or FlashInfer's FA3 where that is installed. `settle`
obeys --attention-backend or says why it cannot; `auto` times both on a made-up prompt and takes the faster. FlashInfer
compiles its kernels when they are first used, which takes minutes and a CUDA compiler, so `auto` only considers it
where they are there already.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.config import AttentionBackend
from slipstream.errors import ConfigError
from slipstream.model.config import ModelConfig
from slipstream.model.llama import Llama
from slipstream.run.attention import PagedPool
from slipstream.run.cuda.inputs import MixedColumns, MixedInputs, scratch_prompt
from slipstream.run.cuda.kernels.ops import PromptAttention, TritonOps

logger = logging.getLogger(__name__)

WORKSPACE_BYTES = 128 << 20
TRIED_TOKENS = 4096  # of the prompt that decides; pages hold nothing but their own scratch page
REPEATS = 3


def settle(wanted: AttentionBackend, ops: TritonOps, model: Llama) -> str:
    """Gives `ops` its attention of prompts; returns the backend's name. Called once, on the runner's stream; not for
    `torch`, which is another runner.

    Raises ConfigError when `wanted` is flashinfer and that cannot serve this model here.
    """
    if wanted == "triton":
        return "triton"
    reason = why_not_flashinfer(model.config, ops.pool)
    if wanted == "flashinfer":
        if reason:
            raise ConfigError(
                f"attention backend 'flashinfer' cannot be used: {reason}; give --attention-backend auto or triton."
            )
        logger.info("attention of prompts by flashinfer, as asked")
        ops.prompts = FlashInferPrompts(model.config, ops.pool)
        return "flashinfer"
    if not reason and not _compiled(model.config, ops.pool):
        reason = "its kernels are not compiled yet (--attention-backend flashinfer compiles them)"
    if reason:
        logger.info("attention of prompts by the engine's own kernels; flashinfer: %s", reason)
        return "triton"
    return _faster(ops, model)


def why_not_flashinfer(config: ModelConfig, pool: PagedPool) -> str:
    """Why FlashInfer's FA3 cannot serve; empty when it can."""
    if torch.cuda.get_device_capability(pool.device) != (9, 0):
        return "FA3 needs compute capability 9.0"
    if pool.quantized or pool.dtype == torch.float32:
        return "it is used with bfloat16 and float16 KV only"
    if pool.layout.head_dim not in (64, 128, 256):
        return f"FA3 has no kernel for heads of {pool.layout.head_dim} numbers"
    try:
        importlib.import_module("flashinfer")
    except (ImportError, OSError) as error:
        return f"it does not load ({error}); pip install 'slipstream[flashinfer]'"
    return ""


def _compiled(config: ModelConfig, pool: PagedPool) -> bool:
    """Whether the module that `FlashInferPrompts` needs lies ready."""
    attention: Any = importlib.import_module("flashinfer.jit.attention")
    kind, dim = pool.dtype, pool.layout.head_dim
    module = attention.gen_batch_prefill_module("fa3", kind, kind, kind, torch.int32, dim, dim, 0, False, False, False)
    return bool(module.aot_path.exists() or module.jit_library_path.exists())


def _faster(ops: TritonOps, model: Llama) -> str:
    """Times both on the same prompt, leaves the faster in `ops`, and says so."""
    layer, config, layout = model.layers[0], model.config, ops.pool.layout
    step = MixedInputs(layout.page_tokens, layout.kv_heads, ops.pool.device).fill(
        scratch_prompt(TRIED_TOKENS, layout.page_tokens)
    )
    width = (config.heads + 2 * config.kv_heads) * config.head_dim
    place = {"dtype": ops.pool.dtype, "device": ops.pool.device}
    qkv = torch.randn(TRIED_TOKENS, width, **place)
    out = torch.empty(TRIED_TOKENS, config.heads * config.head_dim, **place)
    times: dict[str, float] = {}
    candidates: dict[str, PromptAttention | None] = {"triton": None}
    try:
        candidates["flashinfer"] = FlashInferPrompts(config, ops.pool)
        for name, prompts in candidates.items():
            ops.prompts = prompts
            times[name] = _milliseconds(lambda: ops.prefill_attention(layer, qkv, out, step))
    except Exception as error:  # of a package that is not ours, and can be done without
        logger.warning("flashinfer failed and is not used: %s", error)
        times = {"triton": 0.0}
    best = min(times, key=lambda name: times[name])
    ops.prompts = candidates[best]
    if len(times) > 1:
        found = ", ".join(f"{name} {ms:.2f} ms" for name, ms in times.items())
        logger.info("attention of prompts by %s (%d tokens, one layer: %s)", best, TRIED_TOKENS, found)
    return best


def _milliseconds(call: Any) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    call()
    begin.record()
    for _ in range(REPEATS):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / REPEATS


class FlashInferPrompts:
    """FlashInfer's FA3 over the pages of a pool. One schedule a step, made on the host, serves all layers.

    The schedule is copied to the device from memory that the next schedule overwrites; so there are two of them, and
    each waits for its last copy before it is used again.
    """

    def __init__(self, config: ModelConfig, pool: PagedPool) -> None:
        flashinfer: Any = importlib.import_module("flashinfer")
        self.config, self.pool = config, pool
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=pool.device)
        self._schedules = [
            flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend="fa3") for _ in range(2)
        ]
        self._copied = [torch.cuda.Event() for _ in range(2)]
        self._turn = 0
        self._planned: MixedColumns | None = None

    def __call__(self, layer: int, qkv: Tensor, out: Tensor, step: MixedColumns) -> Tensor:
        if self._planned is not step:
            self._plan(step)
        heads, dim = self.config.heads, self.config.head_dim
        keys, values = self.pool.layer(layer).unbind(2)  # [pages, heads, tokens, dim]
        query = qkv.view(len(qkv), -1, dim)[:, :heads]
        self._schedules[self._turn].run(query, (keys, values), out=out.view(len(out), heads, dim))
        return out

    def _plan(self, step: MixedColumns) -> None:
        self._turn = 1 - self._turn
        self._copied[self._turn].synchronize()
        chunks, layout = step.chunks, self.pool.layout
        used = -(-chunks.lengths // layout.page_tokens)
        pages = np.concatenate([table[:count] for table, count in zip(chunks.tables, used, strict=True)])
        self._schedules[self._turn].plan(
            _ints(chunks.query_start),
            _ints(np.concatenate([[0], np.cumsum(used)])),
            _ints(pages).to(self.pool.device, non_blocking=True),
            _ints(chunks.lengths - (used - 1) * layout.page_tokens),
            self.config.heads,
            layout.kv_heads,
            layout.head_dim,
            layout.page_tokens,
            causal=True,
            q_data_type=self.pool.dtype,
            kv_data_type=self.pool.dtype,
        )
        self._copied[self._turn].record()
        self._planned = step


def _ints(values: Any) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int32))
