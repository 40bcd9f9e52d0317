"""The HTTP surface through the official client and raw requests, before a router that plays a script."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.unit.front_house import EOS, MESSAGES, house, saying
from tests.unit.scripted import ScriptedRouter, Stage, byte_tokenizer

from slipstream.config import FrontConfig
from slipstream.errors import EngineFailure, NoWorkers, QueueFull
from slipstream.front.answer import Answer
from slipstream.front.ask import Telling
from slipstream.front.metrics import FrontMetrics
from slipstream.front.record import LINES_A_SECOND, Record
from slipstream.front.shapes import CompletionShape
from slipstream.types import Logprob

# ----------------------------------------------------------------------------------------------------- whole answers


async def test_a_chat_is_answered_with_text_and_usage() -> None:
    async with house(saying("Grüße 🎉", cached=5)) as h:
        answer = await h.client.chat.completions.create(model="scripted", messages=MESSAGES)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "Grüße 🎉", "stop")
    assert answer.model == "scripted"
    assert answer.object == "chat.completion"
    assert answer.usage is not None
    prompt = byte_tokenizer().encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len("Grüße 🎉".encode()) + 1
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 5
    assert h.router.requests[0].prompt_ids == prompt
    assert h.router.requests[0].sampling.max_tokens == 4096 - len(prompt)


async def test_an_answer_that_reaches_its_limit_says_length() -> None:
    async with house(saying("abc", finish="length")) as h:
        answer = await h.client.chat.completions.create(model="scripted", messages=MESSAGES, max_tokens=3)
    assert answer.choices[0].finish_reason == "length"
    assert h.router.requests[0].sampling.max_tokens == 3


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [("ab", [[97, 98]]), (["a", "b"], [[97], [98]]), ([1, 2, 3], [[1, 2, 3]]), ([[1, 2], [3]], [[1, 2], [3]])],
)
async def test_completions_take_all_forms_of_prompts(prompt: Any, ids: list[list[int]]) -> None:
    async with house(saying("xy")) as h:
        answer = await h.client.completions.create(model="scripted", prompt=prompt)
    assert [request.prompt_ids for request in h.router.requests] == ids
    assert [request.sampling.max_tokens for request in h.router.requests] == [16] * len(ids)
    assert [(choice.index, choice.text) for choice in answer.choices] == [(at, "xy") for at in range(len(ids))]


async def test_several_choices_of_several_prompts_come_in_order_with_seeds_of_their_own() -> None:
    async def script(stage: Stage) -> None:
        prompt, seed = stage.request.prompt_ids[0], stage.request.sampling.seed
        await asyncio.sleep(0.01 if seed == 7 else 0)  # the first choice is the last to finish
        stage.say([prompt, ord(str(seed % 10))], finish="length", cached_tokens=1)

    async with house(script) as h:
        answer = await h.client.completions.create(model="scripted", prompt=["a", "b"], n=2, seed=7)
    assert [choice.text for choice in answer.choices] == ["a7", "a8", "b7", "b8"]
    assert len({request.id for request in h.router.requests}) == 4
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 8)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2


async def test_a_stop_string_ends_the_answer_and_the_engine_s_work() -> None:
    async def script(stage: Stage) -> None:
        for byte in b"one END two" * 100:
            stage.say([byte])
            await asyncio.sleep(0)

    async with house(script) as h:
        answer = await h.client.chat.completions.create(model="scripted", messages=MESSAGES, stop=["END", "zzz"])
        shown = await h.client.chat.completions.create(
            model="scripted", messages=MESSAGES, stop="END", extra_body={"include_stop_str_in_output": True}
        )
        assert h.router.aborted == [request.id for request in h.router.requests]
        assert h.router.finished_here == ["stop", "stop"]
        assert h.router.running == set()
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("one ", "stop")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len("one END")
    assert shown.choices[0].message.content == "one END"


async def test_the_text_of_a_stop_token_is_only_shown_when_asked_for() -> None:
    async def script(stage: Stage) -> None:
        stage.say(list(b"ab"))
        stage.say([ord("!")], finish="stop", stop_token=ord("!"))

    async with house(script) as h:
        plain = await h.client.completions.create(model="scripted", prompt="p", extra_body={"stop_token_ids": [33]})
        shown = await h.client.completions.create(
            model="scripted", prompt="p", extra_body={"stop_token_ids": [33], "include_stop_str_in_output": True}
        )
    assert (plain.choices[0].text, shown.choices[0].text) == ("ab", "ab!")
    assert plain.usage is not None
    assert plain.usage.completion_tokens == 3


async def test_chat_log_probabilities_list_each_token_with_its_rivals() -> None:
    async def script(stage: Stage) -> None:
        first = Logprob(-0.5, [ord("h"), 0xC3], [-0.5, -1.5])
        second = Logprob(float("-inf"), [ord("i"), EOS], [-0.1, float("-inf")])
        stage.say(list(b"hi"), logprobs=[first, second], finish="length")

    async with house(script) as h:
        answer = await h.client.chat.completions.create(
            model="scripted", messages=MESSAGES, logprobs=True, top_logprobs=2
        )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    one, two = logprobs.content
    assert (one.token, one.logprob, one.bytes) == ("h", -0.5, [104])
    assert [(top.token, top.logprob, top.bytes) for top in one.top_logprobs] == [
        ("h", -0.5, [104]), ("bytes:\\xc3", -1.5, [0xC3]),
    ]  # fmt: skip
    assert two.logprob == -9999.0
    assert two.top_logprobs[1].token == "<|end|>"


async def test_completion_log_probabilities_with_echo_cover_the_prompt() -> None:
    """What evaluation harnesses read: tokens, their log-probabilities, the likeliest ones, where each begins."""

    async def script(stage: Stage) -> None:
        prompt = [None, Logprob(-2.0, [ord("b")], [-0.3])]
        stage.say([ord("c")], logprobs=[Logprob(-0.1, [ord("c")], [-0.1])], finish="length", prompt_logprobs=prompt)

    async with house(script) as h:
        answer = await h.client.completions.create(
            model="scripted", prompt="éa"[1:] + "x", logprobs=1, echo=True, max_tokens=1
        )
    assert h.router.requests[0].sampling.prompt_logprobs == 1
    (choice,) = answer.choices
    assert choice.text == "axc"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["a", "x", "c"]
    assert choice.logprobs.token_logprobs == [None, -2.0, -0.1]
    assert choice.logprobs.top_logprobs == [None, {"b": -0.3, "x": -2.0}, {"c": -0.1}]
    assert choice.logprobs.text_offset == [0, 1, 2]


async def test_echo_with_no_tokens_asked_for_is_the_prompt_alone() -> None:
    async def script(stage: Stage) -> None:
        stage.say([ord("z")], finish="length", prompt_logprobs=[None, Logprob(-1.0)], logprobs=[Logprob(-1.0)])

    async with house(script) as h:
        answer = await h.client.completions.create(model="scripted", prompt="ab", logprobs=0, echo=True, max_tokens=0)
        with pytest.raises(openai.BadRequestError, match="0 only together with echo"):
            await h.client.completions.create(model="scripted", prompt="ab", max_tokens=0)
    assert answer.choices[0].text == "ab"
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.token_logprobs == [None, -1.0]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


async def test_token_ids_are_returned_when_asked_for() -> None:
    async with house(saying("ab")) as h:
        _, chat, _ = await h.post("/v1/chat/completions", {"messages": MESSAGES, "return_token_ids": True})
        _, completion, _ = await h.post("/v1/completions", {"prompt": [9, 8], "return_token_ids": True})
    assert chat["choices"][0]["token_ids"] == [97, 98, EOS]
    assert chat["prompt_token_ids"] == h.router.requests[0].prompt_ids
    assert completion["choices"][0]["prompt_token_ids"] == [9, 8]


async def test_the_keys_that_clients_require_are_always_there() -> None:
    async with house(saying("a")) as h:
        _, chat, _ = await h.post("/v1/chat/completions", {"messages": MESSAGES})
        _, completion, _ = await h.post("/v1/completions", {"prompt": "x"})
    assert set(chat) == {"id", "object", "created", "model", "choices", "usage"}
    assert set(chat["choices"][0]) == {"index", "message", "logprobs", "finish_reason"}
    assert set(chat["choices"][0]["message"]) == {"role", "content", "refusal"}
    assert set(completion["choices"][0]) == {"index", "text", "logprobs", "finish_reason"}
    assert chat["id"].startswith("chatcmpl-")
    assert completion["id"].startswith("cmpl-")


async def test_a_long_prompt_is_tokenized_while_the_front_goes_on() -> None:
    async with house(saying("a"), max_model_len=3_000_000) as h:
        text = "word " * 200_000
        answer = await h.client.completions.create(model="scripted", prompt=text)
    assert h.router.requests[0].prompt_ids == list(text.encode())
    assert answer.choices[0].text == "a"


# -------------------------------------------------------------------------------------------------------------- errors


async def test_errors_have_the_form_that_clients_understand() -> None:
    async with house(saying("a"), max_model_len=64) as h:
        with pytest.raises(openai.BadRequestError) as wrong:
            await h.client.chat.completions.create(model="scripted", messages=MESSAGES, temperature=3)
        with pytest.raises(openai.BadRequestError) as long:
            await h.client.chat.completions.create(model="scripted", messages=MESSAGES, max_tokens=50)
        with pytest.raises(openai.NotFoundError) as unknown:
            await h.client.chat.completions.create(model="gpt-9", messages=MESSAGES)
    assert (wrong.value.code, wrong.value.param, wrong.value.type) == (
        "invalid_value", "temperature", "invalid_request_error",
    )  # fmt: skip
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "max_tokens")
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    assert "'scripted' is" in unknown.value.message


async def test_a_prompt_that_cannot_fit_is_refused_without_tokenizing_it() -> None:
    async with house(saying("a"), max_model_len=64) as h:
        with pytest.raises(openai.BadRequestError, match=r"12000 characters, .*at least 1000 tokens.*64") as plain:
            await h.client.completions.create(model="scripted", prompt="x" * 12_000)
        with pytest.raises(openai.BadRequestError, match="characters"):
            await h.client.chat.completions.create(
                model="scripted", messages=[{"role": "user", "content": "x" * 12_000}]
            )
    assert plain.value.code == "context_length_exceeded"


async def test_one_request_asks_for_so_many_answers_at_most() -> None:
    async with house(saying("a")) as h:
        with pytest.raises(openai.BadRequestError, match=r"100 prompts with n=100 are 10000 answers"):
            await h.client.completions.create(model="scripted", prompt=["x"] * 100, n=100)
        assert h.router.requests == []


@pytest.mark.parametrize(
    ("failure", "status", "retry"), [(QueueFull("full"), 429, "1"), (NoWorkers("nobody"), 503, "1")]
)
async def test_a_refusal_of_the_router_says_when_to_come_again(failure: Any, status: int, retry: str) -> None:
    async with house(saying("a")) as h:
        h.router.refusal = failure
        got, body, headers = await h.post("/v1/chat/completions", {"messages": MESSAGES})
        streamed, _, _ = await h.post("/v1/chat/completions", {"messages": MESSAGES, "stream": True})
    assert (got, streamed) == (status, status)
    assert headers["retry-after"] == retry
    assert body["error"]["code"] == failure.code
    assert body["error"]["message"] == failure.message


async def test_an_error_before_the_first_token_has_its_own_status_also_for_a_stream() -> None:
    async def script(stage: Stage) -> None:
        stage.fail(EngineFailure("the worker fell over"))

    async with house(script) as h:
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError, match="the worker fell over") as caught:
                await h.client.chat.completions.create(model="scripted", messages=MESSAGES, stream=stream)
            assert caught.value.code == "engine_failure"


async def test_an_answer_that_the_worker_gives_up_is_an_error_and_not_a_short_answer() -> None:
    async with house(saying("ab", finish="abort")) as h:
        with pytest.raises(openai.InternalServerError):
            await h.client.chat.completions.create(model="scripted", messages=MESSAGES)


async def test_the_failure_of_one_choice_ends_the_others() -> None:
    async def script(stage: Stage) -> None:
        if stage.request.id.endswith("-1"):
            stage.fail(EngineFailure("choice 1"))
        await asyncio.sleep(60)

    async with house(script) as h:
        with pytest.raises(openai.InternalServerError, match="choice 1"):
            await h.client.chat.completions.create(model="scripted", messages=MESSAGES, n=3)
        assert sorted(h.router.aborted) == sorted(r.id for r in h.router.requests if not r.id.endswith("-1"))


async def test_a_refusal_of_the_second_choice_takes_back_the_first() -> None:
    async with house(saying("a")) as h:
        submit = h.router.submit

        def once(request: Any, sink: Any) -> None:
            submit(request, sink)
            h.router.refusal = QueueFull("full")

        h.router.submit = once  # type: ignore[method-assign]
        status, _, _ = await h.post("/v1/completions", {"prompt": "a", "n": 2})
        assert status == 429
        assert len(h.router.aborted) == 1


@pytest.mark.parametrize(
    ("method", "path", "data", "kind", "status", "code"),
    [
        ("GET", "/nothing", b"", "", 404, "not_found"),
        ("GET", "/v1/chat/completions", b"", "", 405, "method_not_allowed"),
        ("POST", "/v1/models/x", b"", "", 405, "method_not_allowed"),
        ("PATCH", "/health", b"", "", 405, "method_not_allowed"),
        ("POST", "/v1/completions", b"{", "application/json", 400, "invalid_value"),
        ("POST", "/v1/completions", b"{}", "text/plain", 415, "unsupported_media_type"),
        ("POST", "/v1/completions", b"a=b", "application/x-www-form-urlencoded", 415, "unsupported_media_type"),
        ("POST", "/v1/completions", b" " * 2000, "application/json", 413, "request_too_large"),
        ("GET", "/v1/models/gpt-9", b"", "", 404, "model_not_found"),
        ("DELETE", "/workers/nobody", b"", "", 404, "not_found"),
    ],
)
async def test_every_error_is_json(method: str, path: str, data: bytes, kind: str, status: int, code: str) -> None:
    async with house(saying("a"), config=FrontConfig(port=0, max_body_bytes=1024)) as h:
        got, body, headers = await h.request(method, path, data, content_type=kind)
        assert got == status
        assert set(body["error"]) == {"message", "type", "param", "code"}
        assert body["error"]["code"] == code
        assert ("allow" in headers) == (status == 405)


async def test_the_paths_that_are_listed_are_those_of_the_page_but_for_what_only_the_dashboard_asks_for() -> None:
    page = (Path(__file__).parents[2] / "docs" / "http-api.md").read_text()
    async with house(saying("a")) as h:
        _, body, _ = await h.request("GET", "/nothing", b"", content_type="")
    listed = body["error"]["message"].partition("the paths are ")[2].split(", ")
    assert "/v1/chat/completions" in listed
    assert "/v1/models/{id}" in listed
    assert [path for path in listed if not re.search(rf"(GET|POST|DELETE) {re.escape(path)}[`?]", page)] == []
    assert [path for path in listed if path.startswith("/dashboard/") or path == "/"] == []


async def test_a_body_without_announced_length_is_limited_too() -> None:
    async with house(saying("a"), config=FrontConfig(port=0, max_body_bytes=2048)) as h:
        wire = await h.open("POST", "/v1/completions", content_type="application/json", transfer_encoding="chunked")
        for _ in range(3):
            wire.writer.write(b"3e8\r\n" + b" " * 1000 + b"\r\n")
        await wire.head()
        assert wire.status == 413
        wire.close()


@pytest.mark.parametrize(
    ("path", "kind", "status"),
    [
        ("/v1/completions", "application/json", 413),
        ("/v1/completions", "text/plain", 415),
        ("/nothing", "application/json", 404),
        ("/health", "application/json", 405),
    ],
)
async def test_who_is_still_sending_gets_the_refusal_and_may_use_the_connection_again(
    path: str, kind: str, status: int
) -> None:
    async with house(saying("a"), config=FrontConfig(port=0, max_body_bytes=1024)) as h:
        size = 20 << 20
        wire = await h.open("POST", path, content_type=kind, content_length=str(size), connection="keep-alive")
        for _ in range(20):
            wire.writer.write(b" " * (1 << 20))
            await wire.writer.drain()
        await wire.head()
        assert (wire.status, wire.headers.get("connection")) == (status, None)
        assert json.loads(await wire.body())["error"]["message"]
        wire.writer.write(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
        await wire.head()
        assert wire.status == 200
        wire.close()


async def test_a_refused_body_is_not_waited_for_without_end_and_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.front.exchange.DISCARDED", 1 << 20)
    async with house(saying("a"), config=FrontConfig(port=0, max_body_bytes=1024)) as h:
        announced: dict[str, str] = {"content_type": "application/json", "content_length": str(1 << 30)}
        for headers, sent in (({}, 0), ({}, 2 << 20), ({"expect": "100-continue"}, 0)):
            wire = await h.open("POST", "/v1/completions", b"", **announced, **headers)
            wire.writer.write(b" " * sent)
            await wire.head()
            assert (wire.status, wire.headers["connection"]) == (413, "close")
            wire.close()


async def test_a_bug_is_answered_as_json_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with house(saying("a")) as h:

        def broken(request: Any, sink: Any) -> None:
            raise RuntimeError("a bug")

        h.router.submit = broken  # type: ignore[method-assign]
        status, body, _ = await h.post("/v1/completions", {"prompt": "x"})
    assert status == 500
    assert "a bug" not in body["error"]["message"]
    assert "a bug" in caplog.text


async def test_the_api_key_is_asked_for_everywhere_but_at_the_probes() -> None:
    async with house(saying("a"), config=FrontConfig(port=0, api_key="secret")) as h:
        await h.client.models.list()
        wrongs: list[dict[str, str]] = [
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "secret"},
            {"authorization": "Basic x"},
        ]
        for wrong in wrongs:
            for path in ("/v1/models", "/workers", "/nothing"):
                status, body, headers = await h.request("GET", path, b"", **wrong)
                assert (status, body["error"]["code"]) == (401, "invalid_api_key")
                assert headers["www-authenticate"] == "Bearer"
        for path in ("/health", "/metrics", "/version"):
            assert (await h.request("GET", path))[0] == 200


async def test_the_request_id_comes_back_or_is_made() -> None:
    async with house(saying("a")) as h:
        body = {"messages": MESSAGES}
        _, _, given = await h.post("/v1/chat/completions", body, **{"x-request-id": "mine-1"})
        _, _, made = await h.post("/v1/chat/completions", body)
        _, _, foul = await h.post("/v1/chat/completions", body, **{"x-request-id": "a\tb"})
    assert given["x-request-id"] == "mine-1"
    assert len(made["x-request-id"]) == 24
    assert foul["x-request-id"] != "a\tb"


async def test_no_other_site_may_read_answers() -> None:
    async with house(saying("a")) as h:
        _, _, headers = await h.request("GET", "/health", origin="http://elsewhere.example")
        assert not [name for name in headers if name.startswith("access-control")]
        status, _, _ = await h.request("OPTIONS", "/v1/completions", origin="http://elsewhere.example")
        assert status == 405


# ------------------------------------------------------------------------------------------------------------ the log


async def test_each_answer_is_one_line_with_its_request_id(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="slipstream.front.record")
    async with house(saying("abc", cached=5)) as h:
        await h.client.chat.completions.create(
            model="scripted", messages=MESSAGES, extra_headers={"X-Request-ID": "mine-1"}
        )
    (record,) = [record for record in caplog.records if record.name == "slipstream.front.record"]
    line = record.getMessage()
    assert re.match(r"request mine-1 \(chatcmpl-[0-9a-f]{24}\): scripted, ", line)
    assert (record.__dict__["request_id"], record.__dict__["outcome"]) == ("mine-1", "stop")
    assert "(5 cached), 4 tokens, first after " in line
    assert line.endswith("s in all: stop")


async def test_a_flood_of_answers_is_not_a_flood_of_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="slipstream.front.record")
    record = Record()
    shape = CompletionShape("cmpl-1", 0, "m", Telling(), byte_tokenizer())
    answer = Answer(
        shape=shape,
        telling=shape.telling,
        tokenizer=shape.tokenizer,
        backend=ScriptedRouter(saying("")),
        metrics=FrontMetrics(),
        started=0.0,
    )
    asked = 10 * LINES_A_SECOND
    for number in range(asked):
        record.request(f"r{number}", "m", answer)
    lines = [entry for entry in caplog.records if entry.name == "slipstream.front.record"]
    assert 0 < len(lines) <= asked // 2  # even if a second begins in between, and then some
