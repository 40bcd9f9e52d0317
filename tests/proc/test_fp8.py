"""Prefill and decode apart over a pool of one byte a number give the tokens of one worker with such a pool."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.unit.tiny_models import tiny_model

from slipstream import LLM
from slipstream.types import SamplingParams

PROMPTS = 12


def answers(model: Path, **settings: object) -> list[list[int]]:
    rng = random.Random(3)
    batch = [[rng.randrange(3, 250) for _ in range(length)] for length in rng.choices(range(1, 150), k=PROMPTS)]
    params = [SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True) for _ in batch]
    with LLM(str(model), dtype="float32", kv_dtype="fp8", kv_tokens=8192, **settings) as llm:  # type: ignore[arg-type]
        return [answer.token_ids for answer in llm.generate(batch, params, progress=False)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "qwen2", tokenizer=True)


def test_disaggregated_output_equals_colocated_with_fp8_kv(model: Path):
    colocated = answers(model, both=1)
    assert answers(model, prefill=1, decode=1, transport="shm", page_tokens=8, chunk_tokens=64) == colocated
    assert answers(model, prefill=1, decode=1, transport="tcp", page_tokens=16, chunk_tokens=512) == colocated
