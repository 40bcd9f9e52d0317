"""What the GPU scripts that serve share: a running `slipstream serve`, and one request to it."""

from __future__ import annotations

import json
import os
import re
import signal
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


class Server:
    """One `slipstream serve`; `url` is "" when it did not get ready in time.

    `environment` is added to this process's own. Its output goes to `log`, what matters of it to the terminal too.
    """

    def __init__(self, arguments: Sequence[str], log: Path, environment: dict[str, str] | None = None) -> None:
        say(f"== slipstream serve {' '.join(arguments)}")
        self.url = ""
        self.ready_s = 0.0
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

    def __enter__(self) -> Server:
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


def streamed(url: str, request: dict[str, Any]) -> Streamed:
    """One completion of the model named `model`: greedy, and all of `max_tokens` tokens, unless the request differs."""
    common = {"model": "model", "stream": True, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    body = json.dumps({**common, "stream_options": {"include_usage": True}, **request}).encode()
    found, began = Streamed(), time.perf_counter()
    call = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
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
