"""The loop that `bench engine` measures: its sequences decode together, none of them computed a prompt."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from slipstream.bench.engine import block_tables
from slipstream.bench.steady import SteadyLoop
from slipstream.engine.plan import FROM_DEVICE, StepOutcome, StepPlan
from slipstream.kv.layout import KVLayout
from slipstream.types import SamplingParams

LAYOUT = KVLayout(page_tokens=4, layers=1, kv_heads=1, head_dim=4, dtype="float32", total_kv_heads=1)


class Recorder:
    """Answers 7 to everything and keeps the plans; raises at step `broken_at`."""

    depth = 2

    def __init__(self, broken_at: int = -1) -> None:
        self.plans: list[StepPlan] = []
        self.broken_at = broken_at
        self._launched: deque[StepPlan] = deque()

    def launch(self, plan: StepPlan) -> None:
        self._launched.append(plan)
        self.plans.append(plan)

    def behind(self) -> None: ...

    def ended(self) -> bool:
        return True

    def collect(self) -> StepOutcome:
        plan = self._launched.popleft()
        if 0 <= self.broken_at <= plan.step:
            raise RuntimeError("no more")
        return StepOutcome(plan.step, np.full(plan.sequences, 7), [None] * plan.sequences)

    def execute(self, plan: StepPlan) -> StepOutcome:
        self.launch(plan)
        return self.collect()


def loop(runner: Recorder, batch: int) -> SteadyLoop:
    pages = batch * -(-SteadyLoop.tokens_each(40, 20, batch) // 4) + 1
    return SteadyLoop(
        runner, LAYOUT, pages, batch=batch, context=40, steps=20, sampling=SamplingParams(temperature=0.0)
    )


@pytest.mark.parametrize("batch", [1, 20])
def test_all_sequences_decode_in_every_step_that_counts(batch: int) -> None:
    runner = Recorder()
    steady = loop(runner, batch).measure()
    assert len(steady.intervals) == 20
    assert steady.mean_ms > 0
    assert all(len(plan.token_ids) == plan.sequences for plan in runner.plans)
    full = [plan for plan in runner.plans if plan.sequences == batch]
    assert len(full) >= 21
    assert all((plan.token_ids == FROM_DEVICE).all() for plan in full[2:20])
    assert abs(np.mean([plan.context_lens.mean() for plan in full[:21]]) - 40) < 8


def test_what_ends_the_loop_is_raised() -> None:
    with pytest.raises(RuntimeError, match="no more"):
        loop(Recorder(broken_at=3), 1).measure()


def test_sequences_may_differ_in_length() -> None:
    runner, lengths = Recorder(), [24, 100, 24]
    pages = sum(-(-SteadyLoop.tokens_each(length, 20, 3) // 4) for length in lengths) + 1
    SteadyLoop(
        runner, LAYOUT, pages, batch=3, context=lengths, steps=20, sampling=SamplingParams(temperature=0.0)
    ).measure()
    middle = [sorted(plan.context_lens.tolist()) for plan in runner.plans if plan.sequences == 3][10]
    assert np.abs(np.subtract(middle, sorted(lengths))).max() < 8


def test_pages_of_sequences_of_several_lengths_are_their_own() -> None:
    tables = block_tables(np.array([5, 3, 9, 1, 7]), np.array([4, 9, 1]), 4)
    assert tables.tolist() == [[5, 0, 0], [3, 9, 1], [7, 0, 0]]
