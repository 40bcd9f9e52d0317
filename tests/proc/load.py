"""Clients that ask all the time while a process is harmed, and what each of their requests came to."""

from __future__ import annotations

import json
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.proc.programs import LIMIT_S, NO_ANSWER, Server, until

TOKENS = 60


@dataclass
class Seen:
    """How requests ended. `broken` are streams or connections that the death of the front itself cut."""

    whole: dict[int, list[str]] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    slowest_s: float = 0.0


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


def under_load(
    server: Server, harm: Callable[[], None], healed: Callable[[], bool], what: str, clients: int = 8
) -> Seen:
    """Clients ask all the time; `harm` is done when they are being served, and they go on until it is `healed`.

    Says what they saw, with the longest time any of them waited.
    """
    seen, ended = Seen(), threading.Event()

    def client(number: int) -> None:
        rounds = 0
        while not ended.is_set():
            stream(server, (number + rounds) % (2 * clients), seen)
            rounds += 1

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    try:
        until(lambda: sum(map(len, seen.whole.values())) > 2 * clients, "requests are being answered")
        harm()
        until(healed, what)
    finally:
        ended.set()
        for thread in threads:
            thread.join(LIMIT_S)
    assert not any(thread.is_alive() for thread in threads), "a request hangs"
    whole = sum(map(len, seen.whole.values()))
    print(
        f"{what}: {whole} whole, {len(seen.refused)} refused, {len(seen.broken)} cut, slowest {seen.slowest_s:.2f} s; "
        f"{sorted(set(seen.refused))}"
    )
    return seen


def every_page_is_free(server: Server) -> None:
    for worker in server.get("/workers")[1]["workers"]:
        until(lambda url=worker["url"]: settled(Server(url).get("/audit")[1]), "all pages free or cached")


def check_texts(server: Server, seen: Seen) -> None:
    """Every whole answer to one prompt is the same, and the one that the healed cluster gives."""
    for index, texts in seen.whole.items():
        status, answer = server.post("/v1/completions", body_of(index))
        assert status == 200
        assert set(texts) == {answer["choices"][0]["text"]}


def settled(audit: dict[str, Any]) -> bool:
    assert audit["problems"] == []
    return audit["free"] + audit["cached"] == audit["total"]
