"""`slipstream serve` and its parts as a user runs them: real processes, the real bundled model."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

SMALL = ("--kv-tokens", "4096", "--max-model-len", "1024")
LIMIT_S = 100.0
pytestmark = pytest.mark.timeout(240)


def alive(pid: int) -> bool:
    """Whether a process runs; one that ended and only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(condition: Callable[[], Any], what: str, limit_s: float = LIMIT_S) -> Any:
    deadline = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"in vain: {what}"
        time.sleep(0.05)
    return found


def left_overs() -> set[str]:
    """Names that a careless program would leave behind."""
    return set(os.listdir("/dev/shm")) | {n for n in os.listdir(tempfile.gettempdir()) if "slipstream" in n}


class Program:
    """A slipstream command in a process of its own; its output is collected as it comes."""

    def __init__(self, *arguments: str) -> None:
        self.output = ""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "slipstream", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line

    def says(self, pattern: str) -> re.Match[str]:
        def found() -> re.Match[str] | None:
            match = re.search(pattern, self.output)
            assert match or self.process.poll() is None, f"it ended:\n{self.output}"
            return match

        return until(found, f"{pattern!r} in:\n{self.output}")

    def ends(self, limit_s: float = 30.0) -> int:
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end:\n{self.output}") from None


class Server:
    """A front at `url`."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str) -> tuple[int, Any]:
        return self._send(urllib.request.Request(self.url + path))

    def post(self, path: str, body: dict[str, Any], timeout_s: float = 60.0) -> tuple[int, Any]:
        data = json.dumps(body).encode()
        return self._send(
            urllib.request.Request(self.url + path, data, {"content-type": "application/json"}), timeout_s
        )

    @staticmethod
    def _send(request: urllib.request.Request, timeout_s: float = 30.0) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read() or b"null")

    def complete(self, prompt: str = "The capital of France is", tokens: int = 8) -> str:
        body = {"model": "smollm2", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        status, answer = self.post("/v1/completions", body)
        assert status == 200, answer
        return answer["choices"][0]["text"]

    def ready(self) -> bool:
        try:
            return self.get("/health")[0] == 200
        except OSError:
            return False

    def pids(self) -> dict[str, int]:
        """The live workers by name."""
        try:
            return {w["name"]: w["pid"] for w in self.get("/workers")[1]["workers"] if w["state"] == "live"}
        except OSError:
            return {}


@contextlib.contextmanager
def serving(*arguments: str) -> Iterator[tuple[Program, Server, dict[str, int]]]:
    """A cluster that is ready, and the pids of all its processes."""
    program = Program("serve", "smollm2", "--port", "0", *SMALL, *arguments)
    try:
        url = program.says(r"is served at (http://\S+)")[1]
        program.says(r"Ctrl-C ends it")
        server = Server(url)
        router = int(program.says(r"(?m)^router +front +(\d+)")[1])
        yield program, server, {"router": router, **server.pids()}
    finally:
        if program.process.poll() is None:
            program.process.kill()
            program.process.wait()


def children_of(pid: int) -> set[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout
    return {int(word) for word in found.split()}


def test_serve_answers_and_ctrl_c_leaves_nothing():
    before = left_overs()
    with serving() as (program, server, pids):
        assert set(pids) == {"router", "prefill-0", "decode-0"}
        assert "Paris" in server.complete()
        assert re.search(r"prefill-0 -> decode-0 +shm +[\d.]+ GB/s +\d+ µs", program.output), program.output
        program.process.send_signal(signal.SIGINT)
        assert program.ends() == 0
        assert not any(alive(pid) for pid in pids.values())
        assert "did not end in time" not in program.output
        with pytest.raises(OSError, match="refused"):
            server.get("/health")
    assert left_overs() == before


def test_whoever_is_killed_comes_back_and_the_next_request_is_answered():
    with serving() as (program, server, pids):
        expected = server.complete()
        for name in ("prefill-0", "decode-0", "router"):
            os.kill(pids[name], signal.SIGKILL)
            assert server.complete() == expected  # a connection made now waits, a request is placed on who is left
            until(lambda: set(server.pids()) == {"prefill-0", "decode-0"} and server.ready(), f"{name} is back")
            assert server.complete() == expected
        assert set(server.pids().values()).isdisjoint({pids["prefill-0"], pids["decode-0"]})
        for worker in server.get("/workers")[1]["workers"]:
            with urllib.request.urlopen(worker["url"] + "/audit", timeout=10) as answer:
                assert json.loads(answer.read())["problems"] == []
        assert len(server.get("/workers")[1]["workers"]) == 2
        program.process.send_signal(signal.SIGTERM)
        assert program.ends() == 0


def test_nothing_outlives_a_supervisor_that_is_killed():
    before = left_overs()
    with serving() as (program, _, pids):
        assert children_of(program.process.pid) == set(pids.values())
        program.process.kill()
        program.process.wait()
        until(lambda: not any(alive(pid) for pid in pids.values()), "the children have ended", 20.0)
    assert left_overs() == before


def test_a_stream_under_way_is_finished_before_the_end():
    with serving("--drain-s", "60") as (program, server, _):
        body = {"model": "smollm2", "prompt": "Count:", "max_tokens": 60, "ignore_eos": True, "stream": True}
        request = urllib.request.Request(
            server.url + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            lines = [answer.readline()]
            program.process.send_signal(signal.SIGTERM)
            until(lambda: "ending: requests under way" in program.output, "the end has begun")
            lines += answer.readlines()
        events = [line for line in lines if line.startswith(b"data: ")]
        assert events[-1].strip() == b"data: [DONE]"
        assert b"error" not in b"".join(events)
        assert program.ends() == 0


def test_ctrl_c_while_the_model_loads_ends_at_once():
    program = Program("serve", "smollm2", "--port", "0", *SMALL)
    program.says("loading smollm2")
    pids = children_of(program.process.pid)
    program.process.send_signal(signal.SIGINT)
    assert program.ends(20.0) == 0
    assert not any(alive(pid) for pid in pids)


def test_a_worker_that_cannot_start_ends_serve_with_its_sentence():
    program = Program("serve", "smollm2", "--port", "0", "--both", "1", "--max-model-len", "2048", "--kv-tokens", "16")
    assert program.ends(60.0) in (1, 2)
    last = program.output.strip().splitlines()[-1]
    assert last.startswith("error: both-0: ")
    assert "Traceback" not in program.output


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


def test_pieces_started_one_by_one_find_each_other_in_any_order():
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    server = Server(url)
    programs = [Program("worker", "smollm2", "--role", "decode", "--name", "d", "--join", url, *SMALL)]
    try:
        programs.append(Program("router", "--port", str(port)))
        programs.append(Program("worker", "smollm2", "--role", "prefill", "--name", "p", "--join", url, *SMALL))
        until(lambda: set(server.pids()) == {"p", "d"} and server.ready(), "both workers have joined")
        expected = server.complete()
        assert "Paris" in expected
        router = programs[1]
        router.process.kill()
        router.process.wait()
        programs[1] = Program("router", "--port", str(port))
        until(lambda: set(server.pids()) == {"p", "d"} and server.ready(), "both have joined again")
        assert server.complete() == expected
        for program in programs:
            program.process.terminate()
        assert [program.ends() for program in programs] == [0, 0, 0]
    finally:
        for program in programs:
            if program.process.poll() is None:
                program.process.kill()
                program.process.wait()


def test_generate_prints_the_answer():
    command = [sys.executable, "-m", "slipstream", "generate", "smollm2", "--raw", "The capital of France is"]
    options = ["--temperature", "0", "--max-tokens", "8", *SMALL]
    result = subprocess.run([*command, *options], capture_output=True, text=True, timeout=LIMIT_S)
    assert result.returncode == 0, result.stderr
    assert "Paris" in result.stdout
