"""Two ranks on two GPUs, over NCCL: sums, answers like those of one rank, a handoff to a worker of one rank."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]

from tests.proc.programs import alive, serving, until  # noqa: E402
from tests.proc.test_rank_faults import complete, followers, in_background  # noqa: E402
from tests.unit.tiny_models import tiny_model  # noqa: E402

from slipstream import LLM  # noqa: E402
from slipstream.types import SamplingParams  # noqa: E402

SIZES: dict[str, Any] = {"head_dim": 32, "hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 2}
SETTINGS: dict[str, Any] = {"dtype": "float32", "kv_tokens": 4096, "max_sequences": 8, "chunk_tokens": 64}


def batch() -> tuple[list[list[int]], list[SamplingParams]]:
    rng = random.Random(5)
    prompts = [[rng.randrange(3, 250) for _ in range(length)] for length in (1, 9, 50, 130, 17, 64)]
    params = [
        SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
        if i % 2 == 0
        else SamplingParams(temperature=1.0, top_p=0.9, seed=i, max_tokens=24, ignore_eos=True)
        for i in range(len(prompts))
    ]
    return prompts, params


def answers(folder: Path, **asked: Any) -> tuple[list[list[int]], dict[str, Any], Any]:
    with LLM(str(folder), **SETTINGS, **asked) as llm:
        first = [answer.token_ids for answer in llm.generate(*batch(), progress=False)]
        second = [answer.token_ids for answer in llm.generate(*batch(), progress=False)]
        assert first == second
        return first, llm.audit(), llm.routes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "qwen2", tokenizer=True, **SIZES)


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[list[int]]:
    return answers(folder, both="cuda:0")[0]


def test_two_ranks_answer_like_one(folder: Path, alone: list[list[int]]) -> None:
    found, audits, _ = answers(folder, both="tp2@cuda:0,1")
    assert found == alone
    assert audits["both-0"]["problems"] == []


@pytest.mark.parametrize(("prefill", "decode"), [("tp2@cuda:0,1", "cuda:1"), ("cuda:1", "tp2@cuda:0,1")])
def test_a_handoff_between_workers_of_unequal_size_changes_nothing(
    folder: Path, alone: list[list[int]], prefill: str, decode: str
) -> None:
    found, audits, routes = answers(folder, prefill=prefill, decode=decode)
    assert found == alone
    assert audits["prefill-0"]["problems"] == audits["decode-0"]["problems"] == []
    print(routes)


@pytest.mark.timeout(300)
def test_a_killed_rank_is_a_pause_for_requests(folder: Path) -> None:
    """The other rank waits in a sum over NCCL then, and must end with its worker."""
    arguments = ("--prefill", "tp2@cuda:0,1", "--decode", "cuda:1", "--dtype", "float32")
    with serving(*arguments, model=str(folder)) as (program, server, pids):
        name = server.get("/v1/models")[1]["data"][0]["id"]
        wanted = complete(server, name)
        (follower,) = followers(pids["prefill-0"])
        answered = [in_background(lambda: complete(server, name)) for _ in range(3)]
        os.kill(follower, signal.SIGKILL)
        assert [answer() for answer in answered] == [wanted] * 3
        until(lambda: not alive(pids["prefill-0"]), "the worker ends with its rank", 30.0)
        until(lambda: server.pids().get("prefill-0", pids["prefill-0"]) != pids["prefill-0"], "it is started again")
        assert complete(server, name) == wanted
        program.process.send_signal(signal.SIGTERM)
        assert program.ends() == 0
