"""kill -9 of each process while clients are being served: every request ends, with its answer or with a clear error.

What the clients saw is printed (pytest -s), with the longest time any of them waited after the kill.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from tests.proc.load import TOKENS, body_of, check_texts, every_page_is_free, under_load
from tests.proc.programs import Server, serving
from tests.unit.tiny_models import tiny_model

CLIENTS = 16
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, dict[str, int]]]:
    model = tiny_model(tmp_path_factory.mktemp("model"), "llama", tokenizer=True, num_hidden_layers=6)
    options = ("--served-model-name", "tiny", "--max-sequences", "16", "--chunk-tokens", "64")
    with serving(*options, model=str(model)) as (_, server, pids):
        yield server, pids


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0", "router"])
def test_under_load_every_request_ends_when_a_process_is_killed(
    cluster: tuple[Server, dict[str, int]], victim: str
) -> None:
    server, first_pids = cluster
    old = first_pids["router"] if victim == "router" else server.pid(victim)
    seen = under_load(
        server, lambda: os.kill(old, signal.SIGKILL), lambda: back(server, old), f"{victim} is back", CLIENTS
    )
    assert seen.wrong == []
    assert seen.broken == [] or victim == "router"
    check_texts(server, seen)
    every_page_is_free(server)


def back(server: Server, old: int) -> bool:
    """Whether both workers are live and ready, none of them the killed process."""
    pids = server.pids()
    return set(pids) == {"prefill-0", "decode-0"} and old not in pids.values() and server.ready()


def test_answers_after_all_of_it(cluster: tuple[Server, dict[str, int]]) -> None:
    server, _ = cluster
    status, answer = server.post("/v1/completions", body_of(1))
    assert status == 200
    assert answer["usage"]["completion_tokens"] == TOKENS
