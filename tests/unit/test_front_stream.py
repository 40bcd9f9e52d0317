"""The rules of a stream: its events, its end, a client that is slow, silent engines, clients that leave."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from tests.unit.front_house import EOS, MESSAGES, House, decoded, house, saying, until
from tests.unit.scripted import Stage

from slipstream.errors import EngineFailure, WorkerLost
from slipstream.types import Logprob

CHAT = {"messages": MESSAGES}
PLAIN = {"prompt": "x", "skip_special_tokens": False}
LONG = [257]  # <|im_start|>, twelve bytes of text


async def forever(stage: Stage) -> None:
    """Says something now and then, and never ends by itself."""
    while True:
        stage.say(list(b"word "))
        await asyncio.sleep(0.01)


async def silence(stage: Stage) -> None:
    await asyncio.sleep(3600)


# --------------------------------------------------------------------------------------------------------------- events


async def test_a_chat_stream_keeps_the_rules() -> None:
    async with house(saying("Grüße 🎉")) as h:
        events = await h.events("/v1/chat/completions", CHAT)
    assert events.pop() == "[DONE]"
    assert len({(event["id"], event["created"], event["model"], event["object"]) for event in events}) == 1
    assert events[0]["object"] == "chat.completion.chunk"
    choices = [event["choices"][0] for event in events]
    assert choices[0]["delta"]["role"] == "assistant"
    assert all("role" not in choice["delta"] for choice in choices[1:])
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "Grüße 🎉"
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert choices[-1]["delta"] == {}
    assert all(set(choice) == {"index", "delta", "logprobs", "finish_reason"} for choice in choices)
    assert all("usage" not in event for event in events)


async def test_a_completion_stream_keeps_the_rules() -> None:
    async with house(saying("abc", finish="length")) as h:
        events = await h.events("/v1/completions", {"prompt": "x", "echo": True})
    assert events.pop() == "[DONE]"
    assert {event["object"] for event in events} == {"text_completion"}
    assert "".join(event["choices"][0]["text"] for event in events) == "xabc"
    assert [event["choices"][0]["finish_reason"] for event in events].count("length") == 1


async def test_the_official_client_reads_the_stream() -> None:
    async with house(saying("hello")) as h:
        stream = await h.client.chat.completions.create(model="scripted", messages=MESSAGES, stream=True)
        text = [chunk.choices[0].delta.content async for chunk in stream]
        pieces = await h.client.completions.create(model="scripted", prompt="x", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in pieces]) == "hello"
    assert "".join(piece or "" for piece in text) == "hello"


async def test_usage_comes_in_a_chunk_of_its_own_at_the_end() -> None:
    async with house(saying("ab", cached=3)) as h:
        events = await h.events("/v1/chat/completions", {**CHAT, "stream_options": {"include_usage": True}})
    assert events.pop() == "[DONE]"
    last = events.pop()
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    assert all(event["usage"] is None for event in events)


async def test_continuous_usage_counts_along() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with house(saying("abc")) as h:
        events = await h.events("/v1/chat/completions", {**CHAT, "stream_options": options})
    counts = [event["usage"]["completion_tokens"] for event in events[:-1]]
    assert counts == sorted(counts)
    assert counts[-1] == 4
    assert counts[0] < 4


async def test_choices_of_one_stream_are_told_apart_and_each_finishes_once() -> None:
    async def script(stage: Stage) -> None:
        letter = stage.request.id[-1]
        for _ in range(3):
            stage.say(letter.encode())
            await asyncio.sleep(0)
        stage.say([EOS], finish="stop", stop_token=EOS)

    async with house(script) as h:
        events = await h.events("/v1/chat/completions", {**CHAT, "n": 3})
    assert events.pop() == "[DONE]"
    choices = [choice for event in events for choice in event["choices"]]
    for index in range(3):
        mine = [choice for choice in choices if choice["index"] == index]
        assert "".join(choice["delta"].get("content", "") for choice in mine) == str(index) * 3
        assert [choice["delta"].get("role") for choice in mine] == ["assistant"] + [None] * (len(mine) - 1)
        assert [choice["finish_reason"] for choice in mine].count("stop") == 1


async def test_log_probabilities_and_token_ids_stream_with_their_tokens() -> None:
    async def script(stage: Stage) -> None:
        for byte in "é!".encode():
            stage.say([byte], logprobs=[Logprob(-1.0, [byte], [-1.0])])
            await asyncio.sleep(0)
        stage.say([EOS], finish="stop", stop_token=EOS, logprobs=[Logprob(-2.0)])

    body = {**CHAT, "logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    async with house(script) as h:
        events = (await h.events("/v1/chat/completions", body))[:-1]
        plain = (await h.events("/v1/completions", {"prompt": "x", "logprobs": 1}))[:-1]
    choices = [event["choices"][0] for event in events]
    entries = [entry for choice in choices for entry in choice["logprobs"]["content"]]
    assert [entry["token"] for entry in entries] == ["bytes:\\xc3", "bytes:\\xa9", "!", "<|end|>"]
    assert [token for choice in choices for token in choice["token_ids"]] == [0xC3, 0xA9, 33, EOS]
    assert events[0]["prompt_token_ids"] == h.router.requests[0].prompt_ids
    assert "prompt_token_ids" not in events[1]
    offsets = [at for event in plain for at in event["choices"][0]["logprobs"]["text_offset"]]
    assert offsets == [0, 0, 1, 2]


async def test_no_event_holds_half_a_character_or_part_of_a_stop_string() -> None:
    async with house(saying("a🎉b STOP never")) as h:
        events = await h.events("/v1/chat/completions", {**CHAT, "stop": "STOP"})
    pieces = [event["choices"][0]["delta"].get("content", "") for event in events[:-1]]
    assert "".join(pieces) == "a🎉b "
    assert "\ufffd" not in "".join(pieces)
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    assert h.router.aborted


async def test_a_stream_is_not_to_be_stored_or_held_back_on_the_way() -> None:
    async with house(saying("a")) as h:
        wire = await h.stream("/v1/chat/completions", CHAT)
        await wire.head()
        wire.close()
    assert wire.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert wire.headers["cache-control"] == "no-cache"
    assert wire.headers["x-accel-buffering"] == "no"


# ------------------------------------------------------------------------------------------------------------- failures


async def test_a_failure_in_the_middle_is_an_error_event_and_no_done() -> None:
    async def script(stage: Stage) -> None:
        stage.say(list(b"ab"))
        await asyncio.sleep(0.05)
        stage.say(list(b"cd"))
        stage.fail(WorkerLost("the worker died"))

    async with house(script) as h:
        events = await h.events("/v1/chat/completions", CHAT)
        assert events.pop() == {
            "error": {"message": "the worker died", "type": "server_error", "param": None, "code": "worker_lost"}
        }
        assert "".join(event["choices"][0]["delta"]["content"] for event in events) == "abcd"
        assert all(event["choices"][0]["finish_reason"] is None for event in events)
        stream = await h.client.chat.completions.create(model="scripted", messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError, match="the worker died"):
            async for _ in stream:
                pass


async def test_a_failing_choice_ends_the_whole_stream() -> None:
    async def script(stage: Stage) -> None:
        stage.say(b"a")
        await asyncio.sleep(0.05)
        if stage.request.id.endswith("-0"):
            stage.fail(EngineFailure("broken"))
        await asyncio.sleep(60)

    async with house(script) as h:
        events = await h.events("/v1/chat/completions", {**CHAT, "n": 2})
        assert events[-1]["error"]["code"] == "engine_failure"
        assert [name[-2:] for name in h.router.aborted] == ["-1"]


async def test_a_silent_engine_s_stream_is_kept_alive_by_comments() -> None:
    heard = asyncio.Event()

    async def script(stage: Stage) -> None:
        await heard.wait()
        stage.say([ord("a")])
        heard.clear()
        await heard.wait()
        stage.say([EOS], finish="stop", stop_token=EOS)

    async with house(script) as h:
        h.app.generator.keep_alive_s = 0.05
        wire = await h.stream("/v1/chat/completions", CHAT)
        await wire.head()
        assert await wire.chunk() == b": keep-alive\n\n"
        heard.set()
        while b'"content":"a"' not in (chunk := await wire.chunk()):
            assert chunk == b": keep-alive\n\n" or b'"role":"assistant"' in chunk
        assert await wire.chunk() == b": keep-alive\n\n"
        heard.set()
        assert (await wire.body()).endswith(b"data: [DONE]\n\n")
        wire.close()


async def test_the_official_client_reads_a_stream_with_signs_of_life() -> None:
    async def script(stage: Stage) -> None:
        await asyncio.sleep(0.1)
        stage.say([ord("a")])
        await asyncio.sleep(0.1)
        stage.say([EOS], finish="stop", stop_token=EOS)

    async with house(script) as h:
        h.app.generator.keep_alive_s = 0.01
        stream = await h.client.chat.completions.create(model="scripted", messages=MESSAGES, stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "a"


async def test_a_failure_after_a_sign_of_life_is_an_error_event() -> None:
    heard = asyncio.Event()

    async def script(stage: Stage) -> None:
        await heard.wait()
        stage.fail(EngineFailure("too late for a status"))

    async with house(script) as h:
        h.app.generator.keep_alive_s = 0.05
        wire = await h.stream("/v1/chat/completions", CHAT)
        await wire.head()
        assert await wire.chunk() == b": keep-alive\n\n"
        heard.set()
        last = (await wire.body()).decode().strip().split("\n\n")[-1]
        assert decoded(last)["error"]["message"] == "too late for a status"
        wire.close()


# --------------------------------------------------------------------------------------------------------- slow clients


async def test_what_waits_for_a_slow_client_leaves_as_one_chunk() -> None:
    """The engine makes more than all buffers between hold; the client then reads, and nothing is missing."""
    count, said = 4000, asyncio.Event()

    async def script(stage: Stage) -> None:
        for at in range(count):
            stage.say([*b"%07d " % at, *LONG * 400])
            await asyncio.sleep(0)
        said.set()
        stage.say([EOS], finish="stop", stop_token=EOS)

    async with house(script, max_model_len=1 << 30) as h:
        wire = await h.stream("/v1/completions", {**PLAIN, "max_tokens": 1 << 24})
        await wire.head()
        await said.wait()
        text = (await wire.body()).decode()
        wire.close()
        events = [json.loads(event[6:]) for event in text.split("\n\n") if event.startswith("data: {")]
        assert "".join(event["choices"][0]["text"] for event in events) == "".join(
            f"{at:07d} " + "<|im_start|>" * 400 for at in range(count)
        )
        assert len(events) < count
        assert h.app.metrics.merged.total > 0


# ------------------------------------------------------------------------------------------------------ leaving clients


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [forever, silence])
async def test_a_client_that_leaves_ends_the_engine_s_work_at_once(stream: bool, script: Any) -> None:
    async with house(script) as h:
        wire = await h.stream("/v1/chat/completions", {**CHAT, "n": 2, "stream": stream})
        await until(lambda: len(h.router.running) == 2)
        if stream and script is forever:
            await wire.head()
            await wire.chunk()
        wire.close()
        await until(lambda: not h.router.running)
        assert sorted(h.router.aborted) == sorted(request.id for request in h.router.requests)
        await until(lambda: h.app.in_flight == 0)
        assert h.app.metrics.outcomes["chat", "client_closed_request"] == 1


async def test_a_client_that_stops_reading_and_leaves_is_noticed() -> None:
    said = 0

    async def flood(stage: Stage) -> None:
        nonlocal said
        while True:
            stage.say(LONG * 1000)
            said += 12_000
            await asyncio.sleep(0)

    async with house(flood, max_model_len=1 << 30) as h:
        wire = await h.stream("/v1/completions", {**PLAIN, "max_tokens": 1 << 24})
        await wire.head()
        await until(lambda: said > 20_000_000)
        wire.close()
        await until(lambda: not h.router.running)
        assert len(h.router.aborted) == 1


async def test_the_official_client_closing_its_stream_ends_the_engine_s_work() -> None:
    async with house(forever) as h:
        stream = await h.client.chat.completions.create(model="scripted", messages=MESSAGES, stream=True)
        async for _ in stream:
            break
        await stream.close()
        await until(lambda: not h.router.running)
        assert len(h.router.aborted) == 1


async def test_a_client_that_is_gone_before_its_body_is_there_does_no_harm() -> None:
    async with house(saying("a")) as h:
        wire = await h.open("POST", "/v1/completions", b"{", content_type="application/json", content_length="100")
        await asyncio.sleep(0.05)
        wire.close()
        await until(lambda: h.app.metrics.outcomes["completions", "client_closed_request"] == 1)
        assert h.router.requests == []


async def test_many_clients_of_both_kinds_get_their_own_answers_while_others_leave() -> None:
    async def script(stage: Stage) -> None:
        for token in stage.request.prompt_ids:
            stage.say([token])
            await asyncio.sleep(0.001)
        stage.say([EOS], finish="stop", stop_token=EOS)

    async def one(h: House, at: int) -> None:
        prompt = f"request number {at} says this"
        if at % 4 == 3:
            wire = await h.stream("/v1/completions", {"prompt": prompt})
            await wire.head()
            wire.close()
        elif at % 2:
            answer = await h.client.completions.create(model="scripted", prompt=prompt, max_tokens=99)
            assert answer.choices[0].text == prompt
        else:
            stream = await h.client.completions.create(model="scripted", prompt=prompt, max_tokens=99, stream=True)
            assert "".join([chunk.choices[0].text async for chunk in stream]) == prompt

    async with house(script) as h:
        await asyncio.gather(*(one(h, at) for at in range(64)))
        await until(lambda: h.app.in_flight == 0)
        assert not h.router.running
        assert h.app.metrics.outcomes["completions", "ok"] == 48


async def test_a_connection_serves_one_request_after_the_other() -> None:
    async with house(saying("ok")) as h:
        wire = await h.open("GET", "/health", connection="keep-alive")
        await wire.head()
        await wire.body()
        body = json.dumps({"prompt": "x", "stream": True}).encode()
        for _ in range(3):
            wire.writer.write(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\n\r\n%b" % (len(body), body)
            )
            await wire.head()
            assert (await wire.body()).endswith(b"data: [DONE]\n\n")
        wire.close()
        assert h.router.aborted == []
