"""Everything about the engine that only a machine with a GPU can show, in one go.

    python scripts/gpu_engine.py [STEP ...] [--out FOLDER]

Steps: tests (tests/gpu/test_engine.py), bench (bench engine), sampling (drawing tokens from logits, microseconds,
beside plain torch), prompts (tests of prompt graphs; then what steps with prompts cost host and device with and without
them, and what capturing takes; `--shapes tiny --device cpu` tries it without a GPU). Without a step: all. Results are
printed as they come. Shapes of kernels are compared by `gpu_shapes.py`. Needs torch, triton and one GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from gpu_prompts import prompts

ROOT = Path(__file__).resolve().parent.parent
STEPS = ("tests", "bench", "sampling", "prompts")
PROMPT_TESTS = "prompt or step"  # of tests/gpu/test_engine.py


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="STEP", help=", ".join(STEPS))
    parser.add_argument("--out", type=Path, default=Path("gpu-engine"))
    parser.add_argument("--shapes", default="1.5b,8b")
    parser.add_argument("--device", default="cuda:0", help="prompts: cpu runs the kernels' twins")
    parser.add_argument("--kernels", action="store_true", help="bench: also what each kernel takes")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    failures = 0
    for step in arguments.steps or STEPS:
        began = time.monotonic()
        print(f"== {step}", flush=True)
        if step == "tests":
            failures += gpu_tests(environment, "")
        elif step == "prompts":
            failures += gpu_tests(environment, PROMPT_TESTS)
            tried = {"tokens": (16, 80), "decodes": (0, 3), "repeats": 1} if arguments.device == "cpu" else {}
            prompts(arguments.shapes, arguments.device, **tried)
        elif step == "bench":
            command = [sys.executable, "-m", "slipstream", "bench", "engine", "--sampled", "--shapes", arguments.shapes]
            command += ["--json", str(arguments.out / "engine.json"), *(["--kernels"] if arguments.kernels else [])]
            failures += subprocess.run(command, cwd=ROOT, env=environment).returncode != 0
        else:
            sampling()
        print(f"== {step}: {time.monotonic() - began:.1f} s", flush=True)
    return failures


def gpu_tests(environment: dict[str, str], chosen: str) -> bool:
    """Whether any of the GPU tests of the engine fails."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "tests/gpu/test_engine.py", "-p", "no:cacheprovider"]
    command += ["-k", chosen] if chosen else []
    command += ["-n", "8"] if importlib.util.find_spec("xdist") else []
    return subprocess.run(command, cwd=ROOT, env=environment).returncode not in (0, 5)  # 5: none was chosen


def graph_us(call: Any, layers: list[Any], repeats: int = 10) -> float:
    """Microseconds a layer of `call(layer)` over all layers in one CUDA graph."""
    import torch

    from slipstream.bench.engine import device_ms

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(layers[0])
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for layer in layers:
            call(layer)
    return device_ms(graph.replay, repeats) * 1e3 / len(layers)


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
