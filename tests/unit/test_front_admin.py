"""Models, health, metrics, tokens, workers."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.unit.front_house import MESSAGES, House, house, saying, until
from tests.unit.scripted import ScriptedCard, ScriptedRouter, byte_tokenizer

from slipstream.config import FrontConfig
from slipstream.errors import ModelError, NoWorkers
from slipstream.front.app import create_app
from slipstream.front.server import running
from slipstream.front.service import TokenizerService
from slipstream.version import __version__


async def test_health_is_200_only_when_a_request_would_be_answered() -> None:
    async with house(saying("a")) as h:
        assert (await h.request("GET", "/health"))[:2] == (200, {"status": "ok"})
        assert (await h.request("HEAD", "/health"))[0] == 200
        h.router.ready = False
        status, body, headers = await h.request("GET", "/health")
        assert status == 503
        assert headers["retry-after"] == "1"
        assert "no pair of prefill and decode workers" in body["reasons"][0]
        assert body["reasons"][1:] == []
        h.router.urls, h.router.problems = {"http://a": None, "http://b": None}, ["KV layout differs: a and b"]
        _, body, _ = await h.request("GET", "/health")
        assert body["reasons"][1:] == ["KV layout differs: a and b"]
        h.router.ready = True
        h.app.drain()
        status, body, _ = await h.request("GET", "/health")
        assert (status, body["reasons"]) == (503, ["the server is shutting down"])
        assert (await h.post("/v1/completions", {"prompt": "x"}))[0] == 503


async def test_the_served_model_is_listed() -> None:
    async with house(saying("a"), name="org/name", model="/models/name", max_model_len=77) as h:
        (model,) = (await h.client.models.list()).data
        assert (model.id, model.object, model.owned_by) == ("org/name", "model", "slipstream")
        assert (await h.client.models.retrieve("org/name")).id == "org/name"
        _, body, _ = await h.request("GET", "/v1/models")
        assert (body["data"][0]["max_model_len"], body["data"][0]["root"]) == (77, "/models/name")


async def test_before_the_first_worker_no_model_is_served() -> None:
    async with house(saying("a")) as h:
        h.router.card = None
        h.router.ready = False
        assert (await h.request("GET", "/v1/models"))[1]["data"] == []
        assert (await h.request("GET", "/v1/models/scripted"))[0] == 404
        status, body, headers = await h.post("/v1/chat/completions", {"messages": MESSAGES})
        assert (status, body["error"]["code"], headers["retry-after"]) == (503, "no_workers", "1")


async def test_version() -> None:
    async with house(saying("a")) as h:
        assert (await h.request("GET", "/version"))[1] == {"version": __version__}


async def metrics(h: House) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    wire = await h.open("GET", "/metrics")
    await wire.head()
    assert wire.headers["content-type"].startswith("text/plain")
    families = list(text_string_to_metric_families((await wire.body()).decode()))
    wire.close()
    for family in families:
        assert family.name.startswith("slipstream_")
        assert family.documentation
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


async def test_metrics_count_requests_tokens_and_times() -> None:
    async with house(saying("abc", cached=2)) as h:
        await until(lambda: h.app.metrics.model != "")
        await h.post("/v1/completions", {"prompt": "xy"})
        await h.post("/v1/completions", {"prompt": "xy", "temperature": 9})
        await h.request("GET", "/nothing")
        found = await metrics(h)
    model = ("model_name", "scripted")

    def at(name: str, *labels: tuple[str, str]) -> float:
        return found[name, tuple(sorted([model, *labels]))]

    assert at("slipstream_requests_total", ("endpoint", "completions"), ("outcome", "ok")) == 1
    assert at("slipstream_requests_total", ("endpoint", "completions"), ("outcome", "invalid_value")) == 1
    assert at("slipstream_http_responses_total", ("path", "other"), ("status", "404")) == 1
    assert at("slipstream_prompt_tokens_total") == 2
    assert at("slipstream_cached_prompt_tokens_total") == 2
    assert at("slipstream_generated_tokens_total") == 4
    assert at("slipstream_requests_in_flight") == 0
    assert at("slipstream_time_to_first_token_seconds_count") == 1
    assert at("slipstream_time_to_first_token_seconds_bucket", ("le", "+Inf")) == 1
    assert at("slipstream_inter_token_latency_seconds_count") == 3
    assert at("slipstream_request_duration_seconds_count") == 1


async def test_two_fronts_in_one_process_count_for_themselves() -> None:
    async with house(saying("a")) as one, house(saying("a")) as other:
        await one.post("/v1/completions", {"prompt": "x"})
        assert (one.app.metrics.prompt_tokens.total, other.app.metrics.prompt_tokens.total) == (1, 0)


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_text_becomes_tokens_and_back(prefix: str) -> None:
    async with house(saying("a")) as h:
        _, body, _ = await h.post(f"{prefix}/tokenize", {"prompt": "aé", "return_token_strs": True})
        assert body == {
            "count": 3, "max_model_len": 4096, "tokens": [97, 0xC3, 0xA9],
            "token_strs": ["a", "bytes:\\xc3", "bytes:\\xa9"],
        }  # fmt: skip
        _, back, _ = await h.post(f"{prefix}/detokenize", {"tokens": body["tokens"]})
        assert back == {"prompt": "aé"}
        _, chat, _ = await h.post(f"{prefix}/tokenize", {"messages": MESSAGES})
        _, text, _ = await h.post(f"{prefix}/detokenize", {"tokens": chat["tokens"]})
        assert text == {"prompt": "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"}


async def test_tokenize_refuses_what_it_cannot_do() -> None:
    async with house(saying("a")) as h:
        for body in ({}, {"prompt": "a", "messages": MESSAGES}, {"prompt": 5}, {"promt": "a"}):
            assert (await h.post("/tokenize", body))[0] == 400
        status, body, _ = await h.post("/detokenize", {"tokens": [259]})
        assert (status, body["error"]["message"]) == (400, "tokens: token ids are 0 to 258; 259 was given")


async def test_more_than_a_context_is_neither_tokenized_nor_detokenized() -> None:
    async with house(saying("a")) as h:
        longest = 4096 * byte_tokenizer().longest_piece
        status, body, _ = await h.post("/tokenize", {"prompt": "a" * (longest + 1), "return_token_strs": True})
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
        status, body, _ = await h.post("/detokenize", {"tokens": [97] * 4097})
        assert (status, body["error"]["code"], body["error"]["param"]) == (400, "context_length_exceeded", "tokens")
        assert "4097 ids" in body["error"]["message"]
        _, body, _ = await h.post("/tokenize", {"prompt": "a" * 4000, "return_token_strs": True})
        assert body["token_strs"] == ["a"] * 4000
        assert (await h.post("/detokenize", {"tokens": body["tokens"]}))[1] == {"prompt": "a" * 4000}
        assert (await h.post("/detokenize", {"tokens": []}))[1] == {"prompt": ""}


async def test_workers_are_listed_added_and_removed() -> None:
    async with house(saying("a")) as h:
        status, body, _ = await h.post("/workers", {"url": "http://127.0.0.1:9001", "role": "decode"})
        assert (status, body["router"]) == (200, h.router.id)
        assert h.router.urls == {"http://127.0.0.1:9001": "decode"}
        _, body, _ = await h.request("GET", "/workers")
        assert body["workers"] == [{"url": "http://127.0.0.1:9001"}]
        path = "/workers/http%3A%2F%2F127.0.0.1%3A9001"
        assert (await h.request("DELETE", path + "?drain=maybe"))[0] == 400
        status, body, _ = await h.request("DELETE", path + "?drain=false")
        assert (status, body["worker"]["drain"]) == (200, False)
        assert h.router.urls == {}


async def test_a_wrong_worker_is_refused() -> None:
    async with house(saying("a")) as h:
        for body in ({"url": "ftp://x"}, {}, {"url": ""}, {"url": "http://x", "role": "boss"}):
            status, answer, _ = await h.post("/workers", body)
            assert status == 400
            assert answer["error"]["param"] in ("url", "role")


async def test_the_router_s_books_can_be_asked_for() -> None:
    async with house(saying("a")) as h:
        assert (await h.request("GET", "/audit"))[1]["problems"] == []


# -------------------------------------------------------------------------------------------------------- the tokenizer


async def test_the_tokenizer_is_loaded_when_the_first_worker_has_named_its_model(tmp_path: object) -> None:
    router = ScriptedRouter(saying("a"))
    router.card = None
    service = TokenizerService()
    config = FrontConfig(port=0)
    async with running(create_app(router, service, config), config):
        await asyncio.sleep(0.2)
        assert not service.ready
        with pytest.raises(NoWorkers, match="still being loaded"):
            _ = service.tokenizer
        byte_tokenizer()._encoder.save(f"{tmp_path}/tokenizer.json")
        router.card = ScriptedCard("words", str(tmp_path), 100)
        await until(lambda: service.ready)
        assert service.tokenizer.vocab_size == 259


async def test_a_tokenizer_that_cannot_be_loaded_is_the_reason_of_the_503() -> None:
    service = TokenizerService("no-such-model")
    with pytest.raises(ModelError):
        await service.load()
    with pytest.raises(NoWorkers, match=r"cannot be loaded: no model 'no-such-model'"):
        _ = service.tokenizer
    service.close()
