"""Compiles and loads every kernel that a runner's steps can need, before the first of them: many at a time.

A kernel is compiled for its shapes and for what its arguments are like, which takes half a second to several seconds,
and with it a small C module that launches it. Left to when it first occurs that happens one after the other while the
runner is made, and whatever the runner does not try then happens to a request: a step of five sequences beside a piece
of a prompt, when graphs had tried four and eight, stood still for two seconds.

`compile_ahead` makes every call that the forward pass and the sampling make, once for each kind of kernel they can come
to (`KINDS_OF_ROWS`, `kinds_of_decodes`), with Triton's kernels replaced by what only compiles them, the longest first,
and leaves the compiling to threads; nothing in those touches CUDA. tests/unit/test_specializations.py runs random plans
and asserts that they need nothing else. What it missed would be compiled late, as it would without it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from slipstream.model.llama import DecoderLayer, Llama
from slipstream.run.cuda.forward import add_part
from slipstream.run.cuda.inputs import DRAW_KINDS, DecodeColumns, MixedInputs, scratch_prompt
from slipstream.run.cuda.kernels.ops import TritonOps
from slipstream.run.cuda.kernels.shapes import KINDS_OF_ROWS
from slipstream.run.cuda.sampling import TritonTokens
from slipstream.run.sampler import DrawColumns

logger = logging.getLogger(__name__)

THREADS = 16
PROMPT = 200  # tokens: more than one block of rows


class Compiling:
    """Stands for a kernel, or a module of them: what would be launched is only compiled, and put into `found`."""

    def __init__(self, target: Any, found: list[Any]) -> None:
        self._target, self._found = target, found

    def __getattr__(self, name: str) -> Compiling:
        return Compiling(getattr(self._target, name), self._found)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def compile(*args: Any, **named: Any) -> Any:
            self._found.append(self._target.warmup(*args, grid=grid, **named))

        return compile


@contextmanager
def compiling(ops: TritonOps, tokens: TritonTokens) -> Iterator[list[Any]]:
    """Within, calls of both compute nothing; gives the list of what they compile."""
    found: list[Any] = []
    kept, kept_tokens = ops.modules, tokens.kernels
    ops.modules = {name: Compiling(module, found) for name, module in kept.items()}
    tokens.kernels = Compiling(kept_tokens, found)
    try:
        yield found
    finally:
        ops.modules, tokens.kernels = kept, kept_tokens


class WithLaunchers:
    """The executor that Triton gives its compiling to: behind a kernel it makes the C module that launches it, which
    Triton keeps on disk and would otherwise make when the kernel is first launched, with a C compiler."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool

    def submit(self, compile: Callable[[], Any]) -> Future[Any]:
        return self._pool.submit(self._both, compile)

    @staticmethod
    def _both(compile: Callable[[], Any]) -> Any:
        from triton.runtime.driver import driver  # pyright: ignore[reportMissingImports]

        kernel = compile()
        driver.active.launcher_cls(kernel.src, kernel.metadata)
        return kernel


def compile_ahead(
    ops: TritonOps, tokens: TritonTokens, model: Llama, sizes: Sequence[int], *, sequences: int, context: int
) -> None:
    """For decode steps of `sizes` sequences, and for all steps of up to `sequences` sequences of up to `context`
    tokens each."""
    from triton import AsyncCompileMode  # pyright: ignore[reportMissingImports]

    started = time.perf_counter()
    threads = min(THREADS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else THREADS)
    with compiling(ops, tokens) as found, ThreadPoolExecutor(threads) as pool, AsyncCompileMode(WithLaunchers(pool)):
        for layer in model.layers[:2]:  # where the pool of one is not aligned, that of the first still is
            _prompts(ops, model, layer, paged=sequences * context > ops.room_laid_out)
            for count in ops.kinds_of_decodes(sequences):
                _decode_attention(ops, model, layer, count)
        _draws(tokens, model)
        for rows in KINDS_OF_ROWS:
            _products(ops, model, rows)
        for rows in sorted({min(size, KINDS_OF_ROWS[-1]) for size in sizes}):
            x = torch.empty(rows, model.config.hidden, dtype=model.dtype, device=model.device)
            ops.project(x, model.head, x.new_empty(rows, model.head.weight.shape[0]), model.norm)
    compiled = {id(kernel): kernel for kernel in map(_done, found) if kernel is not None}
    for kernel in compiled.values():
        kernel[(1, 1, 1)]  # loads it onto the device
    seconds = time.perf_counter() - started
    logger.info("%d kernels compiled or found, and loaded, in %.1f s by %d threads", len(compiled), seconds, threads)


def _done(kernel: Any) -> Any:
    """The kernel that was compiled, or was going to be."""
    return kernel.result() if hasattr(kernel, "result") else kernel


def _prompts(ops: TritonOps, model: Llama, layer: DecoderLayer, *, paged: bool) -> None:
    """Attention of prompts; `paged`: also where sequences are too long to be laid out."""
    layout = ops.pool.layout
    inputs = MixedInputs(layout.page_tokens, layout.kv_heads, model.device)
    step = inputs.fill(scratch_prompt(PROMPT, layout.page_tokens))
    qkv = torch.empty(PROMPT, layer.qkv.weight.shape[0], dtype=model.dtype, device=model.device)
    out = qkv.new_empty(PROMPT, model.config.heads * model.config.head_dim)
    ops.prefill_attention(layer, qkv, out, step)
    if paged and ops.gathers:
        ops.prefill_attention(layer, qkv, out, replace(step, laid_out=ops.room_laid_out + 1))


def _decode_attention(ops: TritonOps, model: Llama, layer: DecoderLayer, sequences: int) -> None:
    qkv = torch.empty(sequences, layer.qkv.weight.shape[0], dtype=model.dtype, device=model.device)
    ints = torch.ones(sequences, dtype=torch.int32, device=model.device)
    step = DecodeColumns(ints, ints, ints, ints[:1], ints, ints)
    ops.decode_attention(layer, qkv, qkv.new_empty(sequences, model.config.heads * model.config.head_dim), step)


def _draws(tokens: TritonTokens, model: Llama) -> None:
    """In graphs, which keep what they draw, and behind other steps, from float32."""
    place = model.device
    how = DrawColumns(*(torch.zeros(1, dtype=kind, device=place) for kind in DRAW_KINDS))
    rows, chosen = (torch.zeros(1, dtype=kind, device=place) for kind in (torch.int32, torch.int64))
    tokens.feed(rows, rows, rows)
    tokens.draw(torch.empty(1, tokens.vocab, dtype=model.dtype, device=place), how, chosen, rows, rows)
    tokens.draw(torch.empty(1, tokens.vocab, device=place), how, chosen)


def _products(ops: TritonOps, model: Llama, rows: int) -> None:
    """Those of a layer, as `forward` makes them."""
    layer = model.layers[0]
    x = torch.empty(rows, model.config.hidden, dtype=model.dtype, device=model.device)
    ops.project(x, layer.qkv, x.new_empty(rows, layer.qkv.weight.shape[0]), layer.input_norm)
    add_part(model, ops, x.new_empty(rows, layer.output.weight.shape[1]), layer.output, x)
    activated = ops.gated(x, layer.gate_up, x.new_empty(rows, model.config.intermediate), layer.mlp_norm)
    add_part(model, ops, activated, layer.down, x)
