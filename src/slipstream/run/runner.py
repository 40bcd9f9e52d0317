"""Executes step plans: one forward pass of the model over the tokens of a step, then sampling.

A plan comes in as numpy columns and its outcome goes out as such. The runner holds no sequences: what it keeps between
steps is the KV pool, which the plans index, and the sampling state of rows, which plans set and free. It belongs to the
thread that calls `launch`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from slipstream.engine.plan import StepOutcome, StepPlan
from slipstream.kv.layout import KVLayout
from slipstream.model.llama import Llama
from slipstream.run.attention import PagedPool, StepAttention
from slipstream.run.sampler import Sampler, find_logprobs, to_device
from slipstream.types import Logprob

PROMPT_LOGPROB_ROWS = 64  # rows whose logits over the whole vocabulary exist at once


class Runner:
    """The model of one rank over its KV pool.

    `memory` is the pool as a byte tensor on the model's device, pages first; `threads` is the number of compute threads
    on a CPU (0 leaves torch's setting). The pool belongs to whoever allocated it and must outlive the runner. At most
    `depth` steps may be launched before the first of them is collected.
    """

    depth = 1
    attention = "torch"  # the backend, for people

    def __init__(self, model: Llama, layout: KVLayout, memory: Tensor, max_sequences: int, *, threads: int = 0) -> None:
        self.model, self.layout = model, layout
        self.pool = PagedPool(memory, layout, model.dtype)
        self.sampler = Sampler(max_sequences, model.config.vocab, model.device)
        self._threads, self._thread = threads, 0
        self._done: deque[StepOutcome | Exception] = deque()

    def launch(self, plan: StepPlan) -> None:
        """Begins a step; it is done when this returns. Whatever it raises, `collect` raises."""
        assert not self._done, "the step before has not been collected"
        try:
            self._done.append(self._run(plan))
        except Exception as error:
            self._done.append(error)

    def behind(self) -> Any:
        """The device's event behind the step launched last, for copies that shall wait for it; None: there is none."""
        return None

    def ended(self) -> bool:
        """Whether the oldest step under way is over, so that `collect` need not wait."""
        return True

    def collect(self) -> StepOutcome:
        """The outcome of the oldest step under way. Its keys and values are in the pool: their copies may start."""
        outcome = self._done.popleft()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def execute(self, plan: StepPlan) -> StepOutcome:
        """One step from plan to outcome."""
        self.launch(plan)
        return self.collect()

    @torch.inference_mode()
    def _run(self, plan: StepPlan) -> StepOutcome:
        self._settle_thread()
        for row in plan.freed_rows:
            self.sampler.free(row)
        for new in plan.new_rows:
            self.sampler.add(new)
        token_ids = np.full(plan.sequences, -1, dtype=np.int64)
        logprobs: list[Logprob | None] = [None] * plan.sequences
        if len(plan.token_ids) == 0:
            return StepOutcome(plan.step, token_ids, logprobs)
        with self._attention_kernels():
            hidden = self.model.forward(
                self._tensor(plan.token_ids), self._tensor(plan.positions), StepAttention(self.pool, plan)
            )
        sampled = np.flatnonzero(plan.sample)
        if len(sampled):
            logits = self.model.logits(self._rows(hidden, plan.query_start[sampled + 1] - 1))
            choice = self.sampler.choose(logits, plan.rows[sampled], plan.context_lens[sampled])
            self._wait()
            token_ids[sampled], found = self.sampler.finish(choice)
            for index, logprob in zip(sampled, found, strict=True):
                logprobs[index] = logprob
        prompts = {index: self._prompt_logprobs(hidden, plan, index) for index in plan.prompt_logprobs}
        self._wait()
        return StepOutcome(plan.step, token_ids, logprobs, {index: read() for index, read in prompts.items()})

    def _wait(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.current_stream(self.model.device).synchronize()

    def _attention_kernels(self) -> AbstractContextManager[Any]:
        """On GPUs, all but cuDNN's: it compiles for every new length, 17 ms a call (measured on an H200), and a decode
        step has a new length every time."""
        if self.model.device.type == "cpu":
            return nullcontext()
        return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])

    def _settle_thread(self) -> None:
        """The number of threads is a setting of each calling thread."""
        if self._threads and self._thread != threading.get_ident():
            torch.set_num_threads(self._threads)
            self._thread = threading.get_ident()

    def _tensor(self, values: NDArray[np.int64]) -> Tensor:
        return to_device(torch.from_numpy(np.ascontiguousarray(values)), self.model.device)

    def _rows(self, hidden: Tensor, rows: NDArray[np.int64]) -> Tensor:
        return hidden if len(rows) == len(hidden) else hidden.index_select(0, self._tensor(rows))

    def _prompt_logprobs(self, hidden: Tensor, plan: StepPlan, index: int) -> Callable[[], list[Logprob | None]]:
        """Log-probability of the token behind each token of one sequence's chunk; None where there is none.

        The function returned gives them when the device has found them.
        """
        targets = plan.prompt_logprobs[index]
        count = self.sampler.params(int(plan.rows[index])).prompt_logprobs or 0
        wanted = np.flatnonzero(targets >= 0)
        parts = []
        for start in range(0, len(wanted), PROMPT_LOGPROB_ROWS):
            part = wanted[start : start + PROMPT_LOGPROB_ROWS]
            logits = self.model.logits(self._rows(hidden, plan.query_start[index] + part))
            parts.append(find_logprobs(logits, self._tensor(targets[part]), [count] * len(part)))

        def read() -> list[Logprob | None]:
            found: list[Logprob | None] = [None] * len(targets)
            values = (logprob for part in parts for logprob in part.read())
            for offset, logprob in zip(wanted, values, strict=True):
                found[offset] = logprob
            return found

        return read
