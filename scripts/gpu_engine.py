"""Everything about the engine that only a machine with a GPU can show, in one go.

    python scripts/gpu_engine.py [STEP ...] [--out FOLDER]

Steps: tests (of tests/gpu: the engine), bench (`slipstream bench engine`, beside the goals), fp8 and flashinfer (the
same with a KV cache of one byte a number, and with FlashInfer's prefill attention, beside `bench` where both ran),
sampling (drawing tokens from logits, microseconds, beside plain torch), prompts (what steps with prompts cost host and
device with and without prompt graphs, and what capturing these takes), skewed (decode steps of sequences of uneven
lengths, `gpu_skewed.py`). Without a step: all. Results are printed as they come; figures with their goals are in
FOLDER/figures.jsonl. Shapes of kernels are compared by `gpu_shapes.py`. Needs torch, triton and one GPU; `--shapes tiny
--device cpu` tries `prompts` and `skewed` without one.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from gpu_figures import Figures
from gpu_models import graph_us
from gpu_prompts import prompts
from gpu_skewed import skewed

ROOT = Path(__file__).resolve().parent.parent
STEPS = ("tests", "bench", "fp8", "flashinfer", "sampling", "prompts", "skewed")
BENCHES: dict[str, tuple[str, ...]] = {
    "bench": ("--sampled",),
    "fp8": ("--kv-dtype", "fp8"),
    "flashinfer": ("--attention-backend", "flashinfer", "--batches", "1"),
}
GOALS = {  # milliseconds, at a context of 1,024 tokens, or of a prompt of 8,192
    ("1.5b", "decode", 1): 1.3,
    ("1.5b", "decode", 32): 1.9,
    ("1.5b", "decode", 256): 4.4,
    ("1.5b", "prefill", 1): 46.0,
    ("8b", "decode", 1): 4.9,
    ("8b", "decode", 32): 5.9,
    ("8b", "decode", 256): 15.0,
    ("8b", "prefill", 1): 205.0,
}
GAP_MS = 0.2  # a step of the loop, less the replay of its graph


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="STEP", help=", ".join(STEPS))
    parser.add_argument("--out", type=Path, default=Path("gpu-engine"))
    parser.add_argument("--shapes", default="1.5b,8b")
    parser.add_argument("--device", default="cuda:0", help="prompts, skewed: cpu runs the kernels' twins")
    parser.add_argument("--kernels", action="store_true", help="bench: also what each kernel takes")
    arguments = parser.parse_args()
    unknown = set(arguments.steps) - set(STEPS)
    if unknown:
        parser.error(f"no such step: {', '.join(sorted(unknown))}; there are {', '.join(STEPS)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    failures = 0
    for step in arguments.steps or STEPS:
        began = time.monotonic()
        print(f"== {step}", flush=True)
        try:
            failures += run_step(step, arguments)
        except Exception as error:  # one step's trouble leaves the others
            print(f"-- {step}: {type(error).__name__}: {error}", flush=True)
            failures += 1
        print(f"== {step}: {time.monotonic() - began:.1f} s", flush=True)
    return failures


def run_step(step: str, arguments: argparse.Namespace) -> int:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    figures = Figures(arguments.out, step)
    if step == "tests":
        return gpu_tests(environment)
    if step == "prompts":
        tried = {"tokens": (16, 80), "decodes": (0, 3), "repeats": 1} if arguments.device == "cpu" else {}
        prompts(arguments.shapes, arguments.device, figures, **tried)
        return 0
    if step == "skewed":
        skewed(arguments.shapes, arguments.device, figures, arguments.out)
        return 0
    if step == "sampling":
        sampling()
        return 0
    failed = step == "flashinfer" and gpu_tests(environment, "-k", "flashinfer")
    path = arguments.out / f"{step}.json"
    command = [sys.executable, "-m", "slipstream", "bench", "engine", "--shapes", arguments.shapes, *BENCHES[step]]
    command += ["--json", str(path), *(["--kernels"] if arguments.kernels else [])]
    failed += subprocess.run(command, cwd=ROOT, env=environment).returncode != 0
    if path.exists():
        plain = [arguments.out / "bench.json", arguments.out.parent / "steps" / "bench.json"]  # of gpu_all.py
        judge(step, json.loads(path.read_text())["rows"], next(filter(Path.exists, plain), plain[0]), figures)
    return failed


def judge(step: str, rows: list[dict[str, Any]], plain: Path, figures: Figures) -> None:
    """Goals belong to `bench`; of another step it is said how it compares with that one."""
    names = ("model", "kind", "batch")
    others = json.loads(plain.read_text())["rows"] if step != "bench" and plain.exists() else []
    before = {tuple(row[name] for name in names): row["step_ms"] for row in others}
    for row in rows:
        key = tuple(row[name] for name in names)
        name = f"{row['model']} prompt of {row['context']}" if row["kind"] == "prefill" else ""
        name = name or f"{row['model']} {row['kind']} batch {row['batch']} at {row['context']}"
        share = f"{100 * row['limit_ms'] / row['step_ms']:.0f} % of the limit, {row.get('clock_mhz', 0)} MHz"
        if key in before:
            share += f"; {row['step_ms'] / before[key]:.2f} x of plain"
        figures.add(name, row["step_ms"], "ms", most=GOALS.get(key) if step == "bench" else None, note=share)
        if row["kind"] == "prefill" and row.get("alone_ms"):
            figures.add(
                f"{name}, after a pause", row["alone_ms"], "ms", most=GOALS.get(key) if step == "bench" else None
            )
        if step == "bench" and row.get("device_ms"):
            figures.add(f"{name}, step - graph", row["step_ms"] - row["device_ms"], "ms", most=GAP_MS)


def gpu_tests(environment: dict[str, str], *chosen: str) -> bool:
    """Whether any of the GPU tests of the engine fails."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider"]
    command += ["tests/gpu/test_engine.py", "tests/gpu/test_kernels_covered.py", *chosen]
    command += ["-n", "8"] if importlib.util.find_spec("xdist") and not chosen else []
    return subprocess.run(command, cwd=ROOT, env=environment).returncode != 0


def sampling(vocab: int = 151936) -> None:
    """Drawing from logits that fall off as a model's do, and from flat ones, which are searched as a whole."""
    import numpy as np
    import torch

    from slipstream.run.cuda.sampling import TritonTokens
    from slipstream.run.sampler import DrawTable, draw_tokens
    from slipstream.types import SamplingParams

    kinds = {
        "greedy": SamplingParams(temperature=0.0),
        "temperature": SamplingParams(temperature=0.7, seed=1),
        "top_p": SamplingParams(temperature=0.7, top_p=0.9, seed=1),
        "top_k, top_p": SamplingParams(temperature=0.7, top_k=50, top_p=0.9, seed=1),
    }
    device = torch.device("cuda:0")
    for batch in (1, 32, 256):
        noise = torch.randn(batch, vocab, device=device)
        tokens = TritonTokens(batch, vocab, torch.bfloat16, device)
        chosen = torch.empty(batch, dtype=torch.int64, device=device)
        sure = noise * 2
        sure[:, :: vocab // 60] += 9
        for shape, logits in (("sure", sure), ("peaked", noise * 3), ("flat", noise * 0.5)):
            values = logits.bfloat16()
            for kind, params in kinds.items():
                table = DrawTable(batch, vocab)
                for row in range(batch):
                    table.set(row, params)
                how = table.columns(np.arange(batch), np.arange(batch))
                there = how.each(lambda column: torch.from_numpy(column).to(device))
                draw = partial(tokens.draw, values, there, chosen)
                us = graph_us(lambda _, draw=draw: draw(), [None])
                torch.cuda.synchronize()
                began = time.perf_counter()
                plain = draw_tokens(values.float(), how)
                torch.cuda.synchronize()
                torch_us = (time.perf_counter() - began) * 1e6
                same = int((plain == chosen).sum())
                print(
                    f"{batch:4d} {shape:6s} {kind:14s} {us:8.1f} us, torch {torch_us:9.1f} us, {same} equal", flush=True
                )


if __name__ == "__main__":
    sys.exit(main())
