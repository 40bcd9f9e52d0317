"""Prefill and decode apart give the very tokens of one worker that does both.

One colocated worker answers 50 prompts of 1 to 2,000 tokens, greedy and seeded, many with shared prefixes; then pairs
of workers, over each transport, with small and large pages and chunks, have to answer the same.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.tiny_models import tiny_model

from slipstream import LLM
from slipstream.types import SamplingParams

PROMPTS = 50
MAX_TOKENS = 24
VARIANTS = [
    ("local", 16, 128),
    ("shm", 8, 16),
    ("shm", 16, 64),
    ("shm", 64, 512),
    ("tcp", 8, 512),
    ("tcp", 64, 16),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "qwen2", tokenizer=True)


def prompts() -> tuple[list[list[int]], list[SamplingParams]]:
    """Fixed prompts: the lengths that touch page and chunk borders, and random ones; a third continues another."""
    rng = random.Random(7)
    lengths = [1, 2, 7, 8, 9, 15, 16, 17, 63, 64, 65, 127, 128, 129, 511, 512, 513, 2000]
    lengths += [rng.randrange(1, 400) for _ in range(PROMPTS - len(lengths))]
    batch: list[list[int]] = []
    for i, length in enumerate(lengths):
        tokens = [rng.randrange(3, 250) for _ in range(length)]
        if i % 3 == 2:
            earlier = rng.choice(batch)
            tokens = (earlier + tokens)[:2000]
        batch.append(tokens)
    params = [
        SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
        if i % 2 == 0
        else SamplingParams(temperature=1.0, top_p=0.95, top_k=100, seed=1000 + i, max_tokens=MAX_TOKENS)
        for i in range(PROMPTS)
    ]
    return batch, params


@pytest.fixture(scope="module")
def colocated(model: Path) -> Iterator[list[list[int]]]:
    batch, params = prompts()
    with LLM(str(model), both=1, dtype="float32", kv_tokens=16384, threads=1) as llm:
        yield [answer.token_ids for answer in llm.generate(batch, params, progress=False)]


@pytest.mark.parametrize(("transport", "page_tokens", "chunk_tokens"), VARIANTS)
def test_disaggregated_output_equals_colocated(
    model: Path, colocated: list[list[int]], transport: str, page_tokens: int, chunk_tokens: int
) -> None:
    batch, params = prompts()
    with LLM(
        str(model),
        prefill=1,
        decode=1,
        dtype="float32",
        kv_tokens=16384,
        transport=transport,
        page_tokens=page_tokens,
        chunk_tokens=chunk_tokens,
    ) as llm:
        answers = llm.generate(batch, params, progress=False)
        again = llm.generate(batch[:20], params[:20], progress=False)  # now with prefix hits at both workers
        audits = llm.audit()
    assert [answer.token_ids for answer in answers] == colocated
    assert [answer.token_ids for answer in again] == colocated[:20]
    assert any(answer.cached_tokens > 0 for answer in again)
    assert audits["router"]["problems"] == []


def test_outputs_of_the_model_depend_on_the_whole_prompt(model: Path) -> None:
    """Without this the comparison above would prove little: one token changed far back changes the answer."""
    batch, _ = prompts()
    long = next(tokens for tokens in batch if len(tokens) > 500)
    changed = [*long[:100], 3 + (long[100] + 1) % 200, *long[101:]]
    greedy = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=0)
    with LLM(str(model), both=1, dtype="float32", kv_tokens=16384, threads=1) as llm:
        first, second = llm.generate([long, changed], greedy, progress=False)
    assert first.logprobs is not None
    assert second.logprobs is not None
    gap = max(abs(a.logprob - b.logprob) for a, b in zip(first.logprobs, second.logprobs, strict=True))
    assert first.token_ids != second.token_ids or gap > 1e-3
