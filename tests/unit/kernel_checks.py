"""Kernels against their twins in plain torch: the same checks under Triton's interpreter and on a GPU.

The interpreter takes a millisecond for what a GPU does in none, program by program: for it, on a CPU, there are fewer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from tests.unit.tiny_models import make_plan, shuffled_tables
from torch import Tensor

from slipstream.engine.plan import StepPlan
from slipstream.model.config import ModelConfig, RopeConfig
from slipstream.model.layers import Linear, RMSNorm
from slipstream.model.llama import Llama
from slipstream.run.attention import PagedPool
from slipstream.run.cuda.inputs import DecodeColumns, DecodeInputs, MixedInputs
from slipstream.run.cuda.kernels import shapes
from slipstream.run.cuda.kernels.ops import TritonOps
from slipstream.run.cuda.kernels.twins import TorchOps

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def config(**changes: object) -> ModelConfig:
    given = {
        "architecture": "llama",
        "layers": 2,
        "hidden": 96,
        "intermediate": 80,
        "heads": 6,
        "kv_heads": 2,
        "head_dim": 32,
        "vocab": 128,
        "max_position": 4096,
        "norm_eps": 1e-6,
        "rope": RopeConfig(),
        "qkv_bias": True,
        "mlp_bias": True,
        **changes,
    }
    return ModelConfig(**given)  # type: ignore[arg-type]


def random_model(shape: ModelConfig, device: torch.device, dtype: torch.dtype) -> Llama:
    model = Llama(shape, dtype=dtype, device=device)
    generator = torch.Generator().manual_seed(0)
    for name, tensor in model.tensors().items():
        values = torch.randn(tensor.shape, generator=generator)
        tensor.copy_(1 + 0.1 * values if "norm" in name else values * 0.1)
    return model


class Twins:
    """Kernels and twins, each over a pool of its own with the same contents."""

    def __init__(
        self, model: Llama, *, page_tokens: int = 16, pages: int = 64, pdl: bool = False, fp8: bool = False
    ) -> None:
        self.model = model
        layout = model.config.layout(page_tokens, "fp8" if fp8 else str(model.dtype).removeprefix("torch."))
        generator = torch.Generator().manual_seed(1)
        rows = pages * layout.kv_heads * layout.layers * 2 * page_tokens
        values = torch.randn(rows, layout.head_dim, generator=generator).to(model.device, model.dtype)
        self.pools = []
        for _ in range(2):
            memory = torch.zeros(pages * layout.page_bytes, dtype=torch.uint8, device=model.device)
            self.pools.append(PagedPool(memory, layout, model.dtype))
            self.pools[-1].write(torch.arange(rows, device=model.device), values)
        self.kernels = TritonOps(model.config, self.pools[0], model.rotary, 64, pdl=pdl)
        self.twins = TorchOps(self.pools[1], model.rotary)

    def noise(self, *shape: int, seed: int = 2) -> Tensor:
        values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
        return values.to(self.model.device, self.model.dtype)

    def compare(self, found: Tensor, wanted: Tensor, limit: float | None = None) -> None:
        limit = TOLERANCE[self.model.dtype] if limit is None else limit
        found, wanted = found.float(), wanted.float()
        assert found.isfinite().all()
        error = (found - wanted).abs().max() / wanted.abs().max()
        assert error < limit, f"differs by {float(error):.2e} of the largest number; {limit} are allowed"


def check_small(device: torch.device, dtype: torch.dtype) -> None:
    both = Twins(random_model(config(), device, dtype))
    x = both.noise(5, 96)
    norm = both.model.norm
    both.compare(both.kernels.rms_norm(x, norm, torch.empty_like(x)), norm(x))
    layer = both.model.layers[0]
    wide = both.noise(40, 96)  # a product of many rows: torch's, with the kernels around it
    found, wanted = (
        ops.gated(wide, layer.gate_up, wide.new_empty(40, 80), layer.mlp_norm) for ops in (both.kernels, both.twins)
    )
    both.compare(found, wanted)


def check_products(device: torch.device, dtype: torch.dtype) -> None:
    wide = 300 if device.type == "cuda" else 30
    for inputs, outputs, biased in ((96, 80, True), (1600, 40, False), (512, wide, True), (1024, 64, False)):
        both = Twins(random_model(config(), device, dtype))
        both.kernels.streams = True
        place = {"dtype": dtype, "device": device}
        linear, double = (Linear(inputs, count, bias=biased, **place) for count in (outputs, 2 * outputs))
        norm = RMSNorm(inputs, 1e-6, **place)
        for seed, part in enumerate((linear, double)):
            part.weight = part.weight.contiguous()  # as on a GPU
            part.transposed = part.weight.t()
            part.weight.copy_(both.noise(*part.weight.shape, seed=seed) / inputs**0.5)
            if part.bias is not None:
                part.bias.copy_(both.noise(*part.bias.shape, seed=5))
        norm.weight.copy_(1 + both.noise(inputs, seed=6) / 8)
        for rows in (1, 2, 33) if device.type == "cuda" else (1, 3):
            x, out = both.noise(rows, inputs), both.noise(rows, outputs, seed=9)
            pairs = [
                (
                    ops.project(x, linear, torch.empty_like(out)),
                    ops.project(x, linear, torch.empty_like(out), norm),
                    ops.add_project(x, linear, out.clone()),
                    ops.gated(x, double, torch.empty_like(out), norm),
                )
                for ops in (both.kernels, both.twins)
            ]
            for found, wanted in zip(*pairs, strict=True):
                both.compare(found, wanted)


def check_decode(
    device: torch.device, dtype: torch.dtype, *, sequences: int = 5, fp8: bool = False, **changes: object
) -> None:
    lengths = [1, 17, 64, 65, 190][:sequences]
    tables = shuffled_tables(sequences, 12, 64)
    plan = make_plan([(row, [3], length - 1, tables[row]) for row, length in enumerate(lengths)])
    with decode_shape(None if device.type == "cuda" else (3, 32, 4, 2)):
        both = Twins(random_model(config(**changes), device, dtype), fp8=fp8)
        _attend(both, decode_columns(both, plan, 12), sequences, "decode_attention")


def decode_columns(both: Twins, plan: StepPlan, pages: int) -> DecodeColumns:
    """What a step of decoding sends; two programs that fill the step up are part of it."""
    inputs = DecodeInputs(plan.sequences + 2, pages, both.model.config.kv_heads, both.model.device)
    inputs.fill(plan, plan.sequences)
    return inputs.columns.first(plan.sequences)


@contextmanager
def decode_shape(chosen: tuple[int, int, int, int] | None) -> Iterator[None]:
    """Another shape of all programs of attention of decoding than `shapes.decode_shape`'s."""
    plain = shapes.decode_shape
    if chosen is not None:
        shapes.decode_shape = lambda pairs: chosen
    try:
        yield
    finally:
        shapes.decode_shape = plain


@contextmanager
def spare_programs(count: int) -> Iterator[None]:
    plain = shapes.SPARE_PROGRAMS
    shapes.SPARE_PROGRAMS = count
    try:
        yield
    finally:
        shapes.SPARE_PROGRAMS = plain


def _attend(both: Twins, step: object, tokens: int, name: str) -> None:
    shape = both.model.config
    layer = both.model.layers[1]
    qkv = both.noise(tokens, (shape.heads + 2 * shape.kv_heads) * shape.head_dim)
    out = [
        getattr(ops, name)(layer, qkv.clone(), qkv.new_full((tokens, shape.heads * shape.head_dim), 1e4), step)
        for ops in (both.kernels, both.twins)
    ]
    # With codes of three bits a number that is rounded the other way differs by an eighth of itself.
    quantized = both.pools[0].quantized
    both.compare(*out, limit=1e-2 if quantized and both.model.dtype != torch.bfloat16 else None)
    for index in range(shape.layers):
        both.compare(both.pools[0].layer(index), both.pools[1].layer(index), limit=0.13 if quantized else None)


def check_decode_long(device: torch.device, dtype: torch.dtype) -> None:
    """More shares than one round of merging takes."""
    tables = shuffled_tables(2, 70, 160)
    plan = make_plan([(row, [3], length - 1, tables[row]) for row, length in enumerate((1100, 700))])
    with decode_shape(None if device.type == "cuda" else (12, 64, 4, 2)):
        both = Twins(random_model(config(layers=2, heads=4, kv_heads=2), device, dtype), pages=160)
        _attend(both, decode_columns(both, plan, 70), 2, "decode_attention")


def check_decode_split(device: torch.device, dtype: torch.dtype) -> None:
    """Contexts that are not divided, and long ones that spare programs divide."""
    for tile, lengths in ((128, (1, 65, 190)), (32, (1, 65, 190, 190, 32, 33, 2))):
        tables = shuffled_tables(len(lengths), 12, 96)
        plan = make_plan([(row, [3], length - 1, tables[row]) for row, length in enumerate(lengths)])
        with decode_shape((1, tile, 4, 2)), spare_programs(6 if tile == 32 else 0):
            both = Twins(random_model(config(), device, dtype), pages=96)
            _attend(both, decode_columns(both, plan, 12), len(lengths), "decode_attention")


def check_decode_normed(device: torch.device, dtype: torch.dtype) -> None:
    check_decode(device, dtype, qk_norm=True, heads=8, kv_heads=1, head_dim=64)


def check_prefill(device: torch.device, dtype: torch.dtype, *, fp8: bool = False) -> None:
    for changes in ({}, {"qk_norm": True, "heads": 4, "kv_heads": 4, "head_dim": 64}):
        both = Twins(random_model(config(**some_heads(device, changes)), device, dtype), fp8=fp8)
        tables = shuffled_tables(4, 12, 64)
        long = 70 if device.type == "cuda" else 9
        parts = [(0, [5] * 33, 0, tables[0]), (1, [5] * long, 100, tables[1]), (2, [5], 15, tables[2])]
        step = MixedInputs(16, 2, device).fill(make_plan([*parts, (3, [5] * 16, 16, tables[3])]))
        assert step.decodes == 0
        both.kernels.gathers = False
        _attend(both, step, 33 + long + 1 + 16, "prefill_attention")


def some_heads(device: torch.device, changes: dict[str, object]) -> dict[str, object]:
    """Fewer heads on a CPU: each of them is a program of its own, as all others."""
    heads = {"heads": 2, "kv_heads": 2 if "kv_heads" in changes else 1}
    return changes if device.type == "cuda" else {**changes, **heads}


def check_prefill_gathered(device: torch.device, dtype: torch.dtype, *, fp8: bool = False) -> None:
    for changes in ({"head_dim": 64}, {"head_dim": 128, "qk_norm": True, "heads": 4, "kv_heads": 4}):
        both = Twins(random_model(config(**some_heads(device, changes)), device, dtype), fp8=fp8)
        tables = shuffled_tables(4, 14, 64)
        long, longer = (70, 150) if device.type == "cuda" else (9, 66)
        parts = [(0, [5] * 33, 0, tables[0]), (1, [5] * long, 100, tables[1]), (2, [5], 15, tables[2])]
        step = MixedInputs(16, 2, device).fill(make_plan([*parts, (3, [5] * longer, 16, tables[3])]))
        both.kernels.gathers = True
        _attend(both, step, 33 + long + 1 + longer, "prefill_attention")


def check_fp8(device: torch.device, dtype: torch.dtype) -> None:
    check_decode(device, dtype, fp8=True)
    check_decode(device, dtype, fp8=True, qk_norm=True, heads=4, kv_heads=4, head_dim=64)
    check_prefill(device, dtype, fp8=True)


def check_fp8_gathered(device: torch.device, dtype: torch.dtype) -> None:
    check_prefill_gathered(device, dtype, fp8=True)


def check_step(device: torch.device, dtype: torch.dtype, *, fp8: bool = False) -> None:
    """Attention of whole steps, layer by layer; later layers and steps repeat the launches of the first."""
    shapes: list[dict[str, object]] = [{"qk_norm": True, "heads": 4}]
    steps = [(2, [9, 1]), (2, []), (0, [6])]
    if device.type == "cuda":  # an interpreter takes its time
        shapes = [{"head_dim": 64}, {"head_dim": 128, "qk_norm": True, "heads": 4, "kv_heads": 4}]
        steps = [(2, [33, 1, 90]), (2, []), (0, [130, 9])]
    for changes in shapes:
        both = Twins(random_model(config(**changes), device, dtype), fp8=fp8)
        shape, tables = both.model.config, shuffled_tables(5, 12, 64)
        for decodes, chunks in steps:
            parts = [(row, [5], 40 + row, tables[row]) for row in range(decodes)]
            parts += [(row, [5] * count, 20 * row, tables[row]) for row, count in enumerate(chunks, decodes)]
            plan = make_plan(parts)
            tokens = len(plan.token_ids)
            qkv = both.noise(tokens, (shape.heads + 2 * shape.kv_heads) * shape.head_dim)
            outs = [qkv.new_full((tokens, shape.heads * shape.head_dim), 1e4) for _ in range(2)]
            given = [qkv.clone(), qkv.clone()]
            with decode_shape(None if device.type == "cuda" else (2, 32, 4, 2)):
                step = MixedInputs(16, shape.kv_heads, device).fill(plan)
                calls = [
                    ops.step_attention(part, out, step)
                    for ops, part, out in zip((both.kernels, both.twins), given, outs, strict=True)
                ]
                for layer in both.model.layers:
                    for part, call in zip(given, calls, strict=True):
                        part.copy_(qkv)
                        call(layer)
                    both.compare(*outs, limit=1e-2 if fp8 and dtype != torch.bfloat16 else None)
            for index in range(shape.layers):
                both.compare(both.pools[0].layer(index), both.pools[1].layer(index), limit=0.13 if fp8 else None)
        assert bool(both.kernels.known) == (device.type == "cuda")


def check_step_fp8(device: torch.device, dtype: torch.dtype) -> None:
    check_step(device, dtype, fp8=True)


CHECKS: dict[str, Callable[[torch.device, torch.dtype], None]] = {
    "small": check_small,
    "products": check_products,
    "decode": check_decode,
    "decode_long": check_decode_long,
    "decode_split": check_decode_split,
    "decode_normed": check_decode_normed,
    "prefill": check_prefill,
    "prefill_gathered": check_prefill_gathered,
    "fp8": check_fp8,
    "fp8_gathered": check_fp8_gathered,
    "step": check_step,
    "step_fp8": check_step_fp8,
}
