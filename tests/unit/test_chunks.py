"""How many tokens a step computes beside sequences that decode, when it is measured."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.unit.test_kernels_runner import PAGES, twin_runner
from tests.unit.test_rehearsal import ROWS, steps_of
from tests.unit.tiny_models import tiny_model

from slipstream.engine import chunks
from slipstream.engine.chunks import SIZES, chosen_of, measured
from slipstream.engine.plan import StepOutcome, StepPlan


class Clocked:
    """Steps take `base` seconds and `each` for every token, at least `host`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, base: float, each: float, host: float = 0.0) -> None:
        self._cost = base, each, host
        self._now = 0.0
        self.plans: list[StepPlan] = []
        monkeypatch.setattr(chunks.time, "perf_counter", lambda: self._now)

    def execute(self, plan: StepPlan) -> StepOutcome:
        base, each, host = self._cost
        self.plans.append(plan)
        self._now += max(host, base + each * len(plan.token_ids))
        return StepOutcome(plan.step, np.zeros(plan.sequences, dtype=np.int64), [None] * plan.sequences)


@pytest.mark.parametrize(
    ("base", "each", "host", "chosen"),
    [
        (0.0001, 30e-6, 0.0, 128),  # every token costs the same
        (0.0050, 25e-6, 0.004, 256),  # a large model, for which the host is fast enough
        (0.0005, 6e-6, 0.004, 384),  # a small one, for which it is not
    ],
)
def test_the_least_that_computes_prompts_nearly_as_fast_is_chosen(
    base: float, each: float, host: float, chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Clocked(monkeypatch, base, each, host)
    assert measured(runner, page_tokens=16, most=512) == chosen
    assert {len(plan.token_ids) for plan in runner.plans if len(plan.token_ids) > 2} == set(SIZES)


def test_one_step_that_takes_long_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Clocked(monkeypatch, 0.005, 25e-6)
    execute, count = runner.execute, 0

    def stumbling(plan: StepPlan) -> StepOutcome:
        nonlocal count
        count += 1
        runner._now += 0.5 * (count % 4 == 0)
        return execute(plan)

    runner.execute = stumbling  # type: ignore[method-assign]
    assert measured(runner, page_tokens=16, most=512) == 256


def test_no_size_beyond_the_most_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Clocked(monkeypatch, 0.0, 1e-5)
    assert measured(runner, page_tokens=16, most=100) == 100
    assert measured(runner, page_tokens=16, most=128) == 128
    assert runner.plans == []
    assert measured(runner, page_tokens=16, most=300) == 128
    assert max(len(plan.token_ids) for plan in runner.plans) == 256


def test_prompts_that_may_not_be_so_long_are_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose sequences are short computes many of them in a step all the same."""
    runner = Clocked(monkeypatch, 0.0005, 6e-6, 0.004)
    assert measured(runner, page_tokens=16, most=512, longest=130, rows=256) == 384
    largest = max(runner.plans, key=lambda plan: len(plan.token_ids))
    assert largest.query_start.tolist() == [0, 1, 131, 261, 391, 512]
    assert largest.context_lens.tolist() == [2, 130, 130, 130, 121]
    assert [new.row for new in runner.plans[0].new_rows] == runner.plans[-1].freed_rows == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("longest", "rows", "largest"), [(40, 6, 192), (130, 3, 256), (130, 2, 0), (20, 1, 0)])
def test_no_more_is_tried_than_the_rows_can_hold(
    longest: int, rows: int, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Clocked(monkeypatch, 0.0, 1e-5)
    assert measured(runner, page_tokens=16, most=512, longest=longest, rows=rows) == (128 if largest else 512)
    assert max((len(plan.token_ids) for plan in runner.plans), default=0) == largest
    assert max((plan.sequences for plan in runner.plans), default=0) <= rows


def test_of_equally_slow_sizes_the_largest_is_worth_it() -> None:
    assert chosen_of({128: 0.01, 256: 0.01, 512: 0.01}) == 512


def test_measuring_touches_no_page_and_leaves_rows_free(tmp_path: Path) -> None:
    runner = twin_runner(tiny_model(tmp_path))
    pool = runner.pool.values.view(PAGES, -1)
    before, seen = pool[1:].clone(), steps_of(runner)
    assert measured(runner, page_tokens=8, most=192) in (128, 192)
    assert (pool[1:] == before).all()
    for row in range(ROWS):
        with pytest.raises(IndexError, match="is free"):
            runner.sampler.params(row)
    assert {plan.sequences for plan in seen} == {0, 2}
