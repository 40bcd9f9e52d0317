"""Measures the load generator's client alone: processor time an event, and that of other clients where installed.

    python bench/client.py [--streams 500] [--events 60]

A second process writes the same rendered event to all streams at once, 20 times a second; this one reads them. Figures
are processor time of this process, kernel included, over the events read, each of them parsed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import time
from collections.abc import Callable, Coroutine
from multiprocessing.connection import Connection
from typing import Any

import uvloop

from slipstream.bench.serve.client import Client
from slipstream.bench.serve.stream import Stream

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = (
    b'data: {"id":"cmpl-1259a6be12975779ba252dd6","object":"text_completion","created":1795981734,"model":"smollm2",'
    b'"choices":[{"index":0,"text":" Sky","logprobs":null,"finish_reason":null,"token_ids":[17]}],"usage":null}\n\n'
)
LAST = EVENT.replace(b'"finish_reason":null', b'"finish_reason":"length"') + b"data: [DONE]\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def server(streams: int, events: int, pipe: Connection) -> None:
    async def run() -> None:
        writers: list[asyncio.StreamWriter] = []

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(HEAD)
            writers.append(writer)
            if len(writers) < streams:
                return
            for _ in range(events - 1):
                for each in writers:
                    each.write(chunk(EVENT))
                await asyncio.sleep(0.05)
            for each in writers:
                each.write(chunk(LAST) + b"0\r\n\r\n")

        found = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=4096)
        pipe.send(found.sockets[0].getsockname()[1])
        await asyncio.sleep(600)

    uvloop.run(run())


async def ours(port: int, streams: int) -> int:
    client = Client("127.0.0.1", port)
    read = [Stream() for _ in range(streams)]
    payload = client.request("GET", "/")
    await asyncio.gather(*(client.exchange(payload, stream, 600.0) for stream in read))
    client.close()
    return sum(stream.counted for stream in read)


async def with_aiohttp(port: int, streams: int) -> int:
    import aiohttp  # type: ignore[import-not-found]

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one() -> int:
            count = 0
            async with session.get(f"http://127.0.0.1:{port}/") as answer:
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        json.loads(line[6:])
                        count += 1
            return count

        return sum(await asyncio.gather(*(one() for _ in range(streams))))


def measure(name: str, work: Callable[[int, int], Coroutine[Any, Any, int]], streams: int, events: int) -> None:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=server, args=(streams, events, there), daemon=True)
    process.start()
    try:
        port = here.recv()
        began = time.process_time()
        count = uvloop.run(work(port, streams))
        print(f"{name}: {1e6 * (time.process_time() - began) / count:.1f} us an event, {count} events")
    except ImportError:
        print(f"{name}: not installed")
    finally:
        process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--events", type=int, default=60)
    options = parser.parse_args()
    measure("bench serve", ours, options.streams, options.events)
    measure("aiohttp", with_aiohttp, options.streams, options.events)


if __name__ == "__main__":
    main()
