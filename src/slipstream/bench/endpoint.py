"""One of the two processes of a transfer benchmark: `python -m slipstream.bench.endpoint FD`.

It answers requests on an inherited socket, one JSON line each, and between them serves its engine, so that a peer can
open its memory. A pair of these lives for one engine: one that hangs or crashes, or reads its choices from the
environment, concerns no other.
"""

from __future__ import annotations

import dataclasses
import json
import os
import select
import socket
import statistics
import sys
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.bench.engines import Direction, make_engine
from slipstream.bench.pools import make_pool
from slipstream.config import TransferConfig
from slipstream.errors import SlipstreamError

LATENCY_SAMPLES = 300
LATENCY_SECONDS = 0.4


class Endpoint:
    """The requests, by name. Each returns what goes back as JSON."""

    def __init__(self) -> None:
        self._engine: Any = None
        self._pool: Any = None

    @property
    def watched(self) -> int:
        return self._engine.fileno() if self._engine is not None else -1

    def serve(self) -> None:
        self._engine.serve()

    def make(self, engine: str, memory: str, bytes: int, programs: int, depth: int) -> dict[str, Any]:
        began = time.perf_counter()
        self._pool = make_pool(memory, bytes)
        self._engine = make_engine(engine, self._pool, TransferConfig(cuda_programs=programs))
        self._depth = depth if self._engine.depth > 1 else 1
        hello = self._engine.hello().hex()
        return {"hello": hello, "directions": self._engine.directions, "seconds": time.perf_counter() - began}

    def meet(self, hello: str) -> dict[str, Any]:
        self._engine.meet(bytes.fromhex(hello))
        return {}

    def connect(self) -> dict[str, Any]:
        began = time.perf_counter()
        self._engine.connect()
        costs = getattr(getattr(self._engine, "_remote", None), "costs", None)
        described = dataclasses.asdict(costs) if costs is not None else {}
        return {"seconds": time.perf_counter() - began, "costs": described}

    def fill(self, seed: int) -> dict[str, Any]:
        self._pool.fill(seed)
        return {"cpu": time.process_time()}

    def poison(self) -> dict[str, Any]:
        self._pool.poison()
        return {"cpu": time.process_time()}

    def cpu(self) -> dict[str, Any]:
        return {"cpu": time.process_time()}

    def check(self, page: int, pages: int, here: int, there: int, contiguous: bool, seed: int) -> dict[str, Any]:
        total = self._pool.bytes // page
        mine, theirs = choose(total, pages, here, contiguous), choose(total, pages, there, contiguous)
        return {"wrong": self._pool.check(page, mine, theirs, seed)}

    def run(
        self, direction: Direction, page: int, pages: int, mine: int, theirs: int, contiguous: bool, seconds: float
    ) -> dict[str, Any]:
        """Moves the batch one at a time, then several under way at once, then single pages."""
        engine = self._engine
        total = self._pool.bytes // page
        here, there = choose(total, pages, mine, contiguous), choose(total, pages, theirs, contiguous)
        batch, single = (engine.plan(direction, page, here[:n], there[:n]) for n in (pages, 1))
        size = page * pages
        first = _timed(engine, batch)
        cpu, began = time.process_time(), time.perf_counter()
        taken = []
        while not taken or (time.perf_counter() - began < seconds and len(taken) < 15):
            taken.append(_timed(engine, batch))
        cpu = time.process_time() - cpu
        latency = []
        began = time.perf_counter()
        limit = min(LATENCY_SECONDS, seconds)
        while not latency or (len(latency) < LATENCY_SAMPLES and time.perf_counter() - began < limit):
            latency.append(_timed(engine, single))
        latency.sort()
        many = None
        moved = size * (1 + len(taken)) + page * len(latency)
        if self._depth > 1:
            self._many(batch, self._depth, 0.0)  # what is made once, for so many, is made now
            count, spent = self._many(batch, 8 * self._depth, seconds)
            many = size * count / spent / 1e9
            moved += size * (count + self._depth)
        return {
            "moved": moved,
            "gbps": size / statistics.median(taken) / 1e9,
            "gbps_best": size / min(taken) / 1e9,
            "gbps_many": many,
            "first_s": first,
            "batches": len(taken),
            "cpu_s_per_gb": cpu / (size * len(taken) / 1e9),
            "p50_us": 1e6 * latency[len(latency) // 2],
            "p99_us": 1e6 * latency[int(len(latency) * 0.99)],
        }

    def _many(self, batch: Any, most: int, seconds: float) -> tuple[int, float]:
        """Moves batches with as many under way as the engine takes; how many, in which time."""
        engine = self._engine
        began, count = time.perf_counter(), 0
        for _ in range(self._depth):
            engine.start(batch)
        while True:
            engine.finish()
            count += 1
            if count + self._depth > most or time.perf_counter() - began > seconds:
                break
            engine.start(batch)
        for _ in range(self._depth - 1):
            engine.finish()
            count += 1
        return count, time.perf_counter() - began

    def end(self) -> dict[str, Any]:
        engine, self._engine = self._engine, None
        engine.close()
        return {}


def choose(total: int, count: int, seed: int, contiguous: bool) -> NDArray[np.int64]:
    """`count` of `total` pages: the first ones, or a random choice in random order."""
    if contiguous:
        return np.arange(count, dtype=np.int64)
    return np.random.default_rng(seed).permutation(total)[:count].astype(np.int64)


def _timed(engine: Any, batch: Any) -> float:
    began = time.perf_counter()
    engine.start(batch)
    engine.finish()
    return time.perf_counter() - began


def answer(endpoint: Endpoint, request: dict[str, Any]) -> dict[str, Any]:
    verb = request.pop("verb")
    try:
        return getattr(endpoint, verb)(**request)
    except SlipstreamError as error:
        return {"error": error.message}
    except Exception as error:  # the process edge: an engine may raise anything, and the other side must hear of it
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    endpoint = Endpoint()
    pending = b""
    while True:
        watched = [control.fileno()] + ([endpoint.watched] if endpoint.watched >= 0 else [])
        ready = select.select(watched, [], [])[0]
        if control.fileno() not in ready:
            endpoint.serve()
            continue
        received = control.recv(1 << 20)
        if not received:
            os._exit(0)  # the other engines' own threads and destructors are not under test
        *lines, pending = (pending + received).split(b"\n")
        for line in lines:
            reply = answer(endpoint, json.loads(line))
            control.sendall(json.dumps(reply).encode() + b"\n")


if __name__ == "__main__":
    main()
