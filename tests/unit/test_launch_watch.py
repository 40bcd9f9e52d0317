"""Which addresses `serve` has the router give up: those of its own workers that joined, and nobody else's."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

import pytest

from slipstream.launch.watch import Watcher

FORMER = "http://127.0.0.1:7001"


class FakeRouter:
    """Answers as a router does, with the `workers` that a test sets; `taken_out` is whom it was told to take out."""

    def __init__(self) -> None:
        self.workers: list[dict[str, Any]] = []
        self.taken_out: list[str] = []
        router = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self, body: bytes) -> None:
                self.send_response(200)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self) -> None:
                self.answer(json.dumps({"workers": router.workers}).encode())

            def do_DELETE(self) -> None:
                router.taken_out.append(unquote(self.path.removeprefix("/workers/").partition("?")[0]))
                self.answer(b"{}")

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def router() -> Iterator[FakeRouter]:
    it = FakeRouter()
    yield it
    it.server.shutdown()
    it.server.server_close()


def watched(router: FakeRouter, workers: list[dict[str, Any]]) -> list[str]:
    """Whom two looks at these workers have taken out."""
    router.workers = workers
    looks, twice = [0], threading.Event()

    def on_news() -> None:
        looks[0] += 1
        if looks[0] == 2:
            twice.set()

    watcher = Watcher(router.url, "", on_news)
    watcher.former = frozenset({FORMER})
    assert twice.wait(60)
    watcher.close()
    watcher._thread.join(60)
    return router.taken_out


def entry(state: str, **rest: Any) -> dict[str, Any]:
    return {"url": FORMER, "state": state, "role": "decode", **rest}


@pytest.mark.parametrize("state", ["connecting", "refused"])
def test_the_former_address_of_a_worker_that_joined_is_taken_out(router: FakeRouter, state: str) -> None:
    assert set(watched(router, [entry(state, joins=True)])) == {FORMER}


@pytest.mark.parametrize("other", [entry("connecting"), entry("refused", joins=False), entry("live", joins=True)])
def test_who_was_named_since_or_is_there_stays(router: FakeRouter, other: dict[str, Any]) -> None:
    assert watched(router, [other]) == []


def test_no_other_address_is_taken_out(router: FakeRouter) -> None:
    assert watched(router, [entry("connecting", joins=True) | {"url": "http://127.0.0.1:7002"}]) == []
