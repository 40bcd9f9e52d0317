"""Executes step plans on a GPU, two at a time: one that computes, and one launched behind it.

Steps in which every sequence has one new token run as a CUDA graph: one copy of numbers to the device, one graph, one
copy of tokens back. All others, which hold a piece of a prompt, run kernel by kernel, or with `prompt_graphs`, up to a
size, as graphs with attention between them (`pieces`). Tokens are drawn on the device, which keeps the last one of each
row, so that the next step can be launched before the host has read them. Rows that want more of their logits than a
draw (penalties, biases, log-probabilities) get it behind the step by the code that a CPU runs; what these ask for is
written before the launch returns as well.

`launch` gives the device all that a step needs and waits for nothing; `collect` waits for the event behind it. All work
of a runner is on a stream of its own, so that copies of KV pages elsewhere neither wait for it nor delay it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.config import AttentionBackend
from slipstream.engine.plan import FROM_DEVICE, IntArray, StepOutcome, StepPlan
from slipstream.kv.layout import KVLayout
from slipstream.model.llama import Llama
from slipstream.run.cuda.forward import mixed
from slipstream.run.cuda.graphs import DecodeGraphs, graph_sizes
from slipstream.run.cuda.inputs import MixedInputs, scratch_prompt
from slipstream.run.cuda.kernels.ops import HEAD_DIMS, Ops, TritonOps
from slipstream.run.cuda.pieces import MOST_ROWS, PieceGraphs
from slipstream.run.cuda.prepare import compile_ahead
from slipstream.run.cuda.sampling import TokenOps, TorchTokens, TritonTokens
from slipstream.run.runner import Runner
from slipstream.run.sampler import Chosen, DrawColumns, Sampler, to_device
from slipstream.types import Logprob, SamplingParams

logger = logging.getLogger(__name__)

WARM_LENGTHS = (40, 2048)  # prompts that are computed once at start: one for each shape of the prefill kernel
LARGER_LENGTHS = (3072, 4096, 6144)  # of which one layer is: cuBLAS has other kernels for other sizes, which are loaded
# when they are first launched, and the buffers that grow with a step have grown
PINNED_ALIKE = 8  # columns of one size that are on their way to the device or back at the same time


def why_not(model: Llama, layout: KVLayout) -> str:
    """Why the kernels cannot serve this model here; empty when they can."""
    try:
        import triton  # pyright: ignore[reportMissingImports] # noqa: F401
    except ImportError:
        return "triton is not installed (pip install 'slipstream[gpu]')"
    capability = torch.cuda.get_device_capability(model.device)
    if capability < (8, 0):
        return "the kernels need compute capability 8.0 or newer"
    if layout.dtype == "fp8" and capability < (8, 9):
        return "the kernels read keys and values of fp8 from compute capability 8.9 on"
    if layout.head_dim not in HEAD_DIMS:
        return f"heads of {layout.head_dim} numbers have no kernel (there is one for {HEAD_DIMS})"
    return ""


@dataclass(slots=True)
class Launched:
    """A step under way, and where its outcome will be when `done` has come."""

    plan: StepPlan
    done: torch.cuda.Event | None = None
    answer: Tensor | None = None  # [sequences] tokens of a graph, on the host
    choice: Chosen | None = None  # of the sequences `chosen`, made behind the step
    chosen: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    prompts: dict[int, Callable[[], list[Logprob | None]]] = field(default_factory=dict)


class CudaRunner(Runner):
    """`Runner` with kernels and CUDA graphs. `max_pages` is the widest block table of a plan.

    `ops` and `tokens` replace the kernels, for tests; without `capture` every step runs kernel by kernel. With
    `prompt_graphs` steps of up to `prompt_rows` tokens that hold prompts run as `pieces.PieceGraphs`.
    """

    depth = 2
    attention = "triton"

    def __init__(
        self,
        model: Llama,
        layout: KVLayout,
        memory: Tensor,
        max_sequences: int,
        max_pages: int,
        *,
        ops: Ops | None = None,
        tokens: TokenOps | None = None,
        capture: bool = True,
        prompt_graphs: bool = False,
        prompt_rows: int = MOST_ROWS,
    ) -> None:
        super().__init__(model, layout, memory, max_sequences)
        device = model.device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._special = np.zeros(max_sequences, dtype=np.bool_)  # rows that want more than a draw
        self._launched: deque[Launched | Exception] = deque()
        self._answers = [torch.empty(max_sequences, dtype=torch.int64, pin_memory=device.type == "cuda") for _ in "ab"]
        self._last = torch.zeros(max_sequences + 1, dtype=torch.int32, device=device)  # one more for padding
        with torch.inference_mode(), self._on_stream():
            if ops is None:
                pdl = torch.cuda.get_device_capability(device) >= (9, 0)
                ops = TritonOps(model.config, self.pool, model.rotary, max_sequences, pdl=pdl)
            self._ops: Ops = ops
            if tokens is None and device.type == "cuda":
                tokens = TritonTokens(max_sequences, model.config.vocab, model.dtype, device)
            self._tokens: TokenOps = tokens or TorchTokens()
            self.sampler = Sampler(max_sequences, model.config.vocab, device, self._draw)
            self._mixed = MixedInputs(layout.page_tokens, model.config.kv_heads, device)
            sizes = graph_sizes(max_sequences)
            if isinstance(ops, TritonOps) and isinstance(tokens, TritonTokens):  # for a dry run too: it needs most
                context = max_pages * layout.page_tokens
                compile_ahead(ops, tokens, model, sizes, sequences=max_sequences, context=context)
            sizes = sizes if capture else []
            self._graphs = DecodeGraphs(model, ops, self._tokens, self._last, sizes, max_sequences, max_pages)
            self._pieces = PieceGraphs(model, ops, prompt_rows if prompt_graphs and capture else 0)
            self._sync()

    def settle(self, wanted: AttentionBackend) -> None:
        """Decides about attention, before the first step. Raises ConfigError when `wanted` cannot be obeyed."""
        from slipstream.run.cuda.backends import settle

        assert isinstance(self._ops, TritonOps)
        with torch.inference_mode(), self._on_stream():
            self.attention = settle(wanted, self._ops, self.model)
            self._sync()

    def warm_up(self, max_pages: int, chunk_tokens: int = 0) -> None:
        """Computes prompts in the scratch page, so that nothing is compiled, loaded or allocated when the first request
        comes: of up to `chunk_tokens` tokens, the most that a step may hold of them."""
        with torch.inference_mode(), self._on_stream():
            beyond = [max(self._pieces.sizes) + 1] if self._pieces.sizes else []
            for length in (*WARM_LENGTHS, *beyond):
                if length <= max_pages * self.layout.page_tokens:
                    logits = self._logits(self._forward(scratch_prompt(length, self.layout.page_tokens))[-1:])
                    self._draw(logits, self.sampler.table.columns(np.zeros(1, dtype=np.int64), np.array([length])))
                    self._sync()
            for length in sorted({*LARGER_LENGTHS, chunk_tokens}):
                if max(WARM_LENGTHS) < length <= min(chunk_tokens, max_pages * self.layout.page_tokens):
                    plan = scratch_prompt(length, self.layout.page_tokens)
                    mixed(self.model, self._ops, self._mixed.fill(plan), layers=1)
                    self._sync()
            self._pin()

    def _pin(self) -> None:
        """Has torch pin the host memory in which a step's small columns travel, of every size that there may be: it
        keeps what it has pinned, and pinning may wait for the device."""
        if self.model.device.type != "cuda":
            return
        size, sizes = 1, list[int]()
        while size < 2 * len(self._special):
            sizes.append(size)
            size *= 2
        pinned = [torch.empty(size, dtype=torch.int64, pin_memory=True) for size in sizes for _ in range(PINNED_ALIKE)]
        del pinned

    def launch(self, plan: StepPlan) -> None:
        """Gives the device a step; whatever that raises, `collect` raises."""
        assert len(self._launched) < self.depth, f"{self.depth} steps are under way already"
        try:
            self._launched.append(self._begin(plan))
        except Exception as error:
            self._launched.append(error)

    def behind(self) -> Any:
        last = self._launched[-1]
        return last.done if isinstance(last, Launched) else None

    def ended(self) -> bool:
        oldest = self._launched[0]
        if isinstance(oldest, Exception) or oldest.done is None:
            return True
        try:
            return oldest.done.query()
        except RuntimeError:  # for `collect` to raise
            return True

    @torch.inference_mode()
    def collect(self) -> StepOutcome:
        launched = self._launched.popleft()
        if isinstance(launched, Exception):
            raise launched
        if launched.done is not None:
            launched.done.synchronize()
        plan = launched.plan
        token_ids = np.full(plan.sequences, -1, dtype=np.int64)
        logprobs: list[Logprob | None] = [None] * plan.sequences
        if launched.answer is not None:
            token_ids = np.where(plan.sample, launched.answer.numpy(), -1)
        if launched.choice is not None:
            with self._on_stream():
                token_ids[launched.chosen], found = self.sampler.finish(launched.choice)
            for index, logprob in zip(launched.chosen, found, strict=True):
                logprobs[index] = logprob
        return StepOutcome(plan.step, token_ids, logprobs, {index: read() for index, read in launched.prompts.items()})

    @torch.inference_mode()
    def _begin(self, plan: StepPlan) -> Launched:
        for row in plan.freed_rows:
            self.sampler.free(row)
        with self._on_stream():
            for new in plan.new_rows:
                self.sampler.add(new)
                self._special[new.row] = wants_more(new.sampling)
            launched = Launched(plan)
            if len(plan.token_ids) == 0:
                return launched
            one_each = len(plan.token_ids) == plan.sequences and not plan.prompt_logprobs
            if one_each and plan.sequences <= self._graphs.most:
                self._decode(launched)
            else:
                self._compute(launched)
            if self._stream is not None:
                launched.done = torch.cuda.Event()
                launched.done.record(self._stream)
            return launched

    def _decode(self, launched: Launched) -> None:
        plan = launched.plan
        self._graphs.launch(plan, self.sampler.table.columns(plan.rows, plan.context_lens))
        self._answers.reverse()  # the other may still be read
        launched.answer = self._answers[0][: plan.sequences]
        launched.answer.copy_(self._graphs.chosen(plan.sequences), non_blocking=True)
        special = np.flatnonzero(plan.sample & self._special[plan.rows])
        if len(special):
            logits = self._graphs.logits(plan.sequences).index_select(0, self._tensor(special)).float()
            self._choose(launched, logits, special)

    def _compute(self, launched: Launched) -> None:
        plan = launched.plan
        x = self._forward(plan)
        sampled = np.flatnonzero(plan.sample)
        if len(sampled):
            logits = self._logits(self._rows(x, plan.query_start[sampled + 1] - 1))
            self._choose(launched, logits, sampled)
        if plan.prompt_logprobs:
            hidden = self.model.norm(x)
            for index in plan.prompt_logprobs:
                launched.prompts[index] = self._prompt_logprobs(hidden, plan, index)

    def _forward(self, plan: StepPlan) -> Tensor:
        tokens = len(plan.token_ids)
        size = self._pieces.size(tokens)
        columns = self._mixed.fill(plan, size)
        if columns.decode is not None and (plan.token_ids[: columns.decodes] == FROM_DEVICE).any():
            self._tokens.feed(columns.decode.token_ids, columns.decode.rows, self._last)
        return self._pieces.forward(columns, tokens) if size else mixed(self.model, self._ops, columns)

    def _logits(self, x: Tensor) -> Tensor:
        return self.model.logits(self.model.norm(x))

    def _choose(self, launched: Launched, logits: Tensor, chosen: IntArray) -> None:
        """Has tokens chosen for the sequences `chosen` of the plan; float32 logits may be overwritten."""
        rows = launched.plan.rows[chosen]
        launched.chosen = chosen
        launched.choice = self.sampler.choose(logits, rows, launched.plan.context_lens[chosen])
        self._last.index_copy_(0, self._tensor(rows), launched.choice.tokens.to(self._last.dtype))

    def _draw(self, logits: Tensor, how: DrawColumns) -> Tensor:
        chosen = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        there = how.each(lambda column: to_device(torch.from_numpy(column), logits.device))
        self._tokens.draw(logits, there, chosen)
        return chosen

    def _on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _sync(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


def wants_more(sampling: SamplingParams) -> bool:
    """Whether a row's logits are changed before its token is drawn, or anybody asks for them."""
    changed = sampling.penalized or bool(sampling.logit_bias) or sampling.min_tokens > 0
    return changed or sampling.logprobs is not None
