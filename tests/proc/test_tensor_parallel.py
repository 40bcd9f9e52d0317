"""Workers of several ranks, as real processes: they answer like a worker of one, alone and in pairs of unequal size."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.proc.programs import until
from tests.unit.tiny_models import tiny_model

from slipstream import LLM
from slipstream.errors import ConfigError, EngineFailure
from slipstream.launch.offline import Completion
from slipstream.types import SamplingParams

MAX_TOKENS = 8
SETTINGS: dict[str, Any] = {"dtype": "float32", "kv_tokens": 2048, "threads": 1, "page_tokens": 8, "chunk_tokens": 48}
TOLERANCE = 1e-4


def prompts() -> tuple[list[list[int]], list[SamplingParams]]:
    """Lengths around pages and chunks; the fourth continues the third; greedy with logprobs, and seeded."""
    rng = random.Random(11)
    batch = [[rng.randrange(3, 250) for _ in range(length)] for length in (1, 7, 50, 33, 97, 8)]
    batch[3] = batch[2] + batch[3]
    params = [
        SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=1)
        if i % 2 == 0
        else SamplingParams(temperature=1.0, top_p=0.9, seed=70 + i, max_tokens=MAX_TOKENS, ignore_eos=True)
        for i in range(len(batch))
    ]
    return batch, params


def answers(folder: Path, **asked: Any) -> tuple[list[Completion], list[Completion], dict[str, Any]]:
    """Of an LLM like this: the answers, those of a second round with prefix hits, its audits."""
    batch, params = prompts()
    with LLM(str(folder), **{**SETTINGS, **asked}) as llm:
        first = llm.generate(batch, params, progress=False)
        second = llm.generate(batch, params, progress=False)
        return first, second, until(lambda: settled(llm), "all pages are free or cached")


def settled(llm: LLM) -> dict[str, Any] | None:
    """The audits, once the workers have ended what they had begun: the last token is told before its step has ended."""
    audits = llm.audit()
    held = [
        name for name, audit in audits.items() if audit.get("total", 0) != audit.get("free", 0) + audit.get("cached", 0)
    ]
    return None if held else audits


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    kinds: dict[str, dict[str, Any]] = {"llama": {}, "mistral": {"sliding_window": None}, "qwen2": {}, "qwen3": {}}
    return {
        kind: tiny_model(tmp_path_factory.mktemp(kind), kind, tokenizer=True, **changes)
        for kind, changes in kinds.items()
    }


@pytest.fixture(scope="module")
def alone(folders: dict[str, Path]) -> dict[str, list[Completion]]:
    """What one rank answers."""
    return {kind: answers(folder, both=1)[0] for kind, folder in folders.items()}


def same(found: Sequence[Completion], wanted: Sequence[Completion]) -> None:
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in wanted]
    for one, other in zip(found, wanted, strict=True):
        for mine, theirs in zip(one.logprobs or [], other.logprobs or [], strict=True):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=TOLERANCE)


@pytest.mark.parametrize(("kind", "ranks"), [("llama", 4), ("mistral", 2), ("qwen3", 2)])
def test_ranks_together_answer_like_one(
    folders: dict[str, Path], alone: dict[str, list[Completion]], kind: str, ranks: int
) -> None:
    first, second, audits = answers(folders[kind], both=f"tp{ranks}@cpu")
    same(first, alone[kind])
    same(second, alone[kind])
    assert any(answer.cached_tokens for answer in second)
    assert audits["both-0"]["problems"] == []


@pytest.mark.parametrize(
    ("prefill", "decode", "transport"),
    [("tp2@cpu", "cpu", "auto"), ("cpu", "tp2@cpu", "tcp"), ("tp2@cpu", "tp4@cpu", "shm")],
)
def test_a_handoff_between_workers_of_unequal_size_changes_nothing(
    folders: dict[str, Path], alone: dict[str, list[Completion]], prefill: str, decode: str, transport: str
) -> None:
    first, second, audits = answers(folders["qwen2"], prefill=prefill, decode=decode, transport=transport)
    same(first, alone["qwen2"])
    same(second, alone["qwen2"])
    assert any(answer.cached_tokens for answer in second)
    for name in ("prefill-0", "decode-0"):
        audit = audits[name]
        assert audit["problems"] == []
        assert audit["free"] + audit["cached"] == audit["total"]
    assert audits["router"]["problems"] == []


def test_a_number_of_ranks_that_does_not_divide_the_model_is_refused_before_it_is_loaded(
    folders: dict[str, Path],
) -> None:
    with pytest.raises(ConfigError, match=r"4 heads, 2 KV heads .* among 3 ranks; --tp may be 1, 2, 4 for it"):
        LLM(str(folders["llama"]), both="tp3@cpu", **SETTINGS)


def test_ranks_that_still_load_when_their_worker_is_refused_end_without_a_warning(
    folders: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match="needs an NVIDIA GPU"):
        LLM(str(folders["llama"]), both="tp2@cpu", **{**SETTINGS, "attention_backend": "triton"})
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_transport_that_does_not_reach_every_rank_is_refused_with_the_reason(folders: dict[str, Path]) -> None:
    with pytest.raises(EngineFailure, match="the peer is another process"):
        LLM(str(folders["llama"]), prefill="tp2@cpu", decode="cpu", transport="local", **SETTINGS)
