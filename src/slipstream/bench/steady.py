"""The engine's loop in its steady state: sequences that decode together, and nothing else.

The sequences come as a prefill worker would hand them over: offered, granted, committed. So nothing is computed before
the steps that are measured, and these are the ones of a decode worker: scheduled by its core, launched and collected by
its loop. Their tokens go nowhere.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from slipstream import wire
from slipstream.config import EngineConfig
from slipstream.engine.core import EngineCore
from slipstream.engine.effects import Effect, ToPeer
from slipstream.engine.loop import EngineLoop, Runner
from slipstream.engine.plan import StepPlan
from slipstream.kv.layout import KVLayout
from slipstream.types import Request, SamplingParams

PEER = "bench"
PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class Steady:
    """`intervals` are the seconds from the end of each step to the end of the next."""

    intervals: list[float]

    @property
    def mean_ms(self) -> float:
        return 1e3 * sum(self.intervals) / len(self.intervals)

    @property
    def p90_ms(self) -> float:
        return 1e3 * float(np.quantile(self.intervals, 0.9))


class SteadyLoop:
    """`batch` sequences of about `context` tokens decode for `steps` steps on `runner`.

    `context` is one number for all, or one for each. The pool needs room for `tokens_each` tokens of each.
    """

    def __init__(
        self,
        runner: Runner,
        layout: KVLayout,
        pages: int,
        *,
        batch: int,
        context: int | Sequence[int],
        steps: int,
        sampling: SamplingParams,
    ) -> None:
        self._batch, self._steps = batch, steps
        each = [context] * batch if isinstance(context, int) else context
        self._prompts = [max(1, tokens - steps // 2) for tokens in each]
        assert len(self._prompts) == batch
        answer = steps + batch + 8  # they come a few at a time
        self._sampling = SamplingParams(
            max_tokens=answer,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            ignore_eos=True,
        )
        numbers = EngineConfig(
            page_tokens=layout.page_tokens,
            chunk_tokens=512,
            max_sequences=batch,
            max_model_len=max(self._prompts) + answer + 1,
            prefix_cache=False,
        )
        self._page_tokens = layout.page_tokens
        self._ends: list[float] = []
        self._over = threading.Event()
        self._failure: BaseException | None = None
        self._loop = EngineLoop(
            EngineCore(layout, pages, numbers, ()),
            runner,
            deliver=self._deliver,
            on_step=self._stepped,
            on_failure=self._failed,
        )

    @staticmethod
    def tokens_each(context: int, steps: int, batch: int) -> int:
        return context + steps + batch + 16 + 64  # and what the core keeps free for growth

    def measure(self) -> Steady:
        """Raises what the loop raised, and TimeoutError when the steps do not come."""
        for number, prompt in enumerate(self._prompts):
            offer = wire.Offer(
                xfer=number + 1,
                request=f"bench-{number}",
                attempt=0,
                prompt_len=prompt,
                block_keys=[],
                pages_needed=-(-prompt // self._page_tokens),
                max_tokens=self._sampling.max_tokens,
                priority=0,
            )
            self._loop.post(lambda core, offer=offer: core.from_source(PEER, offer))
        self._loop.start()
        there = self._over.wait(PATIENCE_S)
        self._loop.stop()
        if self._failure is not None:
            raise self._failure
        if not there:
            raise TimeoutError(f"{len(self._ends)} of {self._steps} steps of {self._batch} sequences came")
        ends = self._ends[: self._steps + 1]
        return Steady([later - earlier for earlier, later in pairwise(ends)])

    def _deliver(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, ToPeer) and isinstance(effect.message, wire.Grant):
                commit = self._commit(effect.message)
                self._loop.post(lambda core, commit=commit: core.from_source(PEER, commit))

    def _commit(self, grant: wire.Grant) -> wire.Commit:
        tokens = self._prompts[grant.xfer - 1]
        prompt: list[Any] = np.random.default_rng(grant.xfer).integers(3, 1000, tokens).tolist()
        request = Request(id=f"bench-{grant.xfer - 1}", prompt_ids=prompt, sampling=self._sampling, output_ids=[5])
        return wire.Commit(xfer=grant.xfer, generation=grant.generation, request=request, router=PEER, cached_tokens=0)

    def _stepped(self, plan: StepPlan, seconds: float) -> None:
        if plan.sequences == self._batch:
            self._ends.append(time.perf_counter())
            if len(self._ends) > self._steps:
                self._over.set()

    def _failed(self, error: BaseException) -> None:
        self._failure = error
        self._over.set()
