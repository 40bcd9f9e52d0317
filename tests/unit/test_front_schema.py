"""What a request body may hold, and what is said about one that is wrong."""

from __future__ import annotations

import asyncio
import json
import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.unit.scripted import ScriptedRouter, byte_tokenizer

from slipstream.errors import ContextTooLong, InvalidRequest
from slipstream.front.app import create_app
from slipstream.front.ask import Ask, answer_tokens, ask_of, checked_sampling, messages_of, prompts_of
from slipstream.front.schema import (
    ASKS_NOTHING,
    BodyDecoder,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    StreamOptions,
    TokenizeBody,
    WorkerBody,
    allowed,
    explain,
)
from slipstream.front.service import TokenizerService
from slipstream.types import SamplingParams

TOKENIZER = byte_tokenizer()
CHAT = BodyDecoder(ChatBody)
COMPLETION = BodyDecoder(CompletionBody)
MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> Ask:
    return ask_of(CHAT(json.dumps({"messages": MESSAGES, **fields}).encode()), TOKENIZER)


def completion(**fields: Any) -> Ask:
    return ask_of(COMPLETION(json.dumps({"prompt": "hi", **fields}).encode()), TOKENIZER)


def refused(call: Any, **fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        call(**fields)
    return caught.value


# --------------------------------------------------------------------------------------------------------------- fields


def test_every_field_reaches_the_engine() -> None:
    ask = chat(
        temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, repetition_penalty=1.1, presence_penalty=0.2,
        frequency_penalty=-0.3, seed=7, logit_bias={"65": 5, "66": -100}, stop_token_ids=[10], max_tokens=20,
        min_tokens=3, ignore_eos=True, logprobs=True, top_logprobs=2, n=3, priority=-1, cache_salt="mine",
    )  # fmt: skip
    assert ask.sampling == SamplingParams(
        temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, repetition_penalty=1.1, presence_penalty=0.2,
        frequency_penalty=-0.3, seed=7, logit_bias={65: 5.0, 66: -100.0}, stop_token_ids=(10,), min_tokens=3,
        ignore_eos=True, logprobs=2,
    )  # fmt: skip
    assert (ask.n, ask.priority, ask.cache_salt, ask.max_tokens) == (3, -1, "mine", 20)


def test_a_bare_request_gets_the_defaults_of_the_api() -> None:
    ask = chat()
    assert msgspec.structs.replace(ask.sampling, seed=0) == SamplingParams()
    assert (ask.n, ask.max_tokens, ask.telling.stop, ask.telling.stream) == (1, None, (), False)


def test_the_model_s_recommendations_come_before_the_api_s_defaults_and_behind_the_request() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.sampling_defaults = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    body = CHAT(json.dumps({"messages": MESSAGES, "top_p": 0.5}).encode())
    sampling = ask_of(body, tokenizer).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.6, 0.5, 20, 0.0)


def test_zero_is_a_value_and_not_an_absence() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.sampling_defaults = {"temperature": 0.6, "top_k": 20}
    body = CHAT(json.dumps({"messages": MESSAGES, "temperature": 0, "top_k": 0}).encode())
    assert ask_of(body, tokenizer).sampling.temperature == 0.0
    assert ask_of(body, tokenizer).sampling.top_k == 0


def test_without_a_seed_two_requests_differ_and_with_one_they_do_not() -> None:
    assert chat().sampling.seed != chat().sampling.seed
    assert chat(seed=-5).sampling.seed == chat(seed=-5).sampling.seed >= 0


def test_null_is_the_same_as_absent_for_every_optional_field() -> None:
    fields = {name: None for name in ChatBody.__struct_fields__ if name != "messages"}
    bare = chat()
    assert msgspec.structs.replace(chat(**fields).sampling, seed=0) == msgspec.structs.replace(bare.sampling, seed=0)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 0}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
    ],
)
def test_chat_log_probabilities_are_asked_for_by_a_flag_and_a_count(fields: dict[str, Any], expected: int) -> None:
    assert chat(**fields).telling.logprobs == expected


def test_completion_log_probabilities_of_zero_alternatives_are_still_asked_for() -> None:
    assert completion(logprobs=0).telling.logprobs == 0
    assert completion().telling.logprobs is None
    assert completion(logprobs=0, echo=True).sampling.prompt_logprobs == 0
    assert completion(logprobs=2).sampling.prompt_logprobs is None


def test_stop_is_a_string_or_a_list() -> None:
    assert chat(stop="a").telling.stop == ("a",)
    assert chat(stop=["a", "b"]).telling.stop == ("a", "b")
    assert chat(stop=[]).telling.stop == ()


def test_both_names_of_the_token_limit_work_and_may_agree() -> None:
    assert chat(max_completion_tokens=5).max_tokens == 5
    assert chat(max_completion_tokens=5, max_tokens=5).max_tokens == 5
    error = refused(chat, max_completion_tokens=5, max_tokens=6)
    assert "max_tokens (6) and max_completion_tokens (5)" in error.message


def test_bookkeeping_of_providers_is_accepted() -> None:
    chat(user="me", metadata={"a": "b"}, store=True, service_tier="auto", parallel_tool_calls=False)
    completion(user="me")


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"temperature": 2.1}, "temperature", "temperature must be a number from 0 to 2; 2.1 was given"),
        ({"temperature": "hot"}, "temperature", 'from 0 to 2; "hot" was given'),
        ({"top_p": 0}, "top_p", "a number over 0, up to 1; 0 was given"),
        ({"n": 0}, "n", "an integer from 1 to 128; 0 was given"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_tokens": 1.5}, "max_tokens", "an integer of at least 1; 1.5 was given"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
        ({"stop": [""]}, "stop", "1 to 1024 characters"),
        ({"stop": ["a"] * 17}, "stop", "up to 16 strings"),
        ({"seed": 2**70}, "seed", "a 64-bit integer"),
        ({"presence_penalty": -3}, "presence_penalty", "from -2 to 2; -3 was given"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "maps token ids to numbers"),
        ({"logit_bias": {"5000": 1}}, "logit_bias", "token ids are 0 to 258; 5000 was given"),
        ({"stop_token_ids": [259]}, "stop_token_ids", "token ids are 0 to 258; 259 was given"),
        ({"top_logprobs": 3}, "top_logprobs", "together with logprobs=true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "from 0 to 20; 21 was given"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens", "min_tokens (6) must not exceed max_tokens (5)"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "together with stream=true"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "stream_options.usage"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "true or false; 1"),
        ({"temprature": 1}, "temprature", "did you mean temperature?"),
        ({"wombat": 1}, "wombat", "unknown field wombat; docs/http-api.md"),
        ({"messages": []}, "messages", "at least one message; [] was given"),
        ({"messages": "hi"}, "messages", 'at least one message; "hi" was given'),
        ({"cache_salt": ""}, "cache_salt", "1 to 256 characters"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs", "an object; [1] was given"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named_with_what_was_given_and_what_is_allowed(
    fields: dict[str, Any], param: str, words: str
) -> None:
    error = refused(chat, **fields)
    assert error.param == param
    assert words in error.message


@pytest.mark.parametrize("name", sorted(ASKS_NOTHING))
def test_a_feature_that_does_not_exist_is_refused_by_name_and_its_empty_values_are_not(name: str) -> None:
    feature, harmless = ASKS_NOTHING[name]
    call = chat if name in ChatBody.__struct_fields__ else completion
    error = refused(call, **{name: {"something": "else"}})
    assert error.param == name
    assert feature in error.message
    for value in (None, [], {}, "", False, *harmless):
        call(**{name: value})


def test_tools_are_harmless_when_none_may_be_chosen() -> None:
    chat(tools=[{"type": "function"}], tool_choice="none")
    assert refused(chat, tools=[{"type": "function"}], tool_choice="auto").param == "tools"
    assert refused(chat, tool_choice="required").param == "tool_choice"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"messages": []} x', "not valid JSON"),
        (b'{"temperature": 5, "user": }', "not valid JSON"),
        (b'{"messages": [{}], "user": "\xff"}', "not valid JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[1]", "must be a JSON object; [1] was given"),
        (b"{}", "messages is missing"),
    ],
)
def test_a_body_that_is_no_json_object_is_told_so(body: bytes, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words.replace("[", r"\[").replace("]", r"\]")):
        CHAT(body)


@pytest.mark.parametrize("kind", [ChatBody, CompletionBody, StreamOptions, TokenizeBody, DetokenizeBody, WorkerBody])
def test_every_field_can_say_what_it_allows(kind: type[msgspec.Struct]) -> None:
    for name, hint in typing.get_type_hints(kind).items():
        if hint is not Any and name != "prompt":
            error = explain(json.dumps({name: [[]]}).encode(), kind, f"Expected `x` - at `$.{name}`")
            assert "of another type" not in error.message, name


# ------------------------------------------------------------------------------------------------------------- messages


def messages(*given: Any, template: str = "tool_calls") -> list[dict[str, Any]]:
    return messages_of(given, template)


def test_text_parts_become_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert messages({"role": "user", "content": parts}) == [{"role": "user", "content": "a\nb"}]


def test_developer_messages_are_system_messages_to_the_template() -> None:
    assert messages({"role": "developer", "content": "x"})[0]["role"] == "system"


def test_earlier_tool_calls_reach_a_template_that_knows_them_as_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    (kept,) = messages({"role": "assistant", "content": None, "tool_calls": [call]})
    assert kept["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert kept["content"] == ""
    with pytest.raises(InvalidRequest, match="knows nothing of tool calls"):
        messages({"role": "assistant", "content": None, "tool_calls": [call]}, template="{{ messages }}")


@pytest.mark.parametrize(
    ("message", "param", "words"),
    [
        ("hi", "messages[1]", 'an object with role and content; "hi" was given'),
        ({"content": "a"}, "messages[1].role", "one of system, developer, user"),
        ({"role": "boss", "content": "a"}, "messages[1].role", '"boss" was given'),
        ({"role": "user"}, "messages[1].content", "a string or a list of text parts; null"),
        ({"role": "user", "content": []}, "messages[1].content", "a list of text parts"),
        ({"role": "user", "content": 5}, "messages[1].content", "5 was given"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0]", '"text": "..."'),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            "messages[1].content[0]",
            '"image_url"',
        ),
        ({"role": "user", "content": "a", "mood": 1}, "messages[1].mood", "unknown field messages[1].mood"),
        ({"role": "assistant", "content": "a", "audio": {"id": "x"}}, "messages[1].audio", "not supported"),
        ({"role": "assistant", "tool_calls": ["x"]}, "messages[1].tool_calls", "a list of tool calls"),
        ({"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}, "messages[1].tool_calls", "JSON"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"arguments": "[" * 100_000}}]},
            "messages[1].tool_calls",
            "JSON",
        ),
    ],
)
def test_a_wrong_message_is_named_by_its_place(message: Any, param: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        messages({"role": "user", "content": "fine"}, message)
    assert caught.value.param == param
    assert words in caught.value.message


# -------------------------------------------------------------------------------------------------------------- prompts


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1, 2], [3]], [[1, 2], [3]])],
)
def test_a_prompt_has_four_forms(prompt: Any, prompts: list[Any]) -> None:
    assert prompts_of(prompt) == prompts


@pytest.mark.parametrize("prompt", [None, [], 5, ["a", 1], [[]], [[1], "a"], [1.5], [True], {"a": 1}, [[1], []]])
def test_any_other_form_is_refused_with_the_four(prompt: Any) -> None:
    with pytest.raises(InvalidRequest, match="a string, a list of strings, a list of token ids") as caught:
        prompts_of(prompt)
    assert caught.value.param == "prompt"


# -------------------------------------------------------------------------------------------------------------- lengths


def test_an_answer_without_limit_has_what_the_context_leaves_or_the_configured_number() -> None:
    assert answer_tokens(30, chat(), 100, default=0) == 70
    assert answer_tokens(30, chat(), 100, default=16) == 16
    assert answer_tokens(90, chat(), 100, default=16) == 10


def test_a_request_beyond_the_context_is_refused_with_the_three_numbers() -> None:
    with pytest.raises(
        ContextTooLong, match=r"prompt has 30 tokens.*max_tokens is 71, together 101.*100 tokens"
    ) as one:
        answer_tokens(30, chat(max_tokens=71), 100, default=0)
    assert one.value.param == "max_tokens"
    with pytest.raises(ContextTooLong, match="prompt has 100 tokens") as other:
        answer_tokens(100, chat(), 100, default=0)
    assert "max_tokens" not in other.value.message, "nothing was said of it"
    assert other.value.param == "messages"
    with pytest.raises(ContextTooLong) as completion:
        answer_tokens(101, chat(), 100, default=16, param="prompt")
    assert completion.value.param == "prompt"
    assert answer_tokens(30, chat(max_tokens=70), 100, default=0) == 70


# ------------------------------------------------------------------------------------------------------- documentation

PAGE = Path(__file__).parents[2] / "docs" / "http-api.md"


@pytest.mark.parametrize("kind", [ChatBody, CompletionBody])
def test_the_page_describes_every_field_in_the_words_of_its_errors(kind: type[msgspec.Struct]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name, hint in typing.get_type_hints(kind).items():
        if name == "prompt" or hint is Any:
            assert f"`{name}`" in page, name
        else:
            assert f"| `{name}` | {allowed(kind, name)} |" in page, name


def test_the_page_lists_every_path_and_every_metric() -> None:
    page = PAGE.read_text(encoding="utf-8")
    app = create_app(ScriptedRouter(lambda stage: asyncio.sleep(0)), TokenizerService(tokenizer=TOKENIZER))
    for path in app.paths:
        assert path in page
    metrics = (PAGE.parent / "metrics.md").read_text(encoding="utf-8")
    for family in app.metrics.collect():
        assert family.name in metrics


# ------------------------------------------------------------------------------------------------- sampling from Python


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1.0), ("temperature", 2.1), ("temperature", float("nan")), ("top_p", 0.0), ("top_p", 1.5),
        ("top_k", -2), ("min_p", 1.1), ("repetition_penalty", 0.0), ("presence_penalty", 3.0),
        ("frequency_penalty", -3.0), ("seed", 1 << 64), ("logit_bias", {65: 101.0}), ("logit_bias", {1 << 30: 1.0}),
        ("stop_token_ids", (-1,)), ("stop_token_ids", (1 << 30,)), ("max_tokens", 0), ("max_tokens", -1),
        ("min_tokens", -1), ("min_tokens", 17), ("logprobs", 21), ("prompt_logprobs", -1),
    ],
)  # fmt: skip
def test_parameters_of_python_have_the_bounds_of_the_api(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        checked_sampling(SamplingParams(**{name: value}), TOKENIZER)
    assert caught.value.param == name.removeprefix("prompt_")


def test_what_the_api_refuses_is_refused_in_python_in_the_same_words() -> None:
    for name, value in (("temperature", 3.5), ("top_p", 1.5), ("min_tokens", -1), ("repetition_penalty", 11.0)):
        with pytest.raises(InvalidRequest) as caught:
            checked_sampling(SamplingParams(**{name: value}), TOKENIZER)
        assert caught.value.message == refused(chat, **{name: value}).message


def test_parameters_of_python_reach_a_worker_as_it_takes_them() -> None:
    assert checked_sampling(SamplingParams(), TOKENIZER) == SamplingParams()
    assert checked_sampling(SamplingParams(top_k=-1, seed=-1), TOKENIZER) == SamplingParams(seed=(1 << 63) - 1)


@pytest.mark.parametrize("call", [chat, completion])
@pytest.mark.parametrize("number", [1 << 70, -(1 << 70), 10**20])
def test_a_number_that_no_message_can_carry_is_refused_in_every_field(call: Any, number: int) -> None:
    """Whatever gets through to the engine has to be encodable; only the context bounds max_tokens."""
    body = ChatBody if call is chat else CompletionBody
    for field in msgspec.structs.fields(body):
        try:
            ask = call(**{field.encode_name: number})
        except InvalidRequest:
            continue
        if field.encode_name not in ("max_tokens", "max_completion_tokens"):
            msgspec.msgpack.encode(ask.sampling)
