"""What is compiled before the first step is all that steps need. Nothing is really compiled here.

What Triton compiles a kernel for (types, alignments, numbers that are 1 or divisible by 16, constants, options) is its
own key for it; here it finds, and keeps, kernels that do nothing instead of compiled ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from tests.unit.no_device import NoDevice, config, kernels_of, use
from tests.unit.tiny_models import make_plan, new_row
from torch import Tensor

from slipstream.engine.plan import FROM_DEVICE, StepPlan
from slipstream.run.cuda.graphs import graph_sizes
from slipstream.run.cuda.prepare import compile_ahead
from slipstream.run.cuda.runner import CudaRunner
from slipstream.run.cuda.sampling import TritonTokens
from slipstream.run.sampler import DrawColumns
from slipstream.types import SamplingParams

# Small enough to be computed, with the same heads; hidden 64 with a vocabulary beyond `shapes.WIDE`, as large models'.
SMALL = {"hidden": 64, "intermediate": 96}
CASES: dict[str, dict[str, Any]] = {
    "qwen-1.5b": {"shape": config("qwen-1.5b", **SMALL, vocab=70000)},
    "llama-8b": {"shape": config("llama-8b", **SMALL, vocab=3000)},
    "smollm2": {"shape": config("smollm2", **SMALL, vocab=3000)},
    "qwen3": {"shape": config("qwen3", **SMALL, vocab=3000)},
    "few sequences": {"shape": config("llama-8b", **SMALL, vocab=3000), "sequences": 5},
    "many sequences": {"shape": config("qwen-1.5b", **SMALL, vocab=3000), "sequences": 96},
    "rank 0 of 2": {"shape": config("llama-8b", **SMALL, vocab=3001), "ranks": 2},
    "rank 1 of 2": {"shape": config("qwen-1.5b", **SMALL, vocab=3001), "ranks": 2, "rank": 1},
    "fp8": {"shape": config("llama-8b", **SMALL, vocab=3000), "kv_dtype": "fp8"},
    "pages out of step": {"shape": config("smollm2", **SMALL, vocab=3000), "kv_dtype": "fp8", "page_tokens": 3},
    "float32": {"shape": config("smollm2", **SMALL, vocab=3000), "dtype": torch.float32, "kv_dtype": "float32"},
    "no bulk copies": {"shape": config("qwen-1.5b", **SMALL, vocab=3000), "capability": (8, 0)},
    "odd widths": {"shape": config("smollm2", hidden=100, intermediate=90, vocab=3001)},
}
PAGES = 40


class Kernel:
    """In place of a compiled one: counts its launches."""

    function = packed_metadata = None

    def __init__(self, name: str) -> None:
        self.name, self.launches = name, 0

    def launch_metadata(self, *given: Any) -> None: ...

    def run(self, *given: Any) -> None:
        self.launches += 1

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert min(grid) > 0
        return self.run_again

    def run_again(self, *args: Any, stream: int) -> None:
        self.launches += 1


def compile_nothing() -> dict[str, Kernel]:
    """Makes Triton's compiling give such kernels, and keep them as its own; returns them all, by Triton's keys."""
    from triton.runtime.jit import JITFunction

    from slipstream.run.cuda.kernels import decode, hopper, prefill, products, sampling

    for module in (decode, prefill, products, sampling, *hopper.modules().values()):
        for function in vars(module).values():
            if isinstance(function, JITFunction):
                function.device_caches.clear()
    made: dict[str, Kernel] = {}

    def make(function: Any, key: str, signature: Any, device: int, *others: Any) -> Kernel:
        kernel = Kernel(function.fn.__name__)
        function.device_caches[device][0][key] = made[f"{kernel.name} {key}"] = kernel
        return kernel

    JITFunction._do_compile = make
    return made


def compute_nothing() -> None:
    """Products in torch take their time, and nobody looks at them."""

    def product(x: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
        return x.new_zeros(len(x), weight.shape[1]) if out is None else out

    torch.mm = product
    torch.addmm = lambda bias, x, weight, out=None: product(x, weight, out=out)
    Tensor.addmm_ = lambda self, *given: self


class Drawing(TritonTokens):
    """Knows the token 0 only: nothing is drawn here."""

    def feed(self, token_ids: Tensor, rows: Tensor, last: Tensor) -> None:
        super().feed(token_ids, rows, last)
        token_ids.clamp_(min=0)

    def draw(self, logits: Tensor, how: DrawColumns, chosen: Tensor, *kept: Any) -> None:
        super().draw(logits, how, chosen, *kept)
        chosen.zero_()


SETTINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1),
    SamplingParams(temperature=0.0, logprobs=2),
    SamplingParams(temperature=1.0, repetition_penalty=1.2, presence_penalty=0.5),
    SamplingParams(temperature=0.0, min_tokens=3, logit_bias={5: 1.0}),
]


def plans(rows: int, page_tokens: int, rng: np.random.Generator) -> Iterator[StepPlan]:
    """Every number of sequences that decode, alone and beside a piece of a prompt; prompts of every number of tokens
    that products treat by itself; and steps of all sorts."""
    most = PAGES * page_tokens - 80

    def part(row: int, tokens: int, *, fed: bool) -> tuple[int, list[int], int, list[int]]:
        first = int(rng.integers(0, most))
        ids = [FROM_DEVICE if fed and rng.random() < 0.5 else 3] * tokens
        return row, ids, first, rng.integers(1, PAGES, -(-(first + tokens) // page_tokens)).tolist()

    def plan(counts: list[int]) -> StepPlan:
        sample = (rng.random(len(counts)) < 0.3).tolist()
        decodes = next((row for row, count in enumerate(counts) if count > 1), len(counts))
        return make_plan([part(row, count, fed=row < decodes) for row, count in enumerate(counts)], sample=sample)

    first = plan([1])
    first.new_rows.extend(new_row(row, SETTINGS[row % len(SETTINGS)]) for row in range(rows))
    yield first
    for decodes in range(1, rows):
        yield plan([1] * decodes + [int(rng.integers(2, 20))])
    for decodes in range(1, rows + 1):
        yield plan([1] * decodes)
    for tokens in range(2, 80):
        yield plan([tokens])
    for _ in range(30):
        decodes = int(rng.integers(0, rows))
        chunks = int(rng.integers(1, min(4, rows - decodes) + 1))
        yield plan([1] * decodes + rng.integers(1, 80, chunks).tolist())


def check(case: str) -> tuple[int, int]:
    """(kernels compiled ahead, those of them that were launched). Asserts that nothing was compiled later."""
    given = {"sequences": 64, **CASES[case]}
    use(NoDevice(given.pop("capability", (9, 0))))
    made = compile_nothing()
    compute_nothing()
    model, ops, tokens = kernels_of(given.pop("shape"), "cpu", pages=PAGES, make_tokens=Drawing, **given)
    layout, sequences = ops.pool.layout, given["sequences"]
    ops.room_laid_out = 500  # so that some steps have no room
    context = PAGES * layout.page_tokens
    with torch.inference_mode():
        compile_ahead(ops, tokens, model, graph_sizes(sequences), sequences=sequences, context=context)
    ahead = set(made)
    memory = ops.pool.values.view(torch.uint8).flatten()
    for graphs in (False, True):
        runner = CudaRunner(
            model, layout, memory, sequences, PAGES, ops=ops, tokens=tokens, prompt_graphs=graphs, prompt_rows=128
        )
        for plan in plans(sequences, layout.page_tokens, np.random.default_rng(7)):
            runner.execute(plan)
        runner.warm_up(PAGES)
    late = sorted(set(made) - ahead)
    assert not late, f"{case}: {len(late)} kernels are compiled when a step needs them:\n" + "\n".join(late)
    return len(ahead), sum(kernel.launches > 0 for kernel in made.values())
