"""Recent requests, and the timeline of each: `GET /v1/requests`, `GET /v1/requests/{id}/timeline`.

The front keeps a Story for each answer: who asked for what, when it came, how it ended. The events between are the
router's and the workers'; they are put together when somebody asks. A story is found by the id of its response, which
clients see, and by X-Request-ID. Nothing of a prompt or an answer is kept.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import msgspec

from slipstream.errors import ClientGone, InvalidRequest, RequestError, RouteNotFound
from slipstream.front.answer import Answer
from slipstream.front.backend import Backend, History
from slipstream.front.exchange import Exchange
from slipstream.telemetry import clock
from slipstream.telemetry.silence import silences

RECENT = 1000
LIMIT = 50
MOST_CHOICES = 64  # whose events are shown
SUFFIX = "/timeline"


class Story:
    """One answer. `answer` is there while it is under way; times are those of `telemetry.clock.now`."""

    __slots__ = (
        "answer", "created", "e2e_s", "endpoint", "engine_ids", "error", "finish_reason", "id", "model", "numbers",
        "request_id", "started", "state", "submitted",
    )  # fmt: skip

    def __init__(self, request_id: str, endpoint: str, answer: Answer) -> None:
        self.id = answer.shape.response_id
        self.request_id = request_id
        self.endpoint = endpoint
        self.model = answer.shape.model
        self.started = answer.started
        self.submitted = clock.now()
        self.created = clock.unix_of(answer.started)
        self.engine_ids = [choice.request.id for choice in answer.choices]
        self.answer: Answer | None = answer
        self.state = "running"
        self.e2e_s: float | None = None
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.numbers: dict[str, Any] = {}

    def end(self, error: RequestError | None, cancelled: bool) -> None:
        """Nothing more is said of it: keeps its numbers and lets go of the answer."""
        assert self.answer is not None
        answer = self.answer
        error = error or answer.error
        self.e2e_s = clock.now() - self.started
        self.numbers = counted(answer)
        if cancelled or isinstance(error, ClientGone):
            self.state = "cancelled"
        elif error is not None:
            self.state = "failed"
        else:
            self.state = "finished"
            self.finish_reason = ",".join(dict.fromkeys(answer.finishes))
        self.error = f"{error.code}: {error.message}" if error is not None else None
        self.answer = None


def counted(answer: Answer) -> dict[str, Any]:
    usage = answer.usage()
    return {
        "prompt_tokens": usage.prompt_tokens,
        "output_tokens": usage.completion_tokens,
        "cached_tokens": usage.prompt_tokens_details.cached_tokens,
        "ttft_s": answer.first_token_s,
    }


class Stories:
    """Those under way and the last `RECENT`; and the handlers that show them."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._stories: OrderedDict[str, Story] = OrderedDict()
        self._by_request: dict[str, str] = {}

    def open(self, request_id: str, endpoint: str, answer: Answer) -> Story:
        story = Story(request_id, endpoint, answer)
        self._stories[story.id] = story
        self._by_request[request_id] = story.id
        while len(self._stories) > RECENT:
            _, old = self._stories.popitem(last=False)
            if self._by_request.get(old.request_id) == old.id:
                del self._by_request[old.request_id]
        return story

    def find(self, name: str) -> Story | None:
        """By the id of the response or of one of its choices, or by X-Request-ID, where the newest wins."""
        found = self._stories.get(name) or self._stories.get(self._by_request.get(name, ""))
        return found or self._stories.get(name.rpartition("-")[0])

    def recent(self, limit: int, window_s: float = math.inf) -> list[Story]:
        """The newest first: those that are under way, or were in the last `window_s` seconds."""
        begin = time.time() - window_s
        stories = (s for s in reversed(self._stories.values()) if s.e2e_s is None or s.created + s.e2e_s >= begin)
        return list(islice(stories, limit))

    def summary(self, story: Story) -> dict[str, Any]:
        numbers = counted(story.answer) if story.answer is not None else story.numbers
        entries = [entry for name in story.engine_ids[:MOST_CHOICES] if (entry := self._backend.entry(name))]
        return {
            "id": story.id,
            "request_id": story.request_id,
            "endpoint": story.endpoint,
            "model": story.model,
            "state": story.state,
            "created": story.created,
            **numbers,
            "attempts": max((entry.attempts for entry in entries), default=1),
            "prefill_worker": entries[0].prefill or None if entries else None,
            "decode_worker": entries[0].decode or None if entries else None,
            "e2e_s": story.e2e_s,
            "finish_reason": story.finish_reason,
            "error": story.error,
        }

    async def timelines(self, stories: Sequence[Story]) -> list[msgspec.Raw]:
        """Of each the summary with `events`, in order, `silences` between them, and `missing` workers, as JSON.

        Who had them is asked once. What is under way is told up to the question: answers take their time.
        """
        names = [name for story in stories for name in story.engine_ids[:MOST_CHOICES]]
        asked = clock.now()
        history = await self._backend.history(names)
        told = []
        for story in stories:
            told.append(msgspec.Raw(msgspec.json.encode(self._whole(story, history, asked))))
            await asyncio.sleep(0)  # a thousand of them must not hold up the answers under way
        return told

    def _whole(self, story: Story, history: History, asked: float) -> dict[str, Any]:
        names = story.engine_ids[:MOST_CHOICES]
        events = list(self._own(story))
        for at, name in enumerate(names):
            for event in history.events.get(name, ()):
                attributes = dict(event.attributes)
                if len(names) > 1:
                    attributes["choice"] = at
                start = event.start - story.started
                events.append(_event(event.name, event.where, start, event.duration_s, attributes))
        events.sort(key=lambda event: event["start_s"])
        gaps = {(gap["where"], gap["reason"]): gap for name in names for gap in history.missing.get(name, ())}
        end = asked - story.started if story.e2e_s is None else story.e2e_s
        silent = silences(events, end, finished=story.state == "finished", lost=dict(gaps.keys()))
        return {**self.summary(story), "events": events, "silences": silent, "missing": list(gaps.values())}

    def _own(self, story: Story) -> Iterable[dict[str, Any]]:
        numbers = counted(story.answer) if story.answer is not None else story.numbers
        received = {"endpoint": story.endpoint, "prompt_tokens": numbers["prompt_tokens"]}
        yield _event("received", "router", 0.0, story.submitted - story.started, received)
        if story.e2e_s is not None:
            attributes = {"output_tokens": numbers["output_tokens"]}
            if story.finish_reason:
                attributes["reason"] = story.finish_reason
            if story.error:
                attributes["error"] = story.error
            yield _event(story.state, "router", story.e2e_s, 0.0, attributes)

    # ------------------------------------------------------------------------------------------ handlers

    async def index(self, exchange: Exchange) -> None:
        """`limit` and `window` choose; `events=true` gives of each what its timeline has."""
        text = exchange.query("limit") or str(LIMIT)
        if not (text.isascii() and text.isdigit() and len(text) < 7 and 1 <= int(text) <= RECENT):
            raise InvalidRequest(f"limit must be a number from 1 to {RECENT}; {text!r} was given", param="limit")
        events = exchange.query("events") or "false"
        if events not in ("true", "false"):
            raise InvalidRequest(f"events must be true or false; {events!r} was given", param="events")
        stories = self.recent(int(text), _window(exchange.query("window")))
        whole = events == "true"
        data = await self.timelines(stories) if whole else [self.summary(story) for story in stories]
        await exchange.json({"object": "list", "now": time.time(), "data": data})

    async def one(self, exchange: Exchange, path: str) -> None:
        """`{id}` is the summary, `{id}/timeline` everything; an X-Request-ID may itself end like that."""
        name = path.removesuffix(SUFFIX)
        whole = path.endswith(SUFFIX)
        story = self.find(name)
        if story is None and whole and (story := self.find(path)) is not None:
            whole = False
        if story is None:
            raise RouteNotFound(
                f"no request {name!r} is remembered here; the last {RECENT} are, by the id of the response or by "
                "X-Request-ID. GET /v1/requests lists them"
            )
        await exchange.json((await self.timelines([story]))[0] if whole else self.summary(story))


def _window(text: str | None) -> float:
    """Raises InvalidRequest."""
    if text is None:
        return math.inf
    if not re.fullmatch(r"[0-9]{1,12}(\.[0-9]{0,12})?", text):
        raise InvalidRequest(f"window must be a number of seconds; {text!r} was given", param="window")
    return float(text)


def _event(name: str, where: str, start_s: float, duration_s: float, attributes: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "where": where,
        "start_s": round(start_s, 6),
        "duration_s": round(duration_s, 6),
        "attributes": attributes,
    }
