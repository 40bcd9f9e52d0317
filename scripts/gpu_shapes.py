"""Shapes of the GPU engine's kernels against each other: what `run.cuda.kernels.shapes` comes from.

    python scripts/gpu_shapes.py [STEP ...] [--shapes 1.5b,8b] [--rows 1,8,32,64]

Steps: products (of few rows: cuBLAS with the norm, SiLU and residual around it, `one_row`, and shapes of `few_rows`),
prompts (attention of prompts: the kernels and FlashInfer where it is there), decode (splits, tiles, warps and stages of
decode attention at 1k of context), long (the same for few sequences that are long, or uneven). Each figure is
microseconds a layer over all layers in one CUDA graph; prompts are milliseconds. The first run compiles for minutes.
Needs torch, triton and one GPU of Hopper's kind.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np
from gpu_models import graph_us, opened_model

KINDS = ("qkv", "output", "gate_up", "down", "head")
FEW = ((64, 64, 6), (64, 128, 4), (64, 128, 6), (64, 256, 3), (128, 64, 5), (128, 128, 3))
FEW_GATED = ((64, 64, 5), (64, 64, 8), (64, 128, 2), (64, 128, 3), (64, 128, 4), (128, 64, 4))
SPLITS = (1, 2, 3, 4, 6, 8, 12)
SHARED_BYTES = 227 << 10  # of a multiprocessor, for one program
PROMPTS = ((8192, 0), (2048, 6144), (512, 7680), (512, 0))  # new tokens, earlier ones
PAGE = 16  # tokens
PAGES = 1 << 14  # of the pool
MOST_SHARES = 1100  # splits times sequences times KV heads
Lengths = tuple[int, ...]
EVEN: tuple[Lengths, ...] = tuple((1024,) * batch for batch in (1, 8, 32, 48, 64, 128, 256))
LONG: tuple[Lengths, ...] = ((8192,), (32768,), (4096,) * 4, (*(300,) * 24, 8192), (300,) * 25)
STEPS = ("products", "prompts", "decode", "long")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="STEP", help=", ".join(STEPS))
    parser.add_argument("--shapes", default="1.5b,8b")
    parser.add_argument("--rows", default="1,8,32,64", help="of products")
    arguments = parser.parse_args()
    import torch

    torch.set_grad_enabled(False)
    for shape in arguments.shapes.split(","):
        opened, ops = opened_ops(shape)
        for step in arguments.steps or STEPS:
            if step == "products":
                for rows in map(int, arguments.rows.split(",")):
                    for kind in KINDS:
                        products(shape, kind, rows, opened.model, ops)
            elif step == "prompts":
                for tokens, earlier in PROMPTS:
                    prompts(shape, tokens, earlier, opened, ops)
            else:
                for lengths in EVEN if step == "decode" else LONG:
                    decode(shape, lengths, opened, ops)
        del opened, ops
        torch.cuda.empty_cache()


def opened_ops(shape: str) -> tuple[Any, Any]:
    """A model of random weights, and kernels over a pool that holds the largest batch."""
    import torch

    from slipstream.run.attention import PagedPool
    from slipstream.run.cuda.kernels.ops import TritonOps

    opened = opened_model(shape, "cuda:0")
    most = max(map(len, EVEN))
    memory = torch.empty((PAGES + 1) * opened.layout.page_bytes, dtype=torch.uint8, device="cuda:0")
    memory.view(torch.bfloat16).normal_()
    pool = PagedPool(memory, opened.layout, torch.bfloat16)
    ops = TritonOps(opened.config, pool, opened.model.rotary, most, pdl=True)
    shares = MOST_SHARES * opened.config.heads // opened.config.kv_heads
    ops._weights = torch.empty(shares, dtype=torch.float32, device="cuda:0")
    ops._partial = torch.empty(shares * opened.config.head_dim, dtype=torch.float32, device="cuda:0")
    return opened, ops


def report(title: str, found: dict[str, float], size: int = 0) -> None:
    best = sorted(found.items(), key=lambda item: item[1])
    rate = f" ({size / best[0][1] / 1e6:.2f} TB/s)" if size else ""
    print(f"{title}: " + "  ".join(f"{name} {micros:.1f}" for name, micros in best[:8]) + rate, flush=True)


def products(shape: str, kind: str, rows: int, model: Any, ops: Any) -> None:
    import torch

    from slipstream.run.cuda.kernels import shapes

    linears = [model.head] * 8 if kind == "head" else [getattr(layer, kind) for layer in model.layers]
    (outputs, inputs), gated = linears[0].weight.shape, kind == "gate_up"
    x = torch.randn(rows, inputs, dtype=torch.bfloat16, device="cuda:0")
    out = torch.randn(rows, outputs // 2 if gated else outputs, dtype=torch.bfloat16, device="cuda:0")

    def run(one: Any) -> None:
        if gated:
            ops.gated(x, one, out, model.norm)
        elif kind in ("output", "down"):
            ops.add_project(x, one, out)
        else:
            ops.project(x, one, out, model.norm)

    found: dict[str, float] = {}
    ops.few_rows_pay = lambda *_, **__: False
    if rows == 1:
        found["one_row"] = graph_us(run, linears)
    ops.streams = False
    found["cublas"] = graph_us(run, linears)
    ops.few_rows_pay = lambda *_, **__: True
    for chosen in few_shapes(outputs // 2 if gated else outputs, inputs, rows, gated, alone=kind == "head"):
        ops._few.shape = lambda *_, chosen=chosen: chosen
        found["x".join(map(str, chosen[:3])) + f"/{chosen[3]}"] = graph_us(run, linears)
    ops.few_rows_pay, ops._few.shape, ops.streams = shapes.few_rows_pay, shapes.few_rows_shape, True
    report(f"{shape} {rows} rows {kind}", found, outputs * inputs * 2)


def few_shapes(
    outputs: int, inputs: int, rows: int, gated: bool, *, alone: bool
) -> Iterator[tuple[int, int, int, int]]:
    """Those that fit; without division of the inner dimension when `alone`."""
    room = max(16, 1 << (rows - 1).bit_length())
    for count, block, stages in FEW_GATED if gated else FEW:
        if stages * 2 * block * (count * (1 + gated) + room) > SHARED_BYTES - 1024:
            continue
        for splits in (1,) if gated or alone else SPLITS:
            programs = -(-outputs // count) * splits
            if splits == 1 or (programs <= 540 and inputs // splits >= 2 * block):
                yield count, block, stages, splits


def prompts(shape: str, tokens: int, earlier: int, opened: Any, ops: Any) -> None:
    import numpy as np
    import torch

    from slipstream.bench.engine import device_ms
    from slipstream.engine.plan import StepPlan
    from slipstream.run.cuda import backends
    from slipstream.run.cuda.inputs import MixedInputs
    from slipstream.run.cuda.kernels import shapes

    config, pages = opened.config, (earlier + tokens) // 16
    plan = StepPlan(
        step=1,
        token_ids=np.zeros(tokens, dtype=np.int64),
        positions=np.arange(earlier, earlier + tokens),
        query_start=np.array([0, tokens]),
        context_lens=np.array([earlier + tokens]),
        block_tables=np.random.default_rng(0).permutation(np.arange(1, 1024))[:pages].reshape(1, -1),
        rows=np.zeros(1, dtype=np.int64),
        sample=np.ones(1, dtype=np.bool_),
    )
    step = MixedInputs(16, opened.config.kv_heads, torch.device("cuda:0")).fill(plan)
    width = (config.heads + 2 * config.kv_heads) * config.head_dim
    qkv = torch.randn(tokens, width, dtype=torch.bfloat16, device="cuda:0")
    out = torch.empty(tokens, config.heads * config.head_dim, dtype=torch.bfloat16, device="cuda:0")
    work = 4 * tokens * (earlier + (tokens + 1) / 2) * config.heads * config.head_dim

    def measure(label: str) -> None:
        ms = device_ms(lambda: ops.prefill_attention(opened.model.layers[0], qkv, out, step), 8)
        print(f"{shape} {earlier}+{tokens} {label}: {ms:.3f} ms, {work / ms / 1e9:.0f} TFLOP/s", flush=True)

    for warps in (False, True):
        ops._hopper, ops._laid = warps, None
        for tile, stages in ((128, 2), (64, 4)) if warps else ((64, 3),):
            ops.prompt_shape = lambda dim, chosen=(tile, stages): chosen
            measure(f"{'attend' if warps else 'prefill_gathered'} {tile}x{stages}")
    ops.prompt_shape, ops._laid = shapes.prompt_shape, None
    if reason := backends.why_not_flashinfer(config, ops.pool):
        print(f"flashinfer: {reason}")
        return
    ops.prompts = backends.FlashInferPrompts(config, ops.pool)
    measure("flashinfer")
    ops.prompts = None


def decode(shape: str, lengths: Lengths, opened: Any, ops: Any) -> None:
    import torch

    from slipstream.run.cuda.inputs import DecodeColumns
    from slipstream.run.cuda.kernels import shapes
    from slipstream.run.cuda.kernels.shares import Division

    config, plain, batch, contexts = opened.config, shapes.decode_shape, len(lengths), np.array(lengths)
    width = (config.heads + 2 * config.kv_heads) * config.head_dim
    qkv = torch.randn(batch, width, dtype=torch.bfloat16, device="cuda:0")
    out = torch.empty(batch, config.heads * config.head_dim, dtype=torch.bfloat16, device="cuda:0")
    ints = {"dtype": torch.int32, "device": "cuda:0"}
    pages = -(-max(lengths) // PAGE)
    tables = torch.stack([torch.randperm(PAGES, **ints)[:pages] + 1 for _ in lengths]).reshape(-1)
    there = torch.tensor(contexts, **ints)
    columns = there, there, tables, torch.full((1,), pages, **ints), there
    found, now = {}, plain(batch * config.kv_heads)
    for chosen in {now, *decode_shapes(batch * config.kv_heads)}:
        shapes.decode_shape = lambda pairs, chosen=chosen: chosen
        shares = Division(config.kv_heads).of(contexts, batch)
        step = DecodeColumns(*columns, torch.tensor(shares.reshape(-1), **ints))
        name = "/".join(map(str, chosen))
        found[name] = graph_us(
            lambda layer, step=step: ops.decode_attention(layer, qkv, out, step), opened.model.layers
        )
    shapes.decode_shape = plain
    size = sum(lengths) * opened.layout.token_bytes // opened.layout.layers
    even = f"{batch} of {lengths[0]:,}" if len(set(lengths)) == 1 else f"{batch} to {max(lengths):,}"
    report(f"{shape} {even}, now {'/'.join(map(str, now))}", found, size)


def decode_shapes(pairs: int) -> Iterator[tuple[int, int, int, int]]:
    """(splits, tokens, warps, stages) that may pay: few splits where pairs fill the chip, many where they do not."""
    for splits in (1, 2, 3, 4, 6, 8, 16, 32, 64):
        if (splits > 1 and splits * pairs > MOST_SHARES) or splits * pairs < min(128, 32 * pairs):
            continue
        for tile, warps, stages in ((64, 2, 2), (64, 2, 3), (64, 4, 3), (128, 4, 3), (128, 8, 3)):
            yield splits, tile, warps, stages


if __name__ == "__main__":
    main()
