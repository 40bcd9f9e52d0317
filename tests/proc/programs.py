"""slipstream's commands as processes of a test, and its HTTP surface as a client of a few lines."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SMALL = ("--kv-tokens", "4096", "--max-model-len", "1024")
LIMIT_S = 100.0
NO_ANSWER = (OSError, http.client.HTTPException)  # of a server that is gone, or goes in the middle of one


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


def unused_shared_memory() -> set[str]:
    """Names in /dev/shm that no process has open or mapped: what a program leaves behind, and not what others use."""
    names, used = set(os.listdir("/dev/shm")), set[str]()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            used.update(Path(os.readlink(fd)).name for fd in (process / "fd").iterdir())
        with contextlib.suppress(OSError):
            used.update(line.rpartition("/")[2] for line in (process / "maps").read_text().splitlines())
    return names - used


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

    def ends(self, limit_s: float = LIMIT_S) -> int:
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

    def post(self, path: str, body: dict[str, Any], timeout_s: float = LIMIT_S) -> tuple[int, Any]:
        data = json.dumps(body).encode()
        return self._send(
            urllib.request.Request(self.url + path, data, {"content-type": "application/json"}), timeout_s
        )

    @staticmethod
    def _send(request: urllib.request.Request, timeout_s: float = 60.0) -> tuple[int, Any]:
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
        except NO_ANSWER:
            return False

    def pids(self) -> dict[str, int]:
        """The live workers by name."""
        try:
            return {w["name"]: w["pid"] for w in self.get("/workers")[1]["workers"] if w["state"] == "live"}
        except NO_ANSWER:
            return {}

    def pid(self, name: str) -> int:
        """That of a worker, once it is live."""
        return until(lambda: self.pids().get(name), f"{name} to be live")


@contextlib.contextmanager
def serving(*arguments: str, model: str = "smollm2") -> Iterator[tuple[Program, Server, dict[str, int]]]:
    """A cluster that is ready, and the pids of all its processes. `arguments` come behind those of SMALL.

    What it has said is shown by pytest with a test that fails.
    """
    program = Program("serve", model, "--port", "0", *SMALL, *arguments)
    try:
        url = program.says(r"is served at (http://\S+)")[1]
        program.says(r"Ctrl-C ends it")
        server = Server(url)
        router = int(program.says(r"(?m)^router +front +(\d+)")[1])
        yield program, server, {"router": router, **server.pids()}
    finally:
        print(program.output)
        if program.process.poll() is None:
            program.process.kill()
            program.process.wait()
