"""Executes step plans on a GPU.

Steps in which every sequence has one new token run as a CUDA graph: one copy of integers to the device, one graph, one
copy of tokens back. All others, which hold a piece of a prompt, run kernel by kernel. Rows that only want the most
likely token need nothing of the sampler; the rest is sampled from the step's logits as on a CPU, by the same code.
All work of a runner is on a stream of its own, so that copies of KV pages elsewhere neither wait for it nor delay it.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.engine.plan import IntArray, StepOutcome, StepPlan
from slipstream.kv.layout import KVLayout
from slipstream.model.llama import Llama
from slipstream.run.cuda.forward import mixed
from slipstream.run.cuda.graphs import DecodeGraphs
from slipstream.run.cuda.inputs import MixedInputs
from slipstream.run.cuda.ops import HEAD_DIMS, Ops, TritonOps
from slipstream.run.runner import Runner
from slipstream.types import Logprob, SamplingParams

logger = logging.getLogger(__name__)

WARM_LENGTHS = (40, 2048)  # prompts that are computed once at start: one for each shape of the prefill kernel


def why_not(model: Llama, layout: KVLayout) -> str:
    """Why the kernels cannot serve this model here; empty when they can."""
    try:
        import triton  # pyright: ignore[reportMissingImports] # noqa: F401
    except ImportError:
        return "triton is not installed (pip install 'slipstream[gpu]')"
    if torch.cuda.get_device_capability(model.device) < (8, 0):
        return "the kernels need compute capability 8.0 or newer"
    if layout.head_dim not in HEAD_DIMS:
        return f"heads of {layout.head_dim} numbers have no kernel (there is one for {HEAD_DIMS})"
    return ""


class CudaRunner(Runner):
    """`Runner` with kernels and CUDA graphs. `max_pages` is the widest block table of a plan.

    `ops` replaces the kernels, for tests.
    """

    def __init__(
        self,
        model: Llama,
        layout: KVLayout,
        memory: Tensor,
        max_sequences: int,
        max_pages: int,
        *,
        ops: Ops | None = None,
    ) -> None:
        super().__init__(model, layout, memory, max_sequences)
        device = model.device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._simple = np.zeros(max_sequences, dtype=np.bool_)  # rows that want the most likely token, nothing else
        with torch.inference_mode(), self._on_stream():
            if ops is None:
                pdl = torch.cuda.get_device_capability(device) >= (9, 0)
                ops = TritonOps(model.config, self.pool, model.rotary, max_sequences, pdl=pdl)
            self._ops: Ops = ops
            self._mixed = MixedInputs(layout.page_tokens, device)
            self._graphs = DecodeGraphs(model, ops, max_sequences, max_pages)
            self._sync()

    def warm_up(self, max_pages: int) -> None:
        """Computes prompts in the scratch page, so that nothing is compiled when the first request comes."""
        with torch.inference_mode(), self._on_stream():
            for length in WARM_LENGTHS:
                if length <= max_pages * self.layout.page_tokens:
                    plan = _prompt(length, self.layout.pages_for(length))
                    self._logits(self._forward(plan)[-1:])
            self._sync()

    @torch.inference_mode()
    def _run(self, plan: StepPlan) -> StepOutcome:
        for row in plan.freed_rows:
            self.sampler.free(row)
        for new in plan.new_rows:
            self.sampler.add(new)
            self._simple[new.row] = wants_most_likely(new.sampling)
        if len(plan.token_ids) == 0:
            return StepOutcome(plan.step, np.full(plan.sequences, -1), [None] * plan.sequences)
        with self._on_stream():
            if (
                len(plan.token_ids) == plan.sequences
                and not plan.prompt_logprobs
                and plan.sequences <= self._graphs.most
            ):
                return self._decode(plan)
            return self._compute(plan)

    def _decode(self, plan: StepPlan) -> StepOutcome:
        self._graphs.launch(plan)
        if self._simple[plan.rows].all():
            self._sync()
            token_ids = np.where(plan.sample, self._graphs.chosen(plan.sequences), -1)
            return StepOutcome(plan.step, token_ids, [None] * plan.sequences)
        sampled = np.flatnonzero(plan.sample)
        logits = self._graphs.logits(plan.sequences)
        logits = (logits if len(sampled) == len(logits) else logits[self._tensor(sampled)]).float()
        return self._sampled(plan, sampled, logits)

    def _compute(self, plan: StepPlan) -> StepOutcome:
        x = self._forward(plan)
        sampled = np.flatnonzero(plan.sample)
        logits = self._logits(self._rows(x, plan.query_start[sampled + 1] - 1)) if len(sampled) else x
        outcome = self._sampled(plan, sampled, logits)
        if plan.prompt_logprobs:
            hidden = self.model.norm(x)
            for index in plan.prompt_logprobs:
                outcome.prompt_logprobs[index] = self._prompt_logprobs(hidden, plan, index)
        self._sync()
        return outcome

    def _forward(self, plan: StepPlan) -> Tensor:
        return mixed(self.model, self._ops, self._mixed.fill(plan))

    def _logits(self, x: Tensor) -> Tensor:
        return self.model.logits(self.model.norm(x))

    def _sampled(self, plan: StepPlan, sampled: IntArray, logits: Tensor) -> StepOutcome:
        token_ids = np.full(plan.sequences, -1, dtype=np.int64)
        logprobs: list[Logprob | None] = [None] * plan.sequences
        if len(sampled):
            chosen, found = self.sampler.sample(logits, plan.rows[sampled], plan.context_lens[sampled])
            token_ids[sampled] = chosen
            for index, logprob in zip(sampled, found, strict=True):
                logprobs[index] = logprob
        return StepOutcome(plan.step, token_ids, logprobs)

    def _on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _sync(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


def wants_most_likely(sampling: SamplingParams) -> bool:
    """Whether a row's next token is that of the largest logit, and nobody asks how large."""
    plain = not sampling.penalized and not sampling.logit_bias and not sampling.min_tokens
    return plain and sampling.temperature <= 0 and sampling.logprobs is None


def _prompt(tokens: int, pages: int) -> StepPlan:
    """A prompt that computes in the scratch page and whose sequence nobody knows."""
    column: NDArray[np.int64] = np.arange(tokens)
    return StepPlan(
        step=0,
        token_ids=np.zeros(tokens, dtype=np.int64),
        positions=column,
        query_start=np.array([0, tokens]),
        context_lens=np.array([tokens]),
        block_tables=np.zeros((1, pages), dtype=np.int64),
        rows=np.zeros(1, dtype=np.int64),
        sample=np.zeros(1, dtype=np.bool_),
    )
