"""Everything about the engine that only a machine with a GPU can show, in one go.

    python scripts/gpu_engine.py [STEP ...] [--out FOLDER]

Steps: tests (tests/gpu/test_engine.py), bench (bench engine, with kernels), sampling (drawing tokens from logits,
microseconds, beside plain torch), products (shapes of products with one
row against cuBLAS, microseconds a layer), attention (shapes of prefill attention). Without a step: all. Results are
printed as they come. Needs torch, triton and one GPU.
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
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ATTENTION_SHAPES = (
    (128, 128, 8, 2),
    (128, 64, 8, 3),
    (64, 64, 4, 2),
    (64, 64, 4, 3),
    (64, 128, 4, 2),
    (128, 128, 8, 3),
)
PRODUCT_SHAPES = ((2, 1024, 4), (8, 512, 8), (4, 512, 4), (16, 512, 8), (8, 256, 4), (1, 2048, 4), (2, 512, 4))
STEPS = ("tests", "bench", "sampling", "products", "attention")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="STEP", help=", ".join(STEPS))
    parser.add_argument("--out", type=Path, default=Path("gpu-engine"))
    parser.add_argument("--shapes", default="1.5b,8b")
    parser.add_argument("--kernels", action="store_true", help="bench: also what each kernel takes")
    parser.add_argument("--kinds", default="qkv,output,gate_up,down,head", help="products")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    failures = 0
    for step in arguments.steps or STEPS:
        began = time.monotonic()
        print(f"== {step}", flush=True)
        if step == "tests":
            command = [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "--tb=short",
                "tests/gpu/test_engine.py",
                "-p",
                "no:cacheprovider",
            ]
            command += ["-n", "8"] if importlib.util.find_spec("xdist") else []
            failures += subprocess.run(command, cwd=ROOT, env=environment).returncode != 0
        elif step == "bench":
            command = [sys.executable, "-m", "slipstream", "bench", "engine", "--sampled", "--shapes", arguments.shapes]
            command += ["--json", str(arguments.out / "engine.json"), *(["--kernels"] if arguments.kernels else [])]
            failures += subprocess.run(command, cwd=ROOT, env=environment).returncode != 0
        elif step == "sampling":
            sampling()
        else:
            shapes = arguments.shapes.split(",")
            if step == "attention":
                attention(shapes)
            else:
                products(shapes, arguments.kinds.split(","))
        print(f"== {step}: {time.monotonic() - began:.1f} s", flush=True)
    return failures


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


def opened_ops(shape: str) -> tuple[Any, Any]:
    import torch

    from slipstream.bench.engine import write_shape
    from slipstream.config import EngineConfig
    from slipstream.run.attention import PagedPool
    from slipstream.run.cuda.ops import TritonOps
    from slipstream.run.engine_model import open_model

    with TemporaryDirectory() as folder:
        write_shape(Path(folder), shape)
        opened = open_model(EngineConfig(model=folder, load_format="dummy", device="cuda:0"))
    memory = torch.empty(1024 * opened.layout.page_bytes, dtype=torch.uint8, device="cuda:0")
    memory.view(torch.bfloat16).normal_()
    pool = PagedPool(memory, opened.layout, torch.bfloat16)
    return opened, TritonOps(opened.config, pool, opened.model.rotary, 64, pdl=True)


def products(shapes: list[str], kinds: list[str]) -> None:
    import torch

    torch.set_grad_enabled(False)
    for shape in shapes:
        opened, ops = opened_ops(shape)
        for kind in kinds:
            product(shape, kind, opened.model, ops)
        del opened, ops
        torch.cuda.empty_cache()


def product(shape: str, kind: str, model: Any, ops: Any) -> None:
    import torch

    linears = [model.head] * 8 if kind == "head" else [getattr(layer, kind) for layer in model.layers]
    outputs, inputs = linears[0].weight.shape
    x = torch.randn(1, inputs, dtype=torch.bfloat16, device="cuda:0")
    out = torch.randn(1, outputs // 2 if kind == "gate_up" else outputs, dtype=torch.bfloat16, device="cuda:0")

    def run(one: Any) -> None:
        if kind == "gate_up":
            ops.gated(x, one, out, model.norm)
        elif kind in ("output", "down"):
            ops.add_project(x, one, out)
        else:
            ops.project(x, one, out, model.norm)

    ops.streams = False
    found = {"cublas": graph_us(run, linears)}
    ops.streams = True
    plain = ops.one_row_shape
    found["chosen"] = graph_us(run, linears)
    for chosen in PRODUCT_SHAPES:
        label = "x".join(map(str, chosen))
        ops.one_row_shape = lambda outputs, inputs, gated, chosen=chosen: chosen
        try:
            found[label] = graph_us(run, linears)
        except Exception as error:
            print(label, type(error).__name__, str(error)[:80])
    ops.one_row_shape = plain
    size = outputs * inputs * 2
    text = " ".join(f"{label}={micros:.1f}us({size / micros / 1e6:.2f})" for label, micros in found.items())
    print(f"{shape} {kind} {text}", flush=True)


def attention(shapes: list[str]) -> None:
    import torch

    torch.set_grad_enabled(False)
    for shape in shapes:
        opened, ops = opened_ops(shape)
        for tokens, earlier in ((8192, 0), (2048, 6144)):
            prompt(shape, tokens, earlier, opened, ops)


def prompt(shape: str, tokens: int, earlier: int, opened: Any, ops: Any) -> None:
    import numpy as np
    import torch

    from slipstream.bench.engine import device_ms
    from slipstream.engine.plan import StepPlan
    from slipstream.run.cuda.inputs import MixedInputs

    config = opened.config
    order = np.random.default_rng(0).permutation(np.arange(1, 1024))
    plan = StepPlan(
        step=1,
        token_ids=np.zeros(tokens, dtype=np.int64),
        positions=np.arange(earlier, earlier + tokens),
        query_start=np.array([0, tokens]),
        context_lens=np.array([earlier + tokens]),
        block_tables=order[: (earlier + tokens) // 16].reshape(1, -1),
        rows=np.zeros(1, dtype=np.int64),
        sample=np.ones(1, dtype=np.bool_),
    )
    step = MixedInputs(16, torch.device("cuda:0")).fill(plan)
    width = (config.heads + 2 * config.kv_heads) * config.head_dim
    qkv = torch.randn(tokens, width, dtype=torch.bfloat16, device="cuda:0")
    out = torch.empty(tokens, config.heads * config.head_dim, dtype=torch.bfloat16, device="cuda:0")
    work = 4 * tokens * (earlier + tokens / 2) * config.heads * config.head_dim
    for gathers in (False, True):
        ops._gathers = gathers
        for chosen in ATTENTION_SHAPES if gathers else ((64, 64, 4, 2), (128, 128, 8, 3)):
            ops.paged_shape = ops.gathered_shape = lambda *_, chosen=chosen: chosen
            try:
                ms = device_ms(lambda: ops.prefill_attention(opened.model.layers[0], qkv, out, step), 5)
                label = f"{shape} {earlier}+{tokens} {'gathered' if gathers else 'paged'} {chosen}"
                print(f"{label} {ms:.3f} ms {work / ms / 1e9:.0f} TFLOP/s", flush=True)
            except Exception as error:
                print(f"{shape} {chosen} {type(error).__name__} {str(error)[:80]}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
