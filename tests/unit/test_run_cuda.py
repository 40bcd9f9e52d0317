"""The same torch code on a GPU: logits of a float32 CPU run, sampling, and a pool of device memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.unit.tiny_models import (
    LogitsProbe,
    load_model,
    make_plan,
    make_runner,
    new_row,
    shuffled_tables,
    tiny_model,
)

from slipstream.config import Dtype, EngineConfig
from slipstream.run.engine_model import open_model
from slipstream.types import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.08)])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_gpu_gives_the_logits_of_a_cpu(architecture: str, dtype: Dtype, tolerance: float, tmp_path: Path):
    folder = tiny_model(tmp_path, architecture)
    opened = open_model(EngineConfig(model=str(folder), device="cuda:0", dtype=dtype, page_tokens=8, kv_tokens=1024))
    memory = torch.zeros(129 * opened.layout.page_bytes, dtype=torch.uint8, device="cuda:0")
    runners = [make_runner(load_model(folder), pages=129), opened.runner(memory, 8)]
    probes = [LogitsProbe(runner) for runner in runners]
    rng, tables = np.random.default_rng(0), shuffled_tables(4, 12, 129)
    prompts = [rng.integers(3, 250, length).tolist() for length in (70, 5, 33, 20)]
    held = [len(tokens) - 1 for tokens in prompts[:3]]
    steps = [
        make_plan(
            [(row, prompts[row][:n], 0, tables[row]) for row, n in enumerate(held)],
            new_rows=[new_row(row) for row in range(3)],
        ),
        make_plan(
            [(row, prompts[row][n:], n, tables[row]) for row, n in enumerate(held)] + [(3, prompts[3], 0, tables[3])],
            new_rows=[new_row(3)],
        ),
    ]
    for plan in steps:
        for runner in runners:
            runner.execute(plan)
        wanted, found = probes[0].last, probes[1].last.cpu()
        assert (found - wanted).abs().max() < tolerance * wanted.abs().max()


def test_sampling_on_a_gpu_draws_the_tokens_of_a_cpu(tmp_path: Path):
    folder = tiny_model(tmp_path)
    opened = open_model(EngineConfig(model=str(folder), device="cuda", dtype="float32", page_tokens=8))
    memory = torch.zeros(65 * opened.layout.page_bytes, dtype=torch.uint8, device="cuda:0")
    settings = [
        SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=1),
        SamplingParams(seed=5, top_p=0.9, top_k=40, min_p=0.01),
        SamplingParams(seed=6, repetition_penalty=1.2, frequency_penalty=0.1, presence_penalty=0.1, min_tokens=3),
        SamplingParams(seed=7, temperature=0.6, logit_bias={9: 3.0}, logprobs=0),
    ]
    answers = []
    for runner in (make_runner(load_model(folder), pages=65), opened.runner(memory, 8)):
        tables, rng = shuffled_tables(4, 8, 65), np.random.default_rng(1)
        parts = [(row, rng.integers(3, 250, 20).tolist(), 0, tables[row]) for row in range(4)]
        rows = [new_row(row, params, prompt_ids=parts[row][1]) for row, params in enumerate(settings)]
        found, targets = [], {0: np.array([*parts[0][1][1:], -1])}
        for _ in range(10):
            outcome = runner.execute(make_plan(parts, new_rows=rows, prompt_logprobs=targets))
            found.append(outcome.token_ids.tolist())
            rows, targets = [], {}
            parts = [
                (row, [int(token)], first + len(fed), table)
                for (row, fed, first, table), token in zip(parts, outcome.token_ids, strict=True)
            ]
        answers.append(found)
    assert answers[0] == answers[1]


def test_the_pool_of_a_gpu_worker_is_device_memory(tmp_path: Path):
    pytest.importorskip("cuda.bindings")
    opened = open_model(EngineConfig(model=str(tiny_model(tmp_path)), device="cuda", kv_tokens=512))
    assert opened.placement.dtype == torch.bfloat16
    pool = opened.allocate_pool(probe_bytes=4096)
    runner = opened.runner(pool.region, 2)
    assert runner.execute(make_plan([(0, [5, 6, 7], 0, [3])], new_rows=[new_row(0)])).token_ids[0] >= 0
    assert runner.pool.layer(0)[3].any()
    assert not runner.pool.layer(0)[:3].any()
    del runner
    pool.close()
