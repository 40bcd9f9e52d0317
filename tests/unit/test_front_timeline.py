"""The front's list of recent requests, and one request's timeline, before a router that has nothing to add."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.unit.front_house import MESSAGES, House, house, saying, until

from slipstream.errors import QueueFull
from slipstream.front import timeline
from slipstream.router.history import PastEvent
from slipstream.telemetry import clock

KEYS = [
    "id", "request_id", "endpoint", "model", "state", "created", "prompt_tokens", "output_tokens", "cached_tokens",
    "ttft_s", "attempts", "prefill_worker", "decode_worker", "e2e_s", "finish_reason", "error",
]  # fmt: skip


async def listed(h: House, query: str = "") -> list[dict]:
    status, body, _ = await h.request("GET", "/v1/requests" + query)
    assert status == 200
    return body["data"]


async def test_requests_are_listed_with_their_numbers_the_newest_first() -> None:
    async with house(saying("abc", cached=2)) as h:
        _, first, headers = await h.post("/v1/completions", {"prompt": "xy"}, x_request_id="one")
        _, second, _ = await h.post("/v1/chat/completions", {"messages": MESSAGES})
        assert headers["x-request-id"] == "one"
        newest, oldest = await listed(h)
    assert [newest["id"], oldest["id"]] == [second["id"], first["id"]]
    assert list(oldest) == KEYS
    assert (oldest["request_id"], oldest["endpoint"], oldest["state"]) == ("one", "completions", "finished")
    assert (oldest["prompt_tokens"], oldest["output_tokens"], oldest["cached_tokens"]) == (2, 4, 2)
    assert 0 <= oldest["ttft_s"] <= oldest["e2e_s"]
    assert (oldest["finish_reason"], oldest["error"], oldest["attempts"]) == ("stop", None, 1)
    assert oldest["prefill_worker"] is None


@pytest.mark.parametrize("name", ["{id}", "{id}-0", "one/and%252F"])
async def test_a_request_is_found_by_every_name_that_its_client_knows(name: str) -> None:
    async with house(saying("abc")) as h:
        _, body, _ = await h.post("/v1/completions", {"prompt": "xy"}, x_request_id="one/and%2F")
        path = "/v1/requests/" + name.format(id=body["id"])
        status, told, _ = await h.request("GET", path + "/timeline")
        assert (status, told["id"]) == (200, body["id"])
        assert [event["name"] for event in told["events"]] == ["received", "finished"]
        assert told["missing"] == []
        status, summary, _ = await h.request("GET", path)
        assert (status, list(summary)) == (200, KEYS)


async def test_an_id_that_ends_like_the_path_of_a_timeline_is_found() -> None:
    async with house(saying("abc")) as h:
        _, body, _ = await h.post("/v1/completions", {"prompt": "xy"}, x_request_id="mine/timeline")
        status, summary, _ = await h.request("GET", "/v1/requests/mine%2Ftimeline")
        assert (status, summary["id"], list(summary)) == (200, body["id"], KEYS)
        status, told, _ = await h.request("GET", "/v1/requests/mine%2Ftimeline/timeline")
        assert (status, told["id"], bool(told["events"])) == (200, body["id"], True)


async def test_a_refused_request_has_failed_and_a_wrong_one_is_none() -> None:
    async with house(saying("abc")) as h:
        await h.post("/v1/completions", {"prompt": "xy", "temperature": 9})
        h.router.refusal = QueueFull("full")
        await h.post("/v1/completions", {"prompt": "xy"})
        (only,) = await listed(h)
    assert (only["state"], only["error"], only["ttft_s"]) == ("failed", "queue_full: full", None)


async def test_old_requests_make_room_and_nothing_of_an_answer_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "RECENT", 2)
    async with house(saying("a")) as h:
        for name in ("x1", "x2", "x3"):
            await h.post("/v1/completions", {"prompt": "secret"}, x_request_id=name)
        stories = h.app.generator.stories
        await until(lambda: stories.find("x3") is not None)
        assert stories.find("x1") is None
        assert [one["request_id"] for one in await listed(h, "?limit=2")] == ["x3", "x2"]
        found = stories.find("x2")
        assert found is not None
        assert found.answer is None


@pytest.mark.parametrize("limit", ["0", "-1", "x", "1001", "%C2%B2", "99999999999", "1&limit=2"])
async def test_a_limit_that_is_none_is_refused(limit: str) -> None:
    async with house(saying("a")) as h:
        status, body, _ = await h.request("GET", f"/v1/requests?limit={limit}")
        assert (status, body["error"]["param"]) == (400, "limit")


class Told:
    """What a router's history says of requests: `events` of all of them, and whose part of the odd ones is missing."""

    def __init__(self, names: Sequence[str]) -> None:
        event = PastEvent(name="queued", where="p", start=clock.now(), duration_s=0.0, attributes={})
        self.events = {name: [event] for name in names}
        self.missing = {name: [{"where": "d", "reason": "gone"}] * 2 for name in names[1::2]}


async def test_all_timelines_come_together_with_one_look_at_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    async with house(saying("a")) as h:
        ids = [(await h.post("/v1/completions", {"prompt": "xy"}))[1]["id"] for _ in range(5)]
        looks: list[list[str]] = []

        async def history(names: Sequence[str]) -> Told:
            looks.append(list(names))
            return Told(names)

        monkeypatch.setattr(h.router, "history", history)
        found = await listed(h, "?limit=4&events=true")
        (own,) = [(await h.request("GET", f"/v1/requests/{ids[4]}/timeline"))[1]]
    assert [one["id"] for one in found] == ids[:0:-1]
    assert [len(names) for names in looks] == [4, 1]
    assert all({event["name"] for event in one["events"]} == {"received", "queued", "finished"} for one in found)
    assert [[gap["where"] for gap in one["missing"]] for one in found] == [[], ["d"], [], ["d"]]
    assert own["events"][0] == found[0]["events"][0]


async def test_a_window_takes_what_was_under_way_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with house(saying("a")) as h:
        for name in ("old", "new"):
            await h.post("/v1/completions", {"prompt": "xy"}, x_request_id=name)
        stories = h.app.generator.stories
        await until(lambda: all((s := stories.find(name)) and s.state == "finished" for name in ("old", "new")))
        old = stories.find("old")
        assert old is not None
        old.created -= 100
        assert [one["request_id"] for one in await listed(h, "?window=50")] == ["new"]
        assert [one["request_id"] for one in await listed(h, "?window=150.5")] == ["new", "old"]
        assert await listed(h, "?window=150&limit=1") == await listed(h, "?window=50")
        old.e2e_s = None
        assert len(await listed(h, "?window=50")) == 2


@pytest.mark.parametrize(
    "query",
    ["window=x", "window=-1", "window=nan", "window=inf", "window=1_0", "window=%201", "window=1%0a"]
    + ["events=yes", "events=1"],
)
async def test_a_window_or_a_choice_that_is_none_is_refused(query: str) -> None:
    async with house(saying("a")) as h:
        status, body, _ = await h.request("GET", f"/v1/requests?{query}")
        assert (status, body["error"]["param"]) == (400, query.partition("=")[0])
