"""Many clients at once, through the official client library: whoever stays gets a whole answer, and no page is lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from tests.proc.programs import Server, serving, until
from tests.unit.tiny_models import tiny_model

CLIENTS = 64
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = tiny_model(tmp_path_factory.mktemp("model"), "llama", tokenizer=True)
    small = ("--kv-tokens", "6144", "--max-sequences", "24", "--chunk-tokens", "128", "--page-tokens", "8")
    with serving("--served-model-name", "tiny", *small, model=str(model)) as (_, server, _):
        yield server


def prompt_of(index: int) -> str:
    rng = random.Random(index % 16)  # four clients share each prompt
    return "".join(rng.choice("abcdefgh ") for _ in range(rng.randrange(5, 600)))


async def one_client(client: openai.AsyncOpenAI, index: int) -> tuple[str, str | None]:
    """(text, finish reason); None for a client that goes away in the middle."""
    body: dict[str, Any] = {
        "model": "tiny",
        "prompt": prompt_of(index),
        "max_tokens": 40,
        "temperature": 0.0 if index % 2 else 1.0,
        "seed": index % 16,
        "extra_body": {"ignore_eos": True},
    }
    if index % 8 == 5:  # gives up without having seen anything
        with pytest.raises((openai.APITimeoutError, openai.APIConnectionError)):
            await client.with_options(timeout=0.15, max_retries=0).completions.create(**{**body, "max_tokens": 500})
        return "", None
    if index % 2 == 0:
        answer = await client.completions.create(**body)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 40
        return answer.choices[0].text, answer.choices[0].finish_reason
    text, finish = "", None
    stream = await client.completions.create(**body, stream=True)
    async for chunk in stream:
        text += chunk.choices[0].text
        finish = chunk.choices[0].finish_reason or finish
        if index % 8 == 3 and len(text) > 5:  # goes away in the middle of its stream
            await stream.close()
            return text, None
    return text, finish


async def test_64_clients_with_some_that_leave_get_whole_answers_and_no_page_is_lost(server: Server) -> None:
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120, max_retries=0)
    async with client:
        answers = await asyncio.gather(*(one_client(client, index) for index in range(CLIENTS)))
        again = await asyncio.gather(*(one_client(client, index) for index in (0, 1, 16, 17)))
    stayed = {index: answer for index, answer in enumerate(answers) if index % 8 not in (3, 5)}
    assert all(finish == "length" for _, finish in stayed.values())
    for index in (0, 1, 16, 17):  # the same request gives the same text, alone or in the crowd
        assert stayed[index][0] == again[(0, 1, 16, 17).index(index)][0]
    for problems, settled in await asyncio.to_thread(books_when_quiet, server):
        assert problems == []
        assert settled


def books_when_quiet(server: Server) -> list[tuple[list[str], bool]]:
    """What every worker's audit says once nothing is under way: problems, and whether all pages are free or cached."""

    def audits() -> list[dict[str, Any]] | None:
        found = [Server(worker["url"]).get("/audit")[1] for worker in server.get("/workers")[1]["workers"]]
        return found if all(audit["free"] + audit["cached"] == audit["total"] for audit in found) else None

    found = until(audits, "all pages free or cached")
    assert server.get("/audit")[1]["problems"] == []
    return [(audit["problems"], audit["free"] + audit["cached"] == audit["total"]) for audit in found]


def test_the_model_folder_is_served_under_its_name(server: Server) -> None:
    status, models = server.get("/v1/models")
    assert status == 200
    assert [model["id"] for model in models["data"]] == ["tiny"]
