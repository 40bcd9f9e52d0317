"""The load generator's client against servers that cut, mix and break their streams in every way."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Callable

import pytest
from tests.unit.openai_server import DONE, HEAD, Answer, Call, FakeServer, delta, event, fake, text, usage

from slipstream.bench.serve import client as client_module
from slipstream.bench.serve.client import Client
from slipstream.bench.serve.stream import Stream, message_of
from slipstream.bench.serve.target import parse_url
from slipstream.errors import ConfigError

WHOLE = [text("a"), text("b"), text("c", "length"), usage(7, 3, 2), DONE]


def fed(*pieces: bytes, status: int = 200) -> Stream:
    """A stream that got these pieces at the times 1, 2, 3 ..."""
    stream = Stream(status=status)
    for at, piece in enumerate(pieces, 1):
        stream.take(piece, float(at))
    stream.finished(float(len(pieces)))
    return stream


async def asked(answer: Answer, timeout_s: float = 60.0) -> Stream:
    async with fake(answer) as server:
        client = client_of(server)
        stream = Stream()
        await client.exchange(client.request("POST", "/v1/completions", b'{"max_tokens":3}'), stream, timeout_s)
        client.close()
        return stream


def client_of(server: FakeServer) -> Client:
    host, port, _, _ = parse_url(server.url)
    return Client(host, port)


# ------------------------------------------------------------------------------------------------------- events


def test_a_stream_cut_at_every_byte_reads_the_same() -> None:
    whole = b"".join(WHOLE).replace(b"\n", b"\r\n")
    for data in (b"".join(WHOLE), whole):
        for at in range(1, len(data)):
            stream = fed(data[:at], data[at:])
            assert (stream.problem, len(stream.times), stream.prompt_tokens, stream.output_tokens) == ("", 3, 7, 3)
        bytewise = fed(*(data[i : i + 1] for i in range(len(data))))
        assert (bytewise.problem, bytewise.counted, bytewise.cached_tokens) == ("", 3, 2)


def test_an_event_has_the_time_of_its_last_byte() -> None:
    stream = fed(WHOLE[0][:10], WHOLE[0][10:], WHOLE[1] + WHOLE[2], DONE)
    assert list(stream.times) == [2.0, 3.0, 3.0]


def test_comments_names_and_data_over_several_lines_are_understood() -> None:
    parts = json.dumps({"choices": [{"text": "x", "finish_reason": "stop"}]}, indent=1).encode().split(b"\n")
    event_lines = b"".join(b"data: " + part + b"\n" for part in parts)
    stream = fed(b": keep-alive\n\n", b"event: message\nid: 4\nretry: 10\n", event_lines + b"\n", b"data:[DONE]\n\n")
    assert (stream.problem, stream.counted, stream.done) == ("", 1, True)


def test_chunks_of_a_chat_without_content_are_no_tokens() -> None:
    stream = fed(
        delta(role="assistant", content=""),
        delta(role="assistant", content=None),
        delta(content="Hel"),
        delta(reasoning_content="because"),
        delta(tool_calls=[]),
        delta(tool_calls=[{"index": 0, "function": {"arguments": "{"}}]),
        delta("stop"),
        usage(4, 3),
        DONE,
    )
    assert list(stream.times) == [3.0, 4.0, 6.0]
    assert (stream.problem, stream.finish) == ("", "stop")


def test_an_empty_text_is_half_a_character_unless_it_only_ends_the_answer() -> None:
    stream = fed(text(""), text("é"), text("", "length"), DONE)
    assert list(stream.times) == [1.0, 2.0]


def test_tokens_of_an_event_are_counted_by_their_ids() -> None:
    stream = fed(text("", token_ids=[5]), text("ab", token_ids=[6, 7, 8]), text("", "length", token_ids=[]), DONE)
    assert list(stream.counts) == [1, 3]
    assert stream.told_ids


def test_tokens_of_an_event_are_counted_by_the_growth_of_usage() -> None:
    def grown(words: str, total: int, finish: str | None = None) -> bytes:
        choice = {"index": 0, "text": words, "finish_reason": finish}
        return event({"choices": [choice], "usage": {"prompt_tokens": 9, "completion_tokens": total}})

    stream = fed(grown("a", 1), grown("bc", 4), grown("", 6), grown("", 6, "length"), DONE)
    assert list(stream.counts) == [1, 3, 2]
    assert stream.output_tokens == 6


@pytest.mark.parametrize(
    "bad",
    [
        event({"error": {"message": "out of memory", "code": "engine_failure"}}),
        event({"object": "error", "message": "out of memory", "code": 500}),
        b'event: error\ndata: {"message": "out of memory"}\n\n',
    ],
)
def test_an_error_in_a_stream_of_status_200_is_an_error(bad: bytes) -> None:
    stream = fed(text("a"), bad, DONE)
    assert stream.problem == "error_event"
    assert "out of memory" in stream.detail


def test_errors_that_are_null_are_none() -> None:
    assert fed(event({"choices": [{"text": "a", "finish_reason": "stop"}], "error": None}), DONE).problem == ""


@pytest.mark.parametrize(
    ("pieces", "problem"),
    [
        ([text("a"), DONE], "cut"),
        ([text("a")], "cut"),
        ([b'{"choices": []}'], "no_events"),
        ([], "no_events"),
        ([text("", "stop"), DONE], "empty"),
        ([b"data: {nonsense\n\n", text("a", "stop"), DONE], "bad_event"),
    ],
)
def test_an_answer_that_is_not_whole_is_an_error_of_its_kind(pieces: list[bytes], problem: str) -> None:
    assert fed(*pieces).problem == problem


@pytest.mark.parametrize("cut", [1, 7, 1000])
def test_an_error_in_place_of_a_stream_is_told_in_the_servers_words(cut: int) -> None:
    body = b'{"error": {"message": "the engine is gone", "code": 500}}'
    stream = fed(*(body[at : at + cut] for at in range(0, len(body), cut)))
    assert (stream.problem, "the engine is gone" in stream.detail) == ("no_events", True)


def test_a_stream_that_ends_in_order_without_the_word_done_is_whole() -> None:
    assert fed(text("a"), text("b", "stop")).problem == ""


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "nested", "code": 1}}', "nested"),
        (b'{"object": "error", "message": "flat"}', "flat"),
        (b'{"detail": "of a framework"}', "of a framework"),
        (b'{"error": "a string"}', "a string"),
        (b"<html>", "<html>"),
        (b"[1]", "[1]"),
        (b"[" * 100_000, "[" * 200),
    ],
)
def test_error_bodies_of_all_shapes_have_a_message(body: bytes, message: str) -> None:
    assert message_of(body) == message


# -------------------------------------------------------------------------------------------------- connections


async def test_http_chunks_that_cut_events_anywhere_are_put_together() -> None:
    async def answer(call: Call) -> None:
        data = HEAD + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in WHOLE) + b"0\r\n\r\n"
        for at in range(0, len(data), 7):
            await call.write(data[at : at + 7])
            await asyncio.sleep(0)

    stream = await asked(answer)
    assert (stream.problem, stream.counted, stream.output_tokens, stream.finish) == ("", 3, 3, "length")
    assert stream.sent < stream.times[0] <= stream.times[-1] <= stream.ended


async def test_a_connection_that_breaks_in_mid_stream_is_an_error() -> None:
    async def answer(call: Call) -> None:
        await call.write(HEAD)
        await call.chunked(WHOLE[:2])
        call.writer.close()

    stream = await asked(answer)
    assert stream.problem == "cut"
    assert "2 tokens" in stream.detail


async def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    async def answer(call: Call) -> None:
        await call.write(b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + b"".join(WHOLE))
        call.writer.close()

    assert (await asked(answer)).problem == ""


async def test_a_refusal_is_an_error_with_its_status_and_message() -> None:
    async def answer(call: Call) -> None:
        await call.status(429, {"error": {"message": "queue is full"}})

    stream = await asked(answer)
    assert (stream.problem, stream.detail) == ("http_429", "queue is full")


async def test_what_is_not_http_is_an_error() -> None:
    async def answer(call: Call) -> None:
        await call.write(b"220 mail ready\r\n")

    assert (await asked(answer)).problem == "bad_http"


async def test_an_answer_that_takes_too_long_is_an_error_and_its_connection_is_closed() -> None:
    gone = asyncio.Event()

    async def answer(call: Call) -> None:
        await call.write(HEAD)
        await call.chunked(WHOLE[:1])
        try:
            await call.writer.wait_closed()
        except ConnectionError:
            gone.set()

    stream = await asked(answer, timeout_s=1.0)
    assert stream.problem == "timeout"
    assert "1 tokens" in stream.detail


async def test_nobody_listening_is_a_connect_error() -> None:
    async with fake() as server:
        client = client_of(server)
    stream = Stream()
    await client.exchange(client.request("POST", "/v1/completions", b"{}"), stream, 60.0)
    assert stream.problem == "connect"


async def test_connections_are_used_again() -> None:
    async with fake() as server:
        client = client_of(server)
        for _ in range(3):
            stream = Stream()
            await client.exchange(client.request("POST", "/v1/completions", b'{"prompt":"a"}'), stream, 60.0)
            assert stream.problem == ""
        assert server.connections == client.connected == 1
        client.close()


async def test_a_kept_connection_that_the_server_has_closed_is_replaced() -> None:
    async def answer(call: Call) -> None:
        await call.write(HEAD)
        await call.chunked(WHOLE)
        await call.end()
        call.writer.transport.set_write_buffer_limits(0)

    async with fake(answer) as server:
        client = client_of(server)
        payload = client.request("POST", "/v1/completions", b'{"prompt":"a"}')
        await client.exchange(payload, Stream(), 60.0)
        server.calls[0].writer.transport.abort()
        client.idle[0].closed = False  # as if the end had not been seen yet
        second = Stream()
        await client.exchange(payload, second, 60.0)
        assert second.problem == ""
        assert server.connections == 2
        client.close()


async def test_an_old_idle_connection_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "IDLE_S", 0.0)
    async with fake() as server:
        client = client_of(server)
        for _ in range(2):
            await client.exchange(client.request("POST", "/v1/completions", b'{"prompt":"a"}'), Stream(), 60.0)
        assert server.connections == 2
        client.close()


async def test_the_end_of_an_error_body_does_not_matter_to_the_next_request() -> None:
    async def answer(call: Call) -> None:
        if call.body.get("prompt") == "bad":
            await call.status(500, {"error": {"message": "x" * 100_000}})
        else:
            await call.write(HEAD)
            await call.chunked(WHOLE)
            await call.end()

    async with fake(answer) as server:
        client = client_of(server)
        bad, good = Stream(), Stream()
        await client.exchange(client.request("POST", "/v1/completions", b'{"prompt":"bad"}'), bad, 60.0)
        await client.exchange(client.request("POST", "/v1/completions", b'{"prompt":"good"}'), good, 60.0)
        assert (bad.problem, good.problem) == ("http_500", "")
        assert len(bad.detail) <= 300
        client.close()


async def test_tls_to_a_server_that_speaks_none_is_a_connect_error() -> None:
    async with fake() as server:
        host, port, _, _ = parse_url(server.url)
        client = Client(host, port, tls=True)
        assert isinstance(client._context, ssl.SSLContext)
        stream = Stream()
        await client.exchange(client.request("GET", "/"), stream, 2.0)
        assert stream.problem in ("connect", "timeout")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8000", ("127.0.0.1", 8000, False, "/v1")),
        ("127.0.0.1:8000/v1/", ("127.0.0.1", 8000, False, "/v1")),
        ("https://api.example.org/v2", ("api.example.org", 443, True, "/v2")),
        ("http://[::1]:9", ("::1", 9, False, "/v1")),
    ],
)
def test_addresses(url: str, expected: tuple[str, int, bool, str]) -> None:
    assert parse_url(url) == expected


@pytest.mark.parametrize("url", ["", "ftp://x", "http://", "http://x:notaport", "http://[::1", "[", "http://h:99999"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="is no address"):
        parse_url(url)


def test_times_are_taken_when_bytes_leave_the_socket_not_when_a_task_runs() -> None:
    """A callback that blocks between two events must not move the first one's time."""
    order: list[float] = []

    async def scene() -> Stream:
        async def answer(call: Call) -> None:
            await call.write(HEAD)
            await call.chunked(WHOLE[:1])
            order.append(time.perf_counter())
            await asyncio.sleep(0.05)
            await call.chunked(WHOLE[1:])
            await call.end()

        return await asked(answer)

    stream = run(scene)
    assert stream.times[0] <= order[0] < stream.times[1]


def run(scene: Callable) -> Stream:
    return asyncio.run(scene())
