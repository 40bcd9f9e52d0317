"""What the GPU scripts that serve share: a running server, one request to it, and what the server knows of requests."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

READY_S, STOP_S = 150.0, 20.0


def gpus() -> int:
    import torch

    return torch.cuda.device_count()


def say(text: str) -> None:
    print(text, flush=True)


class Served:
    """A router with its workers; `url` is "" when it did not get ready in time."""

    url = ""
    ready_s = 0.0

    def stop(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def metrics(self, pattern: str) -> dict[str, float]:
        """All workers' samples whose names match, by worker and name without its prefix; no buckets."""
        found: dict[str, float] = {}
        for worker in json.loads(get(f"{self.url}/workers"))["workers"]:
            for line in get(f"{worker['url']}/metrics").splitlines():
                name, _, value = line.rpartition(" ")
                if not line.startswith("#") and re.search(pattern, name) and "_bucket" not in name:
                    found[f"{worker['name']} {name.removeprefix('slipstream_worker_')}"] = float(value)
        return found

    def story(self, request: str) -> dict[str, Any]:
        """What happened to a request, by its X-Request-ID: its timeline, or {"problem": ...}."""
        try:
            return json.loads(get(f"{self.url}/v1/requests/{request}/timeline"))
        except OSError as error:
            return {"problem": f"{type(error).__name__}: {error}"}

    def stories(self, window_s: float) -> list[dict[str, Any]]:
        """The same of all requests of the last seconds, of a thousand at most."""
        return json.loads(get(f"{self.url}/v1/requests?limit=1000&events=true&window={window_s:.3f}"))["data"]


class Server(Served):
    """One `slipstream serve`.

    `environment` is added to this process's own. Its output goes to `log`, what matters of it to the terminal too.
    """

    def __init__(self, arguments: Sequence[str], log: Path, environment: dict[str, str] | None = None) -> None:
        say(f"== slipstream serve {' '.join(arguments)}")
        self._found = ""
        self._began = time.monotonic()
        self._ready = threading.Event()
        self._log = log.open("w")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "slipstream", "serve", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
        threading.Thread(target=self._read, daemon=True).start()
        self._ready.wait(READY_S)
        if self.ready_s and self._process.poll() is None:
            self.url = self._found
            answers(f"{self.url}/health")  # this client's first request makes what all need: 26 ms
        say(f"-- ready after {self.ready_s:.1f} s" if self.url else f"-- NOT ready; see {log.name}")

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._log.write(f"{time.monotonic() - self._began:8.2f} {line}")
            self._log.flush()
            if not self._ready.is_set() or "WARNING" in line or "ERROR" in line or "warning" in line:
                say(f"   | {line.rstrip()}")
            if match := re.search(r"is served at (http://\S+)", line):
                self._found = match[1]
            if "Ctrl-C ends it" in line:
                self.ready_s = time.monotonic() - self._began
                self._ready.set()
        self._ready.set()

    def stop(self) -> None:
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            say("-- it did not end by itself")


class Pieces(Served):
    """One `slipstream router` and workers that join it, each with flags of its own.

    What they print goes to `log`. It is ready when `/health` of the router says so.
    """

    def __init__(
        self,
        router: Sequence[str],
        workers: Sequence[Sequence[str]],
        log: Path,
        environment: dict[str, str] | None = None,
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{free.getsockname()[1]}"
        commands = [["router", *router, "--port", url.rpartition(":")[2]]]
        commands += [["worker", *worker, "--join", url] for worker in workers]
        began = time.monotonic()
        self._processes: list[subprocess.Popen[bytes]] = []
        with log.open("wb") as output:
            for command in commands:
                say(f"== slipstream {' '.join(command)}")
                process = subprocess.Popen(
                    [sys.executable, "-m", "slipstream", *command],
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    env={**os.environ, **(environment or {})},
                )
                self._processes.append(process)
        while time.monotonic() - began < READY_S and all(process.poll() is None for process in self._processes):
            if answers(f"{url}/health"):
                self.url, self.ready_s = url, time.monotonic() - began
                break
            time.sleep(0.1)
        say(f"-- ready after {self.ready_s:.1f} s" if self.url else f"-- NOT ready; see {log.name}")

    def stop(self) -> None:
        end = time.monotonic() + STOP_S
        for process in reversed(self._processes):
            process.send_signal(signal.SIGINT)
        for process in self._processes:
            try:
                process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                say("-- a process did not end by itself")


def answers(url: str) -> bool:
    """With 200."""
    try:
        return bool(get(url))
    except OSError:
        return False


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


class Streamed:
    """An answer: its tokens, and for each event with tokens the seconds since the request was sent."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.times: list[float] = []
        self.cached = 0
        self.problem = ""

    @property
    def first_s(self) -> float:
        return self.times[0] if self.times else 0.0

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]

    @property
    def rate(self) -> float:
        """Tokens a second behind the first one."""
        took = self.times[-1] - self.times[0] if self.times else 0.0
        return (len(self.tokens) - 1) / took if took > 0 else 0.0


def streamed(url: str, request: dict[str, Any], name: str = "") -> Streamed:
    """One completion of the model named `model`: greedy, and all of `max_tokens` tokens, unless the request differs.

    `name` is its X-Request-ID.
    """
    common = {"model": "model", "stream": True, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    body = json.dumps({**common, "stream_options": {"include_usage": True}, **request}).encode()
    found, began = Streamed(), time.perf_counter()
    headers = {"content-type": "application/json", **({"x-request-id": name} if name else {})}
    call = urllib.request.Request(f"{url}/v1/completions", body, headers)
    with urllib.request.urlopen(call, timeout=120) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            now = time.perf_counter() - began
            chunk = json.loads(line[6:])
            if "error" in chunk:
                found.problem = str(chunk["error"])
                say(f"   error: {found.problem}")
                break
            usage = chunk.get("usage") or {}
            found.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", found.cached) or 0
            if new := [t for choice in chunk["choices"] for t in choice.get("token_ids") or []]:
                found.times.append(now)
                found.tokens += new
    return found
