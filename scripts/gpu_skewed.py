"""Decode steps of sequences whose lengths differ: the graph by itself, and the step in a worker's loop.

`skewed` measures for each shape of model the batches of CASES as `slipstream bench engine` measures its decode steps:
the graph replayed back to back before the loop and behind it, and the time from the end of a step of the loop to that
of the next, in which every sequence grows. Beside them stands the time that memory takes to read weights, keys and
values once. `gpu_engine.py skewed` calls it. On a CPU the loop alone runs, over the kernels' twins, to try the script.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gpu_figures import Figures
from gpu_models import opened_model
from gpu_prompts import made_runner

Cases = dict[str, tuple[int, ...]]
CASES: Cases = {
    "256 x 1,024": (1024,) * 256,
    "1 x 8,192": (8192,),
    "24 x 300 + 8,192": (*(300,) * 24, 8192),
    "48 x 300 + 8,192": (*(300,) * 48, 8192),
    "64 x 1,024 to 7,168": tuple(1024 + 6144 * number // 63 for number in range(64)),
}
TRIED: Cases = {"3 x 20": (20,) * 3, "3 x 20 + 200": (20, 20, 20, 200)}
TRIED_STEPS = 8


def skewed(shapes: str, device: str, figures: Figures, folder: Path) -> None:
    for shape in shapes.split(","):
        if device == "cpu":
            tried(shape, figures)
        else:
            measured(shape, figures, folder)


def measured(shape: str, figures: Figures, folder: Path) -> None:
    """Also writes the rows as `bench engine` does, to FOLDER/skewed-SHAPE.json."""
    import msgspec
    import torch

    from slipstream.bench.engine import LOOP_STEPS, StepBench, card_rates, write_shape

    copy, _ = card_rates()
    most = max(map(len, CASES.values()))
    with TemporaryDirectory() as model:
        write_shape(Path(model), shape)
        bench = StepBench(shape, model, sequences=most, tokens=room(CASES, LOOP_STEPS), settings={"page_tokens": 16})
    rows = {name: bench.decode_row(len(lengths), lengths, copy) for name, lengths in CASES.items()}
    for name, row in rows.items():
        note = f"limit {row.limit_ms:.3f}, {sum(CASES[name]):,} tokens, {row.clock_mhz} MHz"
        figures.add(f"{shape} graph of {name}", row.device_ms, "ms", note=note)
        figures.add(f"{shape} step of {name}", row.step_ms, "ms", note=f"p90 {row.step_p90_ms:.3f}")
    (folder / f"skewed-{shape}.json").write_bytes(msgspec.json.encode(rows))
    del bench
    torch.cuda.empty_cache()


def room(cases: Cases, steps: int, page_tokens: int = 16) -> int:
    """Tokens of a pool in which each case fits."""
    from slipstream.bench.steady import SteadyLoop

    return max(
        sum(SteadyLoop.tokens_each(length, steps, len(lengths)) + page_tokens for length in lengths)
        for lengths in cases.values()
    )


def tried(shape: str, figures: Figures) -> None:
    from slipstream.bench.engine import GREEDY
    from slipstream.bench.steady import SteadyLoop

    opened: Any = opened_model(shape, "cpu", max_sequences=16)
    pages = opened.layout.pages_for(room(TRIED, TRIED_STEPS)) + 1
    runner = made_runner(opened, pages, graphs=False)
    for name, lengths in TRIED.items():
        loop = SteadyLoop(
            runner, opened.layout, pages, batch=len(lengths), context=lengths, steps=TRIED_STEPS, sampling=GREEDY
        )
        steady = loop.measure()
        figures.add(f"{shape} step of {name}", steady.mean_ms, "ms", note=f"p90 {steady.p90_ms:.3f}")
