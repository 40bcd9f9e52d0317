"""The runner: plans in, outcomes out; sampling rows across steps, logprobs, and steps that sample nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.tiny_models import (
    load_model,
    make_plan,
    make_runner,
    new_row,
    reference,
    reference_logits,
    save,
    shuffled_tables,
)

from slipstream.engine.plan import probe_plan
from slipstream.run.runner import PROMPT_LOGPROB_ROWS, Runner
from slipstream.types import SamplingParams


@pytest.fixture(scope="module")
def expected() -> Any:
    return reference("llama")


@pytest.fixture(scope="module")
def folder(expected: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(expected, tmp_path_factory.mktemp("model"))


@pytest.fixture
def runner(folder: Path) -> Runner:
    return make_runner(load_model(folder))


def prompt(length: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(2, 320, length).tolist()


def generate(runner: Runner, tokens: list[int], count: int, sampling: SamplingParams, row: int = 0) -> list[int]:
    """One sequence alone: a prompt step, then one step a token."""
    table = shuffled_tables(1, 10, 64, seed=row)[0]
    out: list[int] = []
    rows = [new_row(row, sampling, prompt_ids=tokens)]
    fed = list(tokens)
    for _ in range(count):
        first = len(tokens) + len(out) - len(fed) if out else 0
        outcome = runner.execute(make_plan([(row, fed, first, table)], new_rows=rows))
        out.append(int(outcome.token_ids[0]))
        rows, fed = [], [out[-1]]
    return out


def test_greedy_generation_equals_that_of_transformers(runner: Runner, expected: Any):
    tokens = prompt(20)
    with torch.inference_mode():
        wanted = expected.generate(torch.tensor([tokens]), max_new_tokens=16, do_sample=False, eos_token_id=None)
    assert generate(runner, tokens, 16, SamplingParams(temperature=0.0)) == wanted[0, 20:].tolist()


def test_a_sampled_answer_does_not_depend_on_who_else_is_in_the_batch(runner: Runner, folder: Path):
    sampling = SamplingParams(seed=11, top_p=0.9, repetition_penalty=1.1)
    alone = generate(runner, prompt(20), 12, sampling)
    other = make_runner(load_model(folder))
    tables = shuffled_tables(3, 10, 64, seed=9)
    sequences = [prompt(9, 5), prompt(20), prompt(30, 6)]
    rows = [new_row(0), new_row(3, sampling, prompt_ids=sequences[1]), new_row(5, SamplingParams(seed=1))]
    parts = [(row.row, sequences[index], 0, tables[index]) for index, row in enumerate(rows)]
    found = []
    for _ in range(12):
        outcome = other.execute(make_plan(parts, new_rows=rows))
        found.append(int(outcome.token_ids[1]))
        rows = []
        parts = [
            (row, [int(token)], first + len(fed), table)
            for (row, fed, first, table), token in zip(parts, outcome.token_ids, strict=True)
        ]
    assert found == alone


def test_a_sequence_goes_on_elsewhere_as_it_would_have_here(runner: Runner, folder: Path):
    sampling = SamplingParams(seed=4, temperature=1.2, presence_penalty=0.3)
    tokens = prompt(12)
    answer = generate(runner, tokens, 14, sampling)
    other, table = make_runner(load_model(folder)), shuffled_tables(1, 10, 64, seed=8)[0]
    row = new_row(2, sampling, prompt_ids=tokens, output_ids=answer[:6], outputs=6)
    outcome = other.execute(make_plan([(2, tokens + answer[:6], 0, table)], new_rows=[row]))
    assert int(outcome.token_ids[0]) == answer[6]


def test_only_sequences_that_ask_for_it_are_sampled(runner: Runner):
    tables = shuffled_tables(3, 4, 64)
    parts = [(row, prompt(6 + row, row), 0, tables[row]) for row in range(3)]
    rows = [new_row(row, SamplingParams(temperature=0.0, logprobs=2)) for row in range(3)]
    outcome = runner.execute(make_plan(parts, sample=[True, False, True], new_rows=rows, step=7))
    assert outcome.step == 7
    assert [token >= 0 for token in outcome.token_ids] == [True, False, True]
    assert [logprob is None for logprob in outcome.logprobs] == [False, True, False]
    nothing = runner.execute(make_plan([(1, [5], 7, tables[1])], sample=[False]))
    assert nothing.token_ids.tolist() == [-1]


def test_a_step_without_tokens_only_settles_rows(runner: Runner):
    empty = make_plan([(0, [], 0, [0])], sample=[False], new_rows=[new_row(0)])
    assert runner.execute(empty).token_ids.tolist() == [-1]
    runner.execute(make_plan([(0, [], 0, [0])], sample=[False], freed_rows=[0]))
    with pytest.raises(IndexError):
        runner.sampler.params(0)


def test_a_row_is_freed_before_it_is_taken_again_in_one_step(runner: Runner):
    table = shuffled_tables(1, 4, 64)[0]
    runner.execute(make_plan([(0, prompt(5), 0, table)], new_rows=[new_row(0)]))
    again = new_row(0, SamplingParams(temperature=0.0, logprobs=1))
    outcome = runner.execute(make_plan([(0, prompt(5), 0, table)], freed_rows=[0], new_rows=[again]))
    assert outcome.logprobs[0] is not None


def test_logprobs_agree_with_transformers(runner: Runner, expected: Any):
    tokens, table = prompt(20), shuffled_tables(1, 4, 64)[0]
    row = new_row(0, SamplingParams(temperature=0.0, logprobs=4))
    outcome = runner.execute(make_plan([(0, tokens, 0, table)], new_rows=[row]))
    wanted = reference_logits(expected, tokens)[-1].log_softmax(-1)
    found = outcome.logprobs[0]
    assert found is not None
    assert found.top_ids == wanted.topk(4).indices.tolist()
    assert found.top_logprobs == pytest.approx(wanted.topk(4).values.tolist(), abs=1e-4)
    assert found.logprob == found.top_logprobs[0]


def test_prompt_logprobs_cover_the_prompt_in_chunks(runner: Runner, expected: Any):
    tokens, table = prompt(100), shuffled_tables(1, 13, 64)[0]
    wanted = reference_logits(expected, tokens).log_softmax(-1)
    row = new_row(0, SamplingParams(temperature=0.0, prompt_logprobs=2))
    targets = [*tokens[1:], -1]
    found = []
    for first, last in ((0, PROMPT_LOGPROB_ROWS + 16), (PROMPT_LOGPROB_ROWS + 16, 100)):
        chunk = {0: np.array(targets[first:last])}
        plan = make_plan(
            [(0, tokens[first:last], first, table)], new_rows=[row] if not first else [], prompt_logprobs=chunk
        )
        found += runner.execute(plan).prompt_logprobs[0]
    assert found[-1] is None
    for index, logprob in enumerate(found[:-1]):
        assert logprob is not None
        assert logprob.logprob == pytest.approx(float(wanted[index, tokens[index + 1]]), abs=1e-4)
        assert logprob.top_ids == wanted[index].topk(2).indices.tolist()


def test_a_probe_computes_whatever_the_row_of_the_failed_step_held(runner: Runner):
    table = shuffled_tables(1, 10, 64, seed=0)[0]
    plan = make_plan([(3, prompt(5), 0, table)], new_rows=[new_row(3, SamplingParams(presence_penalty=1.0))])
    for _ in range(2):
        assert runner.execute(probe_plan(plan)).token_ids[0] >= 0
        runner.execute(plan)


@pytest.mark.parametrize("kv_dtype", ["float32", "fp8"])
def test_what_failed_sequences_leave_in_pages_reaches_nobody(folder: Path, kv_dtype: str):
    def answers(left: float) -> list[list[int]]:
        model = load_model(folder)
        layout = model.config.layout(8, kv_dtype)
        memory = torch.empty(64 * layout.page_bytes, dtype=torch.uint8)
        memory.view(torch.float32).fill_(left)
        memory[: layout.page_bytes] = 0  # the scratch page, which no sequence has
        runner, tables = Runner(model, layout, memory, 8), shuffled_tables(3, 8, 64)
        lengths, found = [5, 16, 19], []
        fed = [prompt(length) for length in lengths]
        rows = [new_row(row) for row in range(3)]
        for step in range(12):  # decoding sequences of different lengths are computed together
            pages = [table[: -(-length // 8)] for table, length in zip(tables, lengths, strict=True)]
            parts = [(row, fed[row], lengths[row] - len(fed[row]), pages[row]) for row in range(3)]
            found.append(runner.execute(make_plan(parts, new_rows=[] if step else rows)).token_ids.tolist())
            fed, lengths = [[token] for token in found[-1]], [length + 1 for length in lengths]
        return found

    wanted = answers(0.0)
    assert min(map(min, wanted)) >= 0
    assert answers(float("nan")) == wanted
