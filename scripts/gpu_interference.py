"""What transfers cost the work beside them: a loop bound by memory and one of matrix products, on either GPU.

    python scripts/gpu_interference.py [--out FOLDER] [--paced]

Pages are moved without a pause, by the kernel with several numbers of programs and by the copy engine; then as handoffs
come, one of 128 MiB (1,024 tokens of an 8B model) each 25, 5 and 2.5 ms. `--paced`: those alone. Needs two GPUs.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_transfer import ENGINE_ONLY, GIB, KERNEL_ONLY, Pools, Results

from slipstream.transfer.cuda.copier import Copier
from slipstream.transfer.cuda.launcher import CopySettings
from slipstream.transfer.cuda.plan import survey


def interference(folder: str, steady: bool) -> None:
    """How much slower loops on either GPU run while pages of 32 KiB are moved without a pause.

    "here" is the GPU whose kernel or copy engine moves the data, "there" the other: a push is read here and written
    there, a pull the other way.
    """
    pools, results = Pools(), Results(folder, "interference")
    torch = pools.torch
    loops = {}
    for gpu, side in ((0, "here"), (1, "there")):
        device = f"cuda:{min(gpu, torch.cuda.device_count() - 1)}"
        weights = torch.randn(GIB // 4096, 4096, device=device, dtype=torch.bfloat16)  # 2 GiB, read once an iteration
        vector = torch.randn(4096, device=device, dtype=torch.bfloat16)
        square = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
        loops[side, "memory"] = _graph(torch, device, lambda w=weights, v=vector: w @ v, 20)
        loops[side, "matmul"] = _graph(torch, device, lambda s=square: s @ s, 7)
    first = {" ".join(name): round(1e3 * statistics.median(run() for _ in range(5)), 3) for name, run in loops.items()}
    results.add(alone_ms=first)
    plans: list[tuple[str, Any, Any, int, tuple[str, ...], float]] = [
        (f"kernel, {n} programs", CopySettings(programs=n, streams=1), KERNEL_ONLY, 32 << 10, ("push", "pull"), 0.0)
        for n in (1, 2, 4, 8, 16, 32, 64, 132)
    ]
    plans.append(("copy engine", CopySettings(streams=1), ENGINE_ONLY, 2 << 20, ("push", "pull"), 0.0))
    if not steady:
        plans.clear()
    for pause in (0.025, 0.005, 0.0025):  # one handoff of 1,024 tokens of an 8B model in that time
        often = f"134 MB each {1e3 * pause:g} ms"
        plans.append(
            (f"kernel, 64 programs, {often}", CopySettings(streams=1), KERNEL_ONLY, 32 << 10, ("push",), pause)
        )
        plans.append((f"copy engine, {often}", CopySettings(streams=1), ENGINE_ONLY, 2 << 20, ("push",), pause))
    for way, settings, costs, page, directions, pause in plans:
        for direction in directions:
            rates, slower = {}, {}
            for name, run in loops.items():
                count = 20 if pause else 5
                alone = statistics.median(run() for _ in range(count))  # anew each time: clocks wander
                with _Pusher(pools, settings, costs, page, direction, pause) as pusher:
                    time.sleep(0.02)
                    pusher.moved, began = 0, time.perf_counter()
                    taken = [run() for _ in range(count)]
                    seconds = statistics.mean(taken) if pause else statistics.median(taken)
                    rates[" ".join(name)] = round(pusher.moved / (time.perf_counter() - began) / 1e9, 1)
                slower[" ".join(name)] = round(100 * (seconds / alone - 1), 2)
            results.add(way=way, direction=direction, slower_percent=slower, gbps=rates)


def _graph(torch: Any, device: str, step: Callable[[], Any], count: int) -> Callable[[], float]:
    """A CUDA graph of `count` steps; calling it replays it and returns the seconds on the GPU."""
    torch.cuda.set_device(device)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(count):
                step()

    def run(kept: Callable[[], Any] = step) -> float:  # the memory that the graph works on is the step's
        with torch.cuda.device(device), torch.cuda.stream(stream):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
        return start.elapsed_time(end) / 1e3

    return run


class _Pusher:
    """A thread that keeps three batches under way; with a `pause`, one batch begins each so many seconds."""

    def __init__(self, pools: Pools, settings: Any, costs: Any, page: int, direction: str, pause: float) -> None:
        here, there = pools.memories[0].address, pools.memories[1].address
        ends = (here, there) if direction == "push" else (there, here)
        runs = pools.runs(page, 64 << 20 if not pause else 128 << 20)
        seen = survey(runs, pools.size, pools.size)
        self.moved = 0
        self._stop = False

        def push() -> None:
            copier = Copier(pools.devices[0], settings)
            copies = [copier.start(*ends, runs, seen, costs) for _ in range(1 if pause else 3)]
            began, count = time.perf_counter(), 0
            while not self._stop:
                copier.wait(copies.pop(0))
                self.moved += seen.total
                count += 1
                if pause:
                    time.sleep(max(0.0, began + count * pause - time.perf_counter()))
                copies.append(copier.start(*ends, runs, seen, costs))
            for copy in copies:
                copier.wait(copy)
            copier.close()

        self._thread = threading.Thread(target=push)

    def __enter__(self) -> _Pusher:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop = True
        self._thread.join()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-transfer"))
    parser.add_argument("--paced", action="store_true")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    interference(str(arguments.out), not arguments.paced)
