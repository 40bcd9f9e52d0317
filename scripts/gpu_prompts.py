"""What steps that hold prompts cost the host and the device, run kernel by kernel and as prompt graphs.

`prompts` prints, for each shape of model: what capturing took, and for steps of several sizes, with and without
sequences that decode beside them, milliseconds of the host (launching, while the device waits for nothing), of the
device (launched behind a pause that hides the host), and of a step that is waited for. `gpu_engine.py prompts` calls
it. On a CPU it runs over the kernels' twins, to try the script itself.
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
import time
from pathlib import Path
from typing import Any

from gpu_figures import Figures
from gpu_models import opened_model

TOKENS = (16, 128, 512, 2048, 8192)
DECODES = (0, 32)
CONTEXT = 1024  # of those that decode
REPEATS = 7
HIDE_CYCLES = 120_000_000  # 60 ms of an H200: longer than any launching


def prompts(
    shapes: str,
    device: str,
    figures: Figures,
    *,
    tokens: tuple[int, ...] = TOKENS,
    decodes: tuple[int, ...] = DECODES,
    repeats: int = REPEATS,
) -> None:
    for shape in shapes.split(","):
        opened = opened_model(shape, device, max_sequences=max(DECODES) + 1)
        pages = opened.layout.pages_for(max(tokens)) + max(DECODES) * opened.layout.pages_for(CONTEXT) + 1
        for graphs in (False, True):
            runner = made_runner(opened, pages, graphs=graphs)
            if graphs:
                pieces = runner._pieces
                print(
                    f"{shape}: {len(pieces.sizes)} sizes up to {pieces.sizes[-1]} captured in "
                    f"{pieces.capture_s:.2f} s, {pieces.taken_bytes / 2**20:.0f} MiB",
                    flush=True,
                )
            for beside in decodes:
                for count in tokens:
                    host, device_ms, alone = measured(runner, mixed_plan(opened.layout, count, beside), repeats)
                    name = f"{shape} prompt graphs {'on' if graphs else 'off'}, {count} tokens beside {beside}"
                    figures.add(name, alone, "ms", note=f"host {host:.2f}, device {device_ms:.2f}")
            print_profile(runner, mixed_plan(opened.layout, min(512, max(tokens)), max(decodes)))
            del runner


def made_runner(opened: Any, pages: int, *, graphs: bool) -> Any:
    """The runner of GPUs; over the twins on a CPU."""
    import torch

    from slipstream.bench.engine import fill_pool
    from slipstream.run.attention import PagedPool
    from slipstream.run.cuda.kernels.twins import TorchOps
    from slipstream.run.cuda.runner import CudaRunner

    layout, model = opened.layout, opened.model
    memory = torch.empty(pages * layout.page_bytes, dtype=torch.uint8, device=opened.device)
    fill_pool(memory, layout, opened.placement.dtype)
    ops = None
    if opened.device.type == "cpu":
        ops = TorchOps(PagedPool(memory, layout, model.dtype), model.rotary)
    runner = CudaRunner(model, layout, memory, max(DECODES) + 1, pages, ops=ops, prompt_graphs=graphs)
    runner.warm_up(pages)
    return runner


def mixed_plan(layout: Any, tokens: int, decodes: int) -> Any:
    """A whole prompt of `tokens` behind sequences of CONTEXT tokens that decode."""
    import numpy as np

    from slipstream.bench.engine import GREEDY
    from slipstream.engine.plan import NewRow, StepPlan

    rng = np.random.default_rng(0)
    counts = np.array([1] * decodes + [tokens])
    lengths = np.array([CONTEXT] * decodes + [tokens])
    each = layout.pages_for(CONTEXT)
    tables = np.zeros((decodes + 1, layout.pages_for(max(CONTEXT, tokens))), dtype=np.int64)
    tables[:decodes, :each] = 1 + np.arange(decodes * each).reshape(decodes, each)
    used = layout.pages_for(tokens)
    tables[decodes, :used] = 1 + decodes * each + np.arange(used)
    return StepPlan(
        step=1,
        token_ids=rng.integers(3, 300, int(counts.sum())),
        positions=np.concatenate([np.full(decodes, CONTEXT - 1), np.arange(tokens)]),
        query_start=np.concatenate([[0], np.cumsum(counts)]),
        context_lens=lengths,
        block_tables=tables,
        rows=np.arange(decodes + 1),
        sample=np.ones(decodes + 1, dtype=np.bool_),
        new_rows=[NewRow(row, GREEDY, [], [], (), 0) for row in range(decodes + 1)],
    )


def measured(runner: Any, plan: Any, repeats: int) -> tuple[float, float, float]:
    """Medians: (host, device, alone) in milliseconds. On a CPU the device's time is the host's."""
    import torch

    on_gpu = runner.model.device.type == "cuda"
    for _ in range(2):
        runner.execute(plan)
    host, alone, device = [], [], []
    for _ in range(repeats):
        began = time.perf_counter()
        runner.launch(plan)
        launched = time.perf_counter()
        runner.collect()
        host.append((launched - began) * 1e3)
        alone.append((time.perf_counter() - began) * 1e3)
        if on_gpu:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            with torch.cuda.stream(runner._stream):
                torch.cuda._sleep(HIDE_CYCLES)
                begin.record()
                runner.launch(plan)
                end.record()
            runner.collect()
            device.append(begin.elapsed_time(end))
    return statistics.median(host), statistics.median(device or host), statistics.median(alone)


def print_profile(runner: Any, plan: Any, most: int = 14) -> None:
    """Where the host's time of launching goes; a profiler makes all of it longer."""
    profiler = cProfile.Profile()
    for _ in range(5):
        profiler.enable()
        runner.launch(plan)
        profiler.disable()
        runner.collect()
    found: Any = pstats.Stats(profiler)
    entries = sorted(found.stats.items(), key=lambda item: -item[1][2])[:most]
    for (file, line, name), (_, calls, own, _, _) in entries:
        print(f"  {own / 5 * 1e3:7.2f} ms {calls // 5:5d} x {Path(file).name}:{line} {name}", flush=True)
