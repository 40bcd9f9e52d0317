"""Prefill and decode in different processes, on two GPUs where there are two: answers of the one that does both."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest
import torch

HAVE_GPU = torch.cuda.is_available() and importlib.util.find_spec("cuda") is not None
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not HAVE_GPU, reason="needs an NVIDIA GPU and the extra gpu"),
]

from tests.proc.programs import Server, serving  # noqa: E402
from tests.unit.tiny_models import tiny_model  # noqa: E402

LAST = f"cuda:{torch.cuda.device_count() - 1}"
SIZES: dict[str, Any] = {"head_dim": 64, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
LENGTHS = (1, 15, 16, 17, 64, 127, 128, 129, 300, 511, 700, 900)
FLAGS = ("--dtype", "bfloat16", "--chunk-tokens", "256", "--page-tokens", "16")


def requests() -> list[dict[str, Any]]:
    """Every second one is drawn with a seed; the last ones begin as earlier ones do."""
    rng = random.Random(7)
    prompts = [[rng.randrange(3, 250) for _ in range(length)] for length in LENGTHS]
    prompts += [prompts[8][:200] + prompts[4], prompts[11] + prompts[3]]
    drawn = {"temperature": 1.0, "top_p": 0.9}
    return [
        {"prompt": prompt, "max_tokens": 24, "ignore_eos": True, "return_token_ids": True, "temperature": 0}
        | ({**drawn, "seed": number} if number % 2 else {})
        for number, prompt in enumerate(prompts)
    ]


def answers(server: Server) -> list[list[int]]:
    """One by one, so that the same steps are computed everywhere."""
    name = server.get("/v1/models")[1]["data"][0]["id"]
    found = []
    for request in requests():
        status, answer = server.post("/v1/completions", {"model": name, **request})
        assert status == 200, answer
        found.append(answer["choices"][0]["token_ids"])
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "qwen2", tokenizer=True, **SIZES)


@pytest.fixture(scope="module")
def together(folder: Path) -> list[list[int]]:
    with serving(*FLAGS, "--both", "cuda:0", model=str(folder)) as (_, server, _):
        return answers(server)


@pytest.mark.parametrize("transport", ["cuda_ipc", "shm", "tcp"])
def test_apart_answers_like_one_worker(folder: Path, together: list[list[int]], transport: str) -> None:
    devices = ("--prefill", "cuda:0", "--decode", LAST, "--transport", transport)
    with serving(*FLAGS, *devices, model=str(folder)) as (_, server, _):
        assert answers(server) == together
        workers = server.get("/workers")[1]["workers"]
        routes = [route for worker in workers for route in worker["routes"] if worker["role"] == "prefill"]
        assert {route["transport"] for route in routes} == {transport}
