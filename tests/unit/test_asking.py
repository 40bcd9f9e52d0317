"""Commands that ask a server: whatever listens there, they end in time with a sentence."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from slipstream import asking
from slipstream.asking import Unreachable, get
from slipstream.cli import timeline as timeline_command
from slipstream.cli.main import cli
from slipstream.doctor import cluster
from slipstream.errors import ConfigError, SlipstreamError

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
Answer = Callable[[socket.socket, threading.Event], None]


@contextlib.contextmanager
def listening(answer: Answer) -> Iterator[str]:
    """A server that does to each connection what it is told; it ends with the block."""
    over = threading.Event()
    server = socket.create_server(("127.0.0.1", 0))
    threads: list[threading.Thread] = []

    def visit(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            answer(connection, over)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                threads.append(threading.Thread(target=visit, args=(connection,), daemon=True))
                threads[-1].start()

    acceptor = threading.Thread(target=accept, daemon=True)
    acceptor.start()
    try:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
    finally:
        over.set()
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        for thread in (acceptor, *threads):
            thread.join(10)


def reply(body: bytes, head: bytes = HEAD) -> bytes:
    return head + b"content-length: %d\r\n\r\n" % len(body) + body


def says(body: bytes, head: bytes = HEAD) -> Answer:
    def answer(connection: socket.socket, over: threading.Event) -> None:
        connection.recv(65536)
        connection.sendall(reply(body, head))

    return answer


def hang(connection: socket.socket, over: threading.Event) -> None:
    over.wait()


def drip_a_body(connection: socket.socket, over: threading.Event) -> None:
    connection.recv(65536)
    connection.sendall(HEAD + b"content-length: 100000\r\n\r\n")
    while not over.wait(0.02):
        connection.sendall(b" ")


def drip_a_head(connection: socket.socket, over: threading.Event) -> None:
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 200 OK\r\nx: ")
    while not over.wait(0.02):
        connection.sendall(b"y")


@pytest.mark.parametrize("answer", [hang, drip_a_body, drip_a_head])
def test_a_server_that_never_finishes_is_left_in_time(answer: Answer) -> None:
    with listening(answer) as url, pytest.raises(Unreachable, match=r"(no whole answer within|timed out)"):
        get(url, "/", timeout_s=0.3)


def test_what_was_left_ends_by_itself() -> None:
    with listening(drip_a_body) as url, pytest.raises(Unreachable):
        get(url, "/left", timeout_s=0.2)
    until = time.monotonic() + 60
    while any(thread.name == "GET /left" for thread in threading.enumerate()):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_an_answer_without_end_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "MOST_BYTES", 2 << 20)

    def flood(connection: socket.socket, over: threading.Event) -> None:
        connection.recv(65536)
        connection.sendall(HEAD + b"\r\n")
        while not over.is_set():
            connection.sendall(b" " * 65536)

    with listening(flood) as url, pytest.raises(Unreachable, match="more than 2 MiB"):
        get(url, "/", timeout_s=60)


def test_a_cut_answer_is_none() -> None:
    def cut(connection: socket.socket, over: threading.Event) -> None:
        connection.recv(65536)
        connection.sendall(HEAD + b"content-length: 100\r\n\r\nabc")

    with listening(cut) as url, pytest.raises(Unreachable):
        get(url, "/", timeout_s=60)


def test_garbage_does_not_reach_the_terminal() -> None:
    def garbage(connection: socket.socket, over: threading.Event) -> None:
        connection.recv(65536)
        connection.sendall(b"\x1b[2J\x00\xff\x07 no http\r\n" * 100)

    with listening(garbage) as url, pytest.raises(Unreachable) as caught:
        get(url, "/", timeout_s=60)
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 300


@pytest.mark.parametrize("key", ["a\nb", "a b", "schlüssel", "✓", "\x00"])
def test_a_key_that_no_header_can_hold_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="API key"):
        get("http://127.0.0.1:1", "/", key)


def test_a_whole_answer_is_whole() -> None:
    body = b"x" * 300_000
    with listening(says(body)) as url:
        assert get(url, "/", "key", timeout_s=60) == (200, body)


# ------------------------------------------------------------------------------------------------------ who asks

STRANGE = [b"null", b"[1, 2]", b"{}", b'{"data": 3, "now": 1.0}', b'{"data": [{}], "now": 1.0}', b"<html>", b'"x"',
           b'{"error": "boom"}', b'{"error": {"message": 3}}', b"[" * 100_000,
           b'{"data": [3], "now": 1.0}']  # fmt: skip


@pytest.mark.parametrize("body", STRANGE)
@pytest.mark.parametrize("status", [b"200 OK", b"404 Not Found"])
@pytest.mark.parametrize("arguments", [[], ["some-id"], ["--window", "9"]])
def test_timeline_says_of_a_stranger_that_it_is_one(body: bytes, status: bytes, arguments: list[str]) -> None:
    with listening(says(body, b"HTTP/1.1 " + status + b"\r\n")) as url:
        result = CliRunner().invoke(cli, ["timeline", "--url", url, *arguments])
    assert isinstance(result.exception, SlipstreamError), result.exception
    assert "no slipstream front" in result.exception.message


GAP = {"where": "decode-0", "reason": "the worker did not answer within 2 s"}
MISSING = "decode-0: its part of 2 of 3 requests is missing: the worker did not answer within 2 s"


def three_requests() -> list[dict[str, Any]]:
    """As a front lists them with their events; a worker's part of two of them is missing."""
    about: dict[str, Any] = dict.fromkeys(timeline_command.SUMMARY, None)
    about |= {"created": 1.0, "e2e_s": 1.0, "prompt_tokens": 3, "output_tokens": 2, "attempts": 1, "events": []}
    return [{**about, "id": f"cmpl-{n}", "missing": [GAP] if n else []} for n in range(3)]


@pytest.mark.parametrize("arguments", [["--json"], ["--perfetto", "trace.json"], []])
def test_all_timelines_come_with_one_question_and_who_did_not_answer_is_said(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)  # as wide as the text; a parallel test run says 80

    def answer(connection: socket.socket, over: threading.Event) -> None:
        asked.append(connection.recv(65536).split(b" ")[1].decode())
        connection.sendall(reply(json.dumps({"data": three_requests()}).encode()))

    with listening(answer) as url:
        result = CliRunner().invoke(cli, ["timeline", "--url", url, "--window", "7.5", *arguments])
    assert result.exit_code == 0, result.output
    assert asked == ["/v1/requests?limit=1000&events=true&window=7.5"]
    if arguments == ["--json"]:
        assert json.loads(result.stdout) == three_requests()
    assert MISSING in (result.stderr if arguments else result.stdout)


def test_the_last_requests_of_a_window_are_asked_for_together_and_a_named_one_alone() -> None:
    asked: list[str] = []

    def answer(connection: socket.socket, over: threading.Event) -> None:
        asked.append(connection.recv(65536).split(b" ")[1].decode())
        connection.sendall(reply(json.dumps({"data": three_requests()[:2]}).encode()))

    with listening(answer) as url:
        result = CliRunner().invoke(cli, ["timeline", "--url", url, "--window", "7.5", "--last", "2", "--json"])
    assert result.exit_code == 0, result.output
    assert asked == ["/v1/requests?limit=2&events=true&window=7.5"]
    for option in ("--last", "--window"):
        result = CliRunner().invoke(cli, ["timeline", "cmpl-1", option, "2"])
        assert result.exit_code == 2
        assert "give one or the other" in result.output


def test_what_is_piped_is_as_wide_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def longest(columns: str | None) -> int:
        monkeypatch.delenv("COLUMNS", raising=False)
        if columns is not None:
            monkeypatch.setenv("COLUMNS", columns)
        with listening(says(json.dumps({"data": three_requests()}).encode())) as url:
            result = CliRunner().invoke(cli, ["timeline", "--url", url])
        assert result.exit_code == 0, result.output
        return max(map(len, result.stdout.splitlines()))

    assert longest("40") <= 40 < longest(None)
    assert longest("") == longest(None)


@pytest.mark.parametrize("window", ["nan", "inf"])
def test_a_window_that_is_no_time_is_refused(window: str) -> None:
    result = CliRunner().invoke(cli, ["timeline", "--window", window])
    assert result.exit_code == 2
    assert "no number of seconds" in result.output


@pytest.mark.parametrize("body", [b'{"error": {"message": "boom"}}', b"{}", b"null"])
def test_doctor_does_not_call_a_stranger_healthy(body: bytes) -> None:
    found = cluster.look(lambda url, path: (200, body), "http://x:1")
    assert not found.reachable
    assert "no slipstream router" in found.problem or "not that of a slipstream router" in found.problem
