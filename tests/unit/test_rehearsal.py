"""What is computed before the first request: steps of every kind, which leave nothing behind but what was made."""

from __future__ import annotations

import queue
import threading
from pathlib import Path

import numpy as np
import pytest
from tests.unit.test_core import EOS, LAYOUT
from tests.unit.test_kernels_runner import PAGES, twin_runner
from tests.unit.test_loop import PATIENCE_S, PoisonedRunner
from tests.unit.test_loop import request as loop_request
from tests.unit.tiny_models import load_model, make_runner, tiny_model

from slipstream.config import EngineConfig
from slipstream.engine.core import EngineCore
from slipstream.engine.effects import Effect
from slipstream.engine.loop import EngineLoop
from slipstream.engine.plan import FROM_DEVICE, StepPlan
from slipstream.engine.rehearsal import rehearsal, rehearse
from slipstream.run.runner import Runner

ROWS = 8
ENDS = (EOS,)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def steps_of(runner: Runner) -> list[StepPlan]:
    """The plans that the runner is given from now on."""
    seen: list[StepPlan] = []
    launch = runner.launch

    def watched(plan: StepPlan) -> None:
        seen.append(plan)
        launch(plan)

    runner.launch = watched  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("rows", [1, 2, ROWS])
@pytest.mark.parametrize("most", [5, 20, 4096])
@pytest.mark.parametrize("gpu", [False, True])
def test_every_kind_of_step_computes_and_touches_no_page_and_no_row(folder: Path, rows: int, most: int, gpu: bool):
    runner = twin_runner(folder) if gpu else make_runner(load_model(folder), pages=PAGES, rows=ROWS)
    pool = runner.pool.values.view(PAGES, -1)
    before, seen = pool[1:].clone(), steps_of(runner)
    steps = rehearse(runner, page_tokens=8, max_sequences=rows, max_tokens=most, eos_ids=ENDS)
    assert steps == len(seen) == (6 if gpu else 5)
    assert (pool[1:] == before).all()
    for row in range(ROWS):
        with pytest.raises(IndexError, match="is free"):
            runner.sampler.params(row)
    assert max(int(plan.context_lens.max(initial=0)) for plan in seen) <= most
    assert max(plan.sequences for plan in seen) <= rows
    assert all((plan.block_tables == 0).all() for plan in seen)
    assert [plan.step for plan in seen] == list(range(-steps, 0))
    assert any((plan.token_ids == FROM_DEVICE).any() for plan in seen) == gpu


def test_a_rehearsal_has_what_requests_bring():
    plans = rehearsal(page_tokens=16, max_sequences=64, max_tokens=4096, eos_ids=ENDS, ahead=True)
    kinds: set[str] = set()
    for plan in plans:
        new = np.diff(plan.query_start)
        behind = plan.context_lens - new
        if len(new) == 1 and new[0] > 1:
            kinds.add("piece" if not plan.sample[0] else "end" if behind[0] else "whole prompt")
        elif len(new) and new.max() == 1:
            kinds.add("one decodes" if len(new) == 1 else "several decode")
        elif len(new) and new.min() == 1:
            kinds.add("mixed")
    assert kinds == {"piece", "end", "one decodes", "several decode", "mixed"}
    asked = [row.sampling for plan in plans for row in plan.new_rows]
    assert any(s.temperature == 0 for s in asked)
    assert any(s.temperature > 0 and s.top_p == 1 and not s.top_k for s in asked)
    assert any(s.top_p < 1 and s.top_k and s.min_p for s in asked)
    assert any(s.penalized and s.logit_bias and s.min_tokens and s.logprobs for s in asked)
    assert any(plan.prompt_logprobs for plan in plans)


def test_a_model_that_is_too_short_for_it_has_none():
    assert rehearsal(page_tokens=16, max_sequences=4, max_tokens=4) == []


def test_a_step_that_fails_ends_the_rehearsal_when_nothing_is_under_way():
    runner = PoisonedRunner({0}, depth=2)
    with pytest.raises(RuntimeError, match="the kernel failed"):
        rehearse(runner, page_tokens=4, max_sequences=4, max_tokens=64)
    assert runner.most == 2
    assert not runner._launched


@pytest.mark.parametrize("fails", [False, True])
def test_the_loop_thread_rehearses_before_the_loop_is_started(fails: bool):
    threads: list[str] = []
    told: queue.SimpleQueue[object] = queue.SimpleQueue()

    def rehearsing() -> None:
        threads.append(threading.current_thread().name)
        if fails:
            raise RuntimeError("no")

    def tell(effects: list[Effect]) -> None:
        for effect in effects:
            told.put(effect)

    numbers = EngineConfig(page_tokens=4, chunk_tokens=64, max_sequences=16, max_model_len=64)
    loop = EngineLoop(
        EngineCore(LAYOUT, 65, numbers, ENDS),
        PoisonedRunner(set(), depth=1),  # type: ignore[arg-type]
        deliver=tell,
        on_step=lambda plan, seconds: None,
        on_failure=lambda error: None,
        rehearse=rehearsing,
    )
    loop.start()
    assert threads == ["slipstream-loop"]
    loop.post(lambda core: core.submit(loop_request("a"), "router", None))
    assert told.get(timeout=PATIENCE_S)
    loop.stop()
    assert (loop.failed_steps, loop.failed_events) == (0, 0)
