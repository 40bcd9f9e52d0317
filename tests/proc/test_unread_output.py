"""Nobody reads what the processes say: they serve all the same, are started again, and end when they are told to."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.proc.programs import NO_ANSWER, SMALL, Server, until
from tests.unit.tiny_models import tiny_model
from tests.unread import nobody_reads

pytestmark = pytest.mark.timeout(200)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tiny_model(tmp_path_factory.mktemp("model"), "llama", tokenizer=True)
    return str(path)


@pytest.fixture
def unread() -> Iterator[int]:
    with nobody_reads() as full:
        yield full


def a_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def started(output: int, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "slipstream", *arguments, "--log-level", "debug"]
    return subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)


def ended(process: subprocess.Popen[bytes], number: signal.Signals) -> int:
    process.send_signal(number)
    return process.wait(60)


def answers(server: Server, status: int) -> bool:
    try:
        return server.get("/health")[0] == status
    except NO_ANSWER:
        return False


@pytest.mark.parametrize("command", ["router", "worker"])
def test_a_process_whose_output_nobody_reads_answers_and_ends(command: str, model: str, unread: int) -> None:
    port = a_port()
    arguments = {"router": (), "worker": (model, *SMALL, "--device", "cpu", "--role", "both")}[command]
    status = 200 if command == "worker" else 503  # a router without workers
    process = started(unread, command, *arguments, "--port", str(port))
    try:
        until(lambda: answers(Server(f"http://127.0.0.1:{port}"), status), "it answers")
        assert process.poll() is None
        assert ended(process, signal.SIGTERM) == 0
    finally:
        process.kill()


def test_serve_whose_output_nobody_reads_serves_starts_workers_again_and_ends(model: str, unread: int) -> None:
    port = a_port()
    process = started(unread, "serve", model, *SMALL, "--port", str(port), "--served-model-name", "smollm2")
    server = Server(f"http://127.0.0.1:{port}")
    try:
        until(server.ready, "it serves")
        before = server.complete("a b c")
        old = server.pid("decode-0")
        os.kill(old, signal.SIGKILL)
        until(lambda: server.pids().get("decode-0", old) != old and server.ready(), "decode-0 is back")
        assert server.complete("a b c") == before
        assert ended(process, signal.SIGINT) == 0
    finally:
        process.kill()
