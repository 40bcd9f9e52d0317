"""Captures what is launched on a stream as a CUDA graph."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch


def captured(compute: Callable[[], object], pool: Any) -> Callable[[], None]:
    """What `compute` launches on the current stream, which may not be the device's default, as a graph to replay.

    Its activations are taken from `pool` (`torch.cuda.graph_pool_handle`). `compute` has run on this stream before, so
    that nothing is compiled, loaded, or allocated for good while it is captured.

    The mode is `thread_local`. While a stream is captured CUDA refuses calls that could wait for it or that the graph
    would miss (cudaMalloc, cudaEventQuery of a captured event, a blocking copy). In the default mode, `global`, it
    refuses them to every thread of the process, and the refused call fails *and* spoils the capture; but other threads
    have their own business then: the mover and the IO thread of another worker in this process query events, register
    and map memory and load copy kernels, NCCL's proxies allocate. `thread_local` refuses to this thread alone, where
    a refusal is a fault of ours, and lets them be. `relaxed` would hide such faults.

    Three things spoil a capture from another thread in any mode. Nobody works on the captured stream but this thread.
    All streams here are created non-blocking, so that work on the legacy default stream has no order to it. And nobody
    waits for the whole device but who makes a runner, and who frees memory (`torch.cuda.empty_cache` of a dry run, the
    end of a pool): two runners of one device are made one after the other. And nothing is collected meanwhile: graphs
    of a runner that is gone would be destroyed then, by this thread, which is one of the calls that are refused.
    """
    graph = torch.cuda.CUDAGraph()
    with _nothing_collected():
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            compute()
        except BaseException:
            with suppress(RuntimeError):  # a stream that is still captured would fail all that follow
                graph.capture_end()
            raise
        graph.capture_end()
    return graph.replay


@contextmanager
def _nothing_collected() -> Iterator[None]:
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
