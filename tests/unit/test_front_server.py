"""The end of a front: signals, streams under way, the address in use."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from typing import Any

import pytest
from tests.unit.front_house import MESSAGES, House, house, until
from tests.unit.scripted import ScriptedRouter, Stage, byte_tokenizer

from slipstream.config import FrontConfig
from slipstream.errors import ConfigError
from slipstream.front.app import create_app
from slipstream.front.server import running, serve
from slipstream.front.service import TokenizerService
from slipstream.listen import listen

PROGRAM = """
import asyncio, sys
from slipstream.config import FrontConfig, ObserveConfig
from slipstream.front.app import FrontApp
from tests.unit.scripted import ScriptedRouter, byte_tokenizer
from slipstream.front.server import serve
from slipstream.listen import listen
from slipstream.front.service import TokenizerService

ending = asyncio.Event()

class App(FrontApp):
    def drain(self):
        super().drain()
        ending.set()

async def script(stage):
    stage.say(b"0")
    await ending.wait()
    for byte in b"123456789":
        await asyncio.sleep(0.05)
        stage.say([byte])
    stage.say([], finish="length")

async def main():
    config = FrontConfig(port=0)
    sock = listen(config.host, 0)
    sock.listen()
    print(sock.getsockname()[1], flush=True)
    app = App(ScriptedRouter(script), TokenizerService(tokenizer=byte_tokenizer()), config, ObserveConfig())
    await serve(app, config, sock, drain_s=float(sys.argv[1]))
    print("ended in order", flush=True)

asyncio.run(main())
"""


async def open_stream(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = b'{"prompt": "x", "stream": true}'
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(body), body)
    )
    await reader.readuntil(b'"text":"0"')
    return reader, writer


@pytest.mark.parametrize(("drain_s", "whole"), [(30.0, True), (0.0, False)])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_lets_streams_finish_within_the_bound_and_the_process_end(
    drain_s: float, whole: bool, number: signal.Signals
) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, str(drain_s), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        port = int(await process.stdout.readline())
        reader, writer = await open_stream(port)
        process.send_signal(number)
        rest = (await reader.read()).decode()
        writer.close()
        assert await process.stdout.read() == b"ended in order\n"
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert ("[DONE]" in rest) == whole
    assert ('"error"' in rest) != whole
    assert ('"text":"9"' in rest) == whole


async def test_while_it_drains_a_front_refuses_new_requests_and_finishes_the_old() -> None:
    go = asyncio.Event()

    async def script(stage: Stage) -> None:
        stage.say([ord("a")])
        await go.wait()
        stage.say([], finish="length")

    router = ScriptedRouter(script)
    config = FrontConfig(port=0)
    app = create_app(router, TokenizerService(tokenizer=byte_tokenizer()), config)
    sock = listen(config.host, 0)
    sock.listen()
    stop = asyncio.Event()
    task = asyncio.create_task(serve(app, config, sock, drain_s=30, stop=stop))
    h: Any = House(f"http://127.0.0.1:{sock.getsockname()[1]}", router, app, None)  # type: ignore[arg-type]
    stream = await h.stream("/v1/chat/completions", {"messages": MESSAGES})
    await stream.head()
    stop.set()
    async with asyncio.timeout(60):
        while (await h.request("GET", "/health"))[0] != 503:
            pass
    assert (await h.post("/v1/completions", {"prompt": "x"}))[0] == 503
    go.set()
    assert (await stream.body()).endswith(b"data: [DONE]\n\n")
    stream.close()
    async with asyncio.timeout(60):
        await task


async def test_what_does_not_finish_in_time_is_ended_by_an_error_and_aborted() -> None:
    async def endless(stage: Stage) -> None:
        stage.say([ord("a")])
        await asyncio.sleep(3600)

    async with house(endless) as h:
        stream = await h.stream("/v1/chat/completions", {"messages": MESSAGES})
        await stream.head()
        waiting = asyncio.create_task(h.post("/v1/chat/completions", {"messages": MESSAGES}))
        await until(lambda: h.app.in_flight == 2)
        h.app.cut("the house is closing")
        assert b'"message":"the house is closing"' in await stream.body()
        status, body, headers = await waiting
        assert (status, body["error"]["code"], headers["retry-after"]) == (503, "no_workers", "1")
        assert len(h.router.aborted) == 2
        stream.close()


def test_an_address_in_use_is_said_in_a_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is in use .*--port"):
            listen("127.0.0.1", port)
    with pytest.raises(ConfigError, match="--host"):
        listen("no such host", 0)


async def test_a_front_serves_on_ipv6_too() -> None:
    try:
        listen("::1", 0).close()
    except ConfigError:
        pytest.skip("this machine has no IPv6")
    config = FrontConfig(host="::1", port=0)
    router = ScriptedRouter(lambda stage: asyncio.sleep(0))
    async with running(create_app(router, TokenizerService(tokenizer=byte_tokenizer()), config), config) as url:
        h = House(url, router, None, None)  # type: ignore[arg-type]
        assert (await h.request("GET", "/version"))[0] == 200
