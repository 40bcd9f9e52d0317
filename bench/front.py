"""Measures the front alone: streamed tokens per second and processor time a chunk, and the delay it adds.

    python -m bench.front                       400 streams as fast as they go, then at paced rates
    python -m bench.front --streams 100 --rates 5000,20000

This process holds the front (uvicorn, uvloop) and a router that makes tokens up: one call of each sink for a token, in
steps like those of an engine, so that all streams have their tokens at once. A second process opens the streams over
loopback and counts events. Both clocks are the machine's monotonic clock, so the delay of a token is the time between
the sink's call here and the bytes' arrival there.

`saturated` makes the next step as soon as the last one is written; `paced` makes a fixed number of tokens a second.
`cpu us/chunk` is processor time of this process (user and system) over the events sent; the made-up router's share is
measured without a front and given beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import resource
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any, cast

import uvloop
from tests.unit.scripted import ScriptedRouter, Stage

from slipstream.config import FrontConfig
from slipstream.front.app import create_app
from slipstream.front.backend import Sink
from slipstream.front.server import serve
from slipstream.front.service import TokenizerService
from slipstream.front.tokenizer import load_tokenizer
from slipstream.listen import listen
from slipstream.types import Request, Tokens

PATH = "/v1/chat/completions"


class Steps(ScriptedRouter):
    """A router whose requests all get a token in each step; `sent` are the times of the steps."""

    def __init__(self, words: list[int]) -> None:
        super().__init__(_nothing, name="bench", max_model_len=1 << 20)
        self.words = words
        self.sinks: dict[str, Sink] = {}
        self.sent: list[float] = []

    def submit(self, request: Request, sink: Sink) -> None:
        self.sinks[request.id] = sink

    def abort(self, request_id: str) -> None:
        self.sinks.pop(request_id, None)

    def step(self, number: int, *, last: bool) -> None:
        self.sent.append(time.monotonic())
        word = self.words[number % len(self.words)]
        for name, sink in list(self.sinks.items()):
            sink.tokens(Tokens(name, 0, number, [word], finish="length" if last else None))
        if last:
            self.sinks.clear()


async def _nothing(stage: Stage) -> None:
    stage.closed = True


class Null:
    """A sink that does nothing, to find what the made-up router itself costs."""

    def tokens(self, t: Tokens) -> None: ...

    def error(self, e: Exception) -> None: ...


# -------------------------------------------------------------------------------------------------------------- client


class Stream(asyncio.Protocol):
    """One client: notes when each event arrives, by a count of the separators."""

    def __init__(self, body: bytes, done: asyncio.Future[None]) -> None:
        self._body = body
        self._done = done
        self._tail = b""
        self.arrivals: list[float] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(self._body)}"
        cast(asyncio.Transport, transport).write(head.encode() + b"\r\nconnection: close\r\n\r\n" + self._body)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        seen = (self._tail + data).count(b"data: {")
        self._tail = data[-6:]
        self.arrivals.extend([now] * seen)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._done.done():
            self._done.set_result(None)


async def _client(port: int, streams: int, tokens: int, pipe: Connection) -> None:
    loop = asyncio.get_running_loop()
    body = {"messages": [{"role": "user", "content": "go"}], "stream": True, "max_tokens": tokens}
    opened: list[Stream] = []
    ends: list[asyncio.Future[None]] = []
    for _ in range(streams):
        done = loop.create_future()
        stream = Stream(json.dumps(body).encode(), done)
        await loop.create_connection(lambda stream=stream: stream, "127.0.0.1", port)
        opened.append(stream)
        ends.append(done)
    await asyncio.gather(*ends)
    pipe.send([stream.arrivals for stream in opened])


def client(port: int, streams: int, tokens: int, pipe: Connection) -> None:
    uvloop.run(_client(port, streams, tokens, pipe))


# -------------------------------------------------------------------------------------------------------------- driver


async def measure(router: Steps, port: int, streams: int, tokens: int, rate: float | None) -> dict[str, Any]:
    """One run; `rate` in tokens a second over all streams, None for as fast as it goes."""
    ours, theirs = multiprocessing.Pipe()
    router.sent = []
    process = multiprocessing.get_context("spawn").Process(
        target=client, args=(port, streams, tokens, theirs), daemon=True
    )
    process.start()
    while len(router.sinks) < streams:
        await asyncio.sleep(0.01)
        if not process.is_alive():
            raise RuntimeError("the client process failed; its error is above")
    (cpu, system), wall = _cpu(), time.monotonic()
    due = wall
    for number in range(tokens):
        router.step(number, last=number == tokens - 1)
        due += streams / rate if rate else 0
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        if rate is None:
            await asyncio.sleep(0)
    arrivals = await asyncio.get_running_loop().run_in_executor(None, ours.recv)
    cpu, system, wall = _cpu()[0] - cpu, _cpu()[1] - system, time.monotonic() - wall
    process.join()
    events = sum(map(len, arrivals))
    row: dict[str, Any] = {
        "streams": streams,
        "rate": rate or "saturated",
        "tokens_per_s": round(streams * tokens / wall),
        "tokens_per_cpu_s": round(streams * tokens / cpu),
        "events": events,
        "events_per_token": round(events / (streams * tokens), 3),
        "cpu_us_per_chunk": round(cpu / events * 1e6, 1),
        "of_which_kernel": round(system / events * 1e6, 1),
    }
    if rate and events == streams * tokens:
        delays = sorted(arrived - sent for times in arrivals for sent, arrived in zip(router.sent, times, strict=True))
        row["delay_ms_p50"] = round(statistics.median(delays) * 1e3, 2)
        row["delay_ms_p99"] = round(delays[int(len(delays) * 0.99)] * 1e3, 2)
    return row


def _cpu() -> tuple[float, float]:
    """Processor seconds of this process so far, and those of them in the kernel."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime, used.ru_stime


def own_cost(router: Steps, streams: int, tokens: int) -> float:
    """Processor microseconds a token of the made-up router."""
    router.sinks = {f"chatcmpl-{at}": Null() for at in range(streams)}
    start, _ = _cpu()
    for number in range(tokens):
        router.step(number, last=number == tokens - 1)
    return (_cpu()[0] - start) / (streams * tokens) * 1e6


async def run(streams: int, tokens: int, rates: list[float | None]) -> None:
    tokenizer = load_tokenizer("smollm2")
    router = Steps(tokenizer.encode(" the quick brown fox jumps over a lazy dog and more"))
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(f"made-up router alone: {own_cost(router, streams, tokens):.1f} us a token")
    app = create_app(router, TokenizerService("", tokenizer), FrontConfig())
    sock = listen("127.0.0.1", 0)
    stop = asyncio.Event()
    server = asyncio.create_task(serve(app, FrontConfig(), sock, stop=stop))
    for rate in rates:
        row = await measure(router, sock.getsockname()[1], streams, tokens, rate)
        print("  ".join(f"{name}={value}" for name, value in row.items()))
    stop.set()
    await server


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=400)
    parser.add_argument("--tokens", type=int, default=200, help="tokens of each stream")
    parser.add_argument("--rates", default="5000,10000,20000", help="tokens a second over all streams")
    options = parser.parse_args()
    rates: list[float | None] = [None, *(float(rate) for rate in options.rates.split(",") if rate)]
    uvloop.run(run(options.streams, options.tokens, rates))


if __name__ == "__main__":
    main()
