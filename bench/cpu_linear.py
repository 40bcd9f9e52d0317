"""Why weights lie in memory as they do on a CPU: products of few rows with weights that do not fit into its caches.

    OMP_NUM_THREADS=1 python bench/cpu_linear.py [--rows 1 2 4 16 256]

For each shape of SmolLM2-135M and each number of rows, milliseconds for a whole model's worth of that product with W
[outputs, inputs] as checkpoints have it (natural), with its outputs innermost (transposed), and in oneDNN's own blocked
order (packed). `model.layers.Linear` takes transposed where outputs >= inputs, and packed besides for several rows of
wide weights. The clock is this thread's processor time, the best of --repeats runs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

LAYERS = 30
SHAPES = {"qkv": (960, 576), "output": (576, 576), "gate_up": (3072, 576), "down": (576, 1536), "head": (49152, 576)}


def best(action: Callable[[], object], repeats: int) -> float:
    """Milliseconds."""
    action()
    seconds = float("inf")
    for _ in range(repeats):
        start = time.thread_time()
        action()
        seconds = min(seconds, time.thread_time() - start)
    return seconds * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 16, 256])
    parser.add_argument("--repeats", type=int, default=8)
    given = parser.parse_args()
    torch.set_num_threads(1)
    pointwise = torch.ops.mkldnn._linear_pointwise
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, one thread")
    print(f"{'':8} {'outputs':>8} {'inputs':>7} {'rows':>5} {'natural':>9} {'transposed':>10} {'packed':>8}  best GB/s")
    for name, (outputs, inputs) in SHAPES.items():
        count = 1 if name == "head" else LAYERS
        natural = [torch.randn(outputs, inputs) for _ in range(count)]
        transposed = [weight.t().contiguous() for weight in natural]
        packed = [torch.ops.mkldnn._reorder_linear_weight(weight, None) for weight in natural]
        for rows in given.rows:
            x = torch.randn(rows, inputs)
            with torch.inference_mode():
                times = (
                    best(lambda x=x, w=natural: [torch.mm(x, part.t()) for part in w], given.repeats),
                    best(lambda x=x, w=transposed: [torch.mm(x, part) for part in w], given.repeats),
                    best(lambda x=x, w=packed: [pointwise(x, p, None, "none", [], "") for p in w], given.repeats),
                )
            rate = count * natural[0].nbytes / min(times) / 1e6
            figures = f"{times[0]:9.2f} {times[1]:10.2f} {times[2]:8.2f} {rate:8.1f}"
            print(f"{name:8} {outputs:8} {inputs:7} {rows:5} {figures}", flush=True)


if __name__ == "__main__":
    main()
