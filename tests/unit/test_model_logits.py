"""Our models against transformers, same weights, float32: whole prompts, chunks, decoding, batches, shuffled pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.tiny_models import (
    LogitsProbe,
    load_model,
    make_plan,
    make_runner,
    new_row,
    reference,
    reference_logits,
    save,
    shuffled_tables,
)

TOLERANCE = 2e-5

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama with all biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, as many KV heads as heads": ("llama", {"num_key_value_heads": 4}),
    "llama, llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama, yarn rope": ("llama", {"rope_parameters": YARN}),
    "llama, yarn rope untruncated": ("llama", {"rope_parameters": {**YARN, "truncate": False, "beta_fast": 24.0}}),
    "llama, linear rope": ("llama", {"rope_parameters": LINEAR}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied, yarn rope": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen3": ("qwen3", {}),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True}),
}


@pytest.fixture(scope="module", params=list(CASES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    architecture, changes = CASES[request.param]
    model = reference(architecture, **changes)
    return model, save(model, tmp_path_factory.mktemp("model"))


def prompt(length: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(2, 160, length).tolist()


def test_a_whole_prompt_gives_the_logits_of_transformers(pair: tuple[Any, Path]):
    expected, folder = pair
    runner = make_runner(load_model(folder))
    probe, tokens = LogitsProbe(runner), prompt(90)
    table = shuffled_tables(1, 12, 64)[0]
    every = {0: np.array([*tokens[1:], -1])}
    runner.execute(make_plan([(0, tokens, 0, table)], new_rows=[new_row(0)], sample=[False], prompt_logprobs=every))
    wanted = reference_logits(expected, tokens)
    found = torch.cat(probe.seen)
    assert (found - wanted[:-1]).abs().max() < TOLERANCE * wanted.abs().max()


def test_chunks_and_decoding_over_shuffled_pages_give_the_same(pair: tuple[Any, Path]):
    expected, folder = pair
    runner = make_runner(load_model(folder))
    probe, tokens = LogitsProbe(runner), prompt(60)
    table = shuffled_tables(1, 8, 64, seed=3)[0]
    wanted = reference_logits(expected, tokens)
    start, rows = 0, [new_row(0)]
    for size in (13, 1, 20, 8, 1, 1, 16):
        runner.execute(make_plan([(0, tokens[start : start + size], start, table)], new_rows=rows))
        start, rows = start + size, []
        assert (probe.last[0] - wanted[start - 1]).abs().max() < TOLERANCE * wanted.abs().max(), start


def test_sequences_of_one_step_do_not_see_each_other(pair: tuple[Any, Path]):
    expected, folder = pair
    runner = make_runner(load_model(folder), page_tokens=4, pages=512)
    probe = LogitsProbe(runner)
    sequences = [prompt(length, seed) for seed, length in enumerate((200, 3, 41, 30, 9))]
    tables = shuffled_tables(5, 51, 512, seed=4)
    held = [len(tokens) - 1 for tokens in sequences[:4]]
    before = [
        (row, tokens[:n], 0, table) for row, (tokens, n, table) in enumerate(zip(sequences, held, tables, strict=False))
    ]
    runner.execute(make_plan(before, new_rows=[new_row(row) for row in range(4)]))
    # four sequences decode, in groups of different length, while a fifth begins between them
    parts = [(row, sequences[row][held[row] :], held[row], tables[row]) for row in range(4)]
    parts.insert(2, (4, sequences[4], 0, tables[4]))
    runner.execute(make_plan(parts, new_rows=[new_row(4)]))
    for logits, row in zip(probe.last, (0, 1, 4, 2, 3), strict=True):
        wanted = reference_logits(expected, sequences[row])[-1]
        assert (logits - wanted).abs().max() < TOLERANCE * wanted.abs().max(), row


@pytest.mark.parametrize("page_tokens", [1, 8, 64])
def test_the_page_size_does_not_matter(page_tokens: int, tmp_path: Path):
    expected = reference("llama")
    runner = make_runner(load_model(save(expected, tmp_path)), page_tokens=page_tokens, pages=80)
    probe, tokens = LogitsProbe(runner), prompt(70)
    table = shuffled_tables(1, -(-70 // page_tokens), 80)[0]
    for first, last in ((0, 33), (33, 69), (69, 70)):
        runner.execute(make_plan([(0, tokens[first:last], first, table)], new_rows=[new_row(0)] if not first else []))
    wanted = reference_logits(expected, tokens)[-1]
    assert (probe.last[0] - wanted).abs().max() < TOLERANCE * wanted.abs().max()


def test_a_step_writes_the_rows_of_its_tokens_and_empties_the_rest_of_a_page_that_it_begins(tmp_path: Path):
    runner = make_runner(load_model(save(reference("qwen2"), tmp_path)), page_tokens=8, pages=16)
    runner.pool.values.fill_(7.0)
    before = runner.pool.values.clone().view(16, *runner.layout.page_shape)
    runner.execute(make_plan([(0, prompt(11), 0, [5, 2])], new_rows=[new_row(0)]))
    after = runner.pool.values.view(16, *runner.layout.page_shape)
    changed = (before != after).flatten(1).any(1).nonzero().flatten().tolist()
    assert changed == [2, 5]
    assert (after[2, :, :, :, 3:] == 0).all()
    assert (after[2, :, :, :, :3] != before[2, :, :, :, :3]).all()


def test_bfloat16_stays_near_float32(tmp_path: Path):
    expected = reference("qwen3")
    runner = make_runner(load_model(save(expected, tmp_path), torch.bfloat16))
    probe, tokens = LogitsProbe(runner), prompt(40)
    table = shuffled_tables(1, 5, 64)[0]
    runner.execute(make_plan([(0, tokens[:30], 0, table)], new_rows=[new_row(0)]))
    runner.execute(make_plan([(0, tokens[30:], 30, table)]))
    wanted = reference_logits(expected, tokens)[-1]
    assert probe.last.dtype == torch.float32
    assert (probe.last[0] - wanted).abs().max() < 0.05 * wanted.abs().max()
