"""Compiles the kernels of decode steps and prompts before they are first launched, many at a time.

A kernel is compiled for its shapes when they first occur: half a second to two seconds each, one after the other, for
some thirty of them. `compile_ahead` walks through the steps that will be captured without launching any of Triton's
kernels, and leaves the compiling to threads. What it misses is compiled later, as it would have been.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from slipstream.engine.plan import StepPlan
from slipstream.model.llama import Llama
from slipstream.run.cuda.inputs import DecodeColumns, MixedInputs
from slipstream.run.cuda.ops import TritonOps

logger = logging.getLogger(__name__)

THREADS = 16
PROMPT = 200  # tokens: more than one block of rows


class Compiling:
    """Stands for a kernel, or a module of them: what would be launched is only compiled."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Compiling:
        return Compiling(getattr(self._target, name))

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return partial(self._target.warmup, grid=grid)


@contextmanager
def compiling(ops: TritonOps) -> Iterator[None]:
    """Within, calls of `ops` compute nothing."""
    kept = ops.modules
    ops.modules = {name: Compiling(module) for name, module in kept.items()}
    try:
        yield
    finally:
        ops.modules = kept


def compile_ahead(ops: TritonOps, model: Llama, sizes: list[int], pieces: Sequence[int] = ()) -> None:
    """For decode steps of these numbers of sequences, for prompts, and for pieces of steps of these numbers of rows."""
    from triton import AsyncCompileMode  # pyright: ignore[reportMissingImports]

    started = time.perf_counter()
    threads = min(THREADS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else THREADS)
    with ThreadPoolExecutor(threads) as pool, AsyncCompileMode(pool), compiling(ops):
        for rows in sorted({*sizes, *pieces}):
            _decode(ops, model, rows)
        _prompt(ops, model)
    logger.info("kernels compiled or found in %.1f s by %d threads", time.perf_counter() - started, threads)


def _decode(ops: TritonOps, model: Llama, rows: int) -> None:
    config, layer = model.config, model.layers[0]
    x = torch.zeros(rows, config.hidden, dtype=model.dtype, device=model.device)
    ints = torch.ones(rows, dtype=torch.int32, device=model.device)
    step = DecodeColumns(token_ids=ints, lengths=ints, tables=ints, width_at=ints[:1], rows=ints)
    qkv = ops.project(x, layer.qkv, x.new_zeros(rows, layer.qkv.weight.shape[0]), layer.input_norm)
    attended = ops.decode_attention(layer, qkv, x.new_zeros(rows, config.heads * config.head_dim), step)
    ops.add_project(attended, layer.output, x)
    activated = ops.gated(x, layer.gate_up, x.new_zeros(rows, config.intermediate), layer.mlp_norm)
    ops.add_project(activated, layer.down, x)
    ops.project(x, model.head, x.new_zeros(rows, model.head.weight.shape[0]), model.norm)


def _prompt(ops: TritonOps, model: Llama) -> None:
    layout, layer = ops.pool.layout, model.layers[0]
    plan = StepPlan(
        step=0,
        token_ids=np.zeros(PROMPT, dtype=np.int64),
        positions=np.arange(PROMPT),
        query_start=np.array([0, PROMPT]),
        context_lens=np.array([PROMPT]),
        block_tables=np.zeros((1, layout.pages_for(PROMPT)), dtype=np.int64),
        rows=np.zeros(1, dtype=np.int64),
        sample=np.zeros(1, dtype=np.bool_),
    )
    step = MixedInputs(layout.page_tokens, model.device).fill(plan)
    qkv = torch.zeros(PROMPT, layer.qkv.weight.shape[0], dtype=model.dtype, device=model.device)
    ops.prefill_attention(layer, qkv, qkv.new_zeros(PROMPT, model.config.heads * model.config.head_dim), step)
