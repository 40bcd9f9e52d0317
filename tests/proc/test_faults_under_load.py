"""kill -9 of each process while clients are being served: every request ends, with its answer or with a clear error.

What the clients saw is printed (pytest -s), with the longest time any of them waited after the kill.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.proc.programs import LIMIT_S, NO_ANSWER, Server, serving, until
from tests.unit.tiny_models import tiny_model

CLIENTS = 16
TOKENS = 60
pytestmark = pytest.mark.timeout(240)


@dataclass
class Seen:
    """How requests ended. `broken` are streams or connections that the death of the front itself cut."""

    whole: dict[int, list[str]] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    slowest_s: float = 0.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, dict[str, int]]]:
    model = tiny_model(tmp_path_factory.mktemp("model"), "llama", tokenizer=True, num_hidden_layers=6)
    options = ("--served-model-name", "tiny", "--max-sequences", "16", "--chunk-tokens", "64")
    with serving(*options, model=str(model)) as (_, server, pids):
        yield server, pids


def body_of(index: int) -> dict[str, Any]:
    rng = random.Random(index)
    prompt = "".join(rng.choice("abcdefgh ") for _ in range(rng.randrange(20, 300)))
    return {"model": "tiny", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}


def stream(server: Server, index: int, seen: Seen) -> None:
    """One request; sorts its end into `seen`."""
    began = time.monotonic()
    data = json.dumps({**body_of(index), "stream": True}).encode()
    request = urllib.request.Request(server.url + "/v1/completions", data, {"content-type": "application/json"})
    text, finish, error, done = "", None, None, False
    try:
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            for line in answer:
                if line.startswith(b"data: {") and line.endswith(b"\n"):
                    chunk = json.loads(line[6:])
                    error = chunk.get("error", error)
                    for choice in chunk.get("choices", ()):
                        text += choice["text"]
                        finish = choice["finish_reason"] or finish
                done = done or line.startswith(b"data: [DONE]")
    except urllib.error.HTTPError as refusal:
        try:
            error = json.loads(refusal.read())["error"]
        except (*NO_ANSWER, ValueError) as cut:
            error = {"cut": str(cut)}
    except NO_ANSWER as cut:
        error = error or {"cut": str(cut)}
    seen.slowest_s = max(seen.slowest_s, time.monotonic() - began)
    if finish == "length" and done and error is None:
        seen.whole.setdefault(index, []).append(text)
    elif error is not None and "message" in error and not done:
        seen.refused.append(f"{error['code']}: {error['message']}")
    elif (error is not None and "cut" in error) or (not done and finish is None):
        seen.broken.append(str(error))
    else:
        seen.wrong.append(f"{index}: finish {finish}, done {done}, error {error}, text {text!r}")


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0", "router"])
def test_under_load_every_request_ends_when_a_process_is_killed(
    cluster: tuple[Server, dict[str, int]], victim: str
) -> None:
    server, first_pids = cluster
    seen, ended = Seen(), threading.Event()

    def client(number: int) -> None:
        rounds = 0
        while not ended.is_set():
            stream(server, (number + rounds) % (2 * CLIENTS), seen)
            rounds += 1

    threads = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    until(lambda: len(seen.whole) > 3, "requests are being answered")
    old = first_pids["router"] if victim == "router" else server.pid(victim)
    os.kill(old, signal.SIGKILL)
    until(lambda: back(server, old), f"{victim} is back")
    ended.set()
    for thread in threads:
        thread.join(LIMIT_S)
    assert not any(thread.is_alive() for thread in threads), "a request hangs"
    print(
        f"{victim}: {sum(map(len, seen.whole.values()))} whole, {len(seen.refused)} refused, {len(seen.broken)} cut, "
        f"slowest {seen.slowest_s:.2f} s; {sorted(set(seen.refused))}"
    )
    assert seen.wrong == []
    assert seen.broken == [] or victim == "router"
    check_texts(server, seen)
    for worker in server.get("/workers")[1]["workers"]:
        until(lambda url=worker["url"]: settled(Server(url).get("/audit")[1]), "all pages free or cached")


def back(server: Server, old: int) -> bool:
    """Whether both workers are live and ready, none of them the killed process."""
    pids = server.pids()
    return set(pids) == {"prefill-0", "decode-0"} and old not in pids.values() and server.ready()


def check_texts(server: Server, seen: Seen) -> None:
    """Every whole answer to one prompt is the same, and the one that the healed cluster gives."""
    for index, texts in seen.whole.items():
        status, answer = server.post("/v1/completions", body_of(index))
        assert status == 200
        assert set(texts) == {answer["choices"][0]["text"]}


def settled(audit: dict[str, Any]) -> bool:
    assert audit["problems"] == []
    return audit["free"] + audit["cached"] == audit["total"]


def test_answers_after_all_of_it(cluster: tuple[Server, dict[str, int]]) -> None:
    server, _ = cluster
    status, answer = server.post("/v1/completions", body_of(1))
    assert status == 200
    assert answer["usage"]["completion_tokens"] == TOKENS
