"""The whole story of requests: the router's own notes, and those of every worker that had them, on one clock.

Workers are asked at their HTTP ports, all at once, each for all its requests, some at a time. One that leaves a
question unanswered for `ANSWER_S`, has not told everything after `ALL_S`, or is another process by now, is asked no
further, and its part is named as missing. Times of a worker on another machine are moved to this machine's clock by an
estimate (see `telemetry.clock`), and its events say how far that may be off.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from slipstream.plain_http import NotHttp, call
from slipstream.router.journal import Entry, Journal, Visit
from slipstream.telemetry import clock

ANSWER_S = 2.0
ALL_S = 6.0
TOGETHER = 64  # requests in one question; a worker takes no more
READINGS = 3  # of a clock on another machine


class PastEvent(msgspec.Struct, kw_only=True):
    """One thing that happened. `start` is on this machine's monotonic clock, `where` a worker's name or "router"."""

    name: str
    where: str
    start: float
    duration_s: float
    attributes: dict[str, Any]


class _Noted(msgspec.Struct):
    name: str
    start: float
    duration_s: float
    attributes: dict[str, Any]


class _Chapter(msgspec.Struct):
    attempt: int
    outcome: str
    events: list[_Noted]
    message: str = ""


class _Answer(msgspec.Struct):
    """What a worker's `/timeline/{ids}` says."""

    id: str
    name: str
    clock: str
    now: float
    requests: dict[str, list[_Chapter]]


@dataclass(slots=True)
class History:
    """By request id: events, in no order, and of each worker whose part is missing, why (`where`, `reason`)."""

    events: dict[str, list[PastEvent]] = field(default_factory=dict)
    missing: dict[str, list[dict[str, str]]] = field(default_factory=dict)


async def history(journal: Journal, request_ids: Sequence[str]) -> History:
    """Of the requests that the journal knows, in not much more than `ALL_S` however many there are."""
    found = History()
    visits: dict[Visit, list[str]] = {}
    names: dict[str, str] = {}
    for request_id in request_ids:
        entry = journal.get(request_id)
        if entry is None:
            continue
        found.events[request_id] = _own(entry)
        for visit in entry.visits:
            visits.setdefault(visit, []).append(request_id)
            names[visit[0]] = visit[1]
    answers = await asyncio.gather(*(_ask(visit, ids) for visit, ids in visits.items()))
    for (visit, ids), (told, reason) in zip(visits.items(), answers, strict=True):
        for request_id in ids:
            if request_id not in told:
                found.missing.setdefault(request_id, []).append({"where": visit[1], "reason": reason})
                continue
            for event in told[request_id]:
                peer = event.attributes.get("peer")
                if peer in names:
                    event.attributes["peer"] = names[peer]
            found.events[request_id] += told[request_id]
    return found


def _own(entry: Entry) -> list[PastEvent]:
    return [
        PastEvent(name=name, where="router", start=start, duration_s=seconds, attributes=attributes)
        for start, seconds, name, attributes in entry.notes
    ]


async def _ask(visit: Visit, request_ids: list[str]) -> tuple[dict[str, list[PastEvent]], str]:
    """What the worker tells, by request, and why that is not all, if it is not."""
    worker_id, name, url = visit
    told: dict[str, list[PastEvent]] = {}
    offset: clock.Offset | None = None
    until = clock.now() + ALL_S
    try:
        for some in _batches(request_ids):
            left = until - clock.now()
            if left <= 0:
                return told, f"the worker had not told everything after {ALL_S:g} s"
            async with asyncio.timeout(min(ANSWER_S, left)):
                answer, asked, answered = await _get(f"{url}/timeline/{','.join(some)}")
                if answer.id != worker_id:
                    return told, "the worker that had it has ended; another process is at its address now"
                offset = offset or await _offset(url, answer, asked, answered)
            for request_id in some:
                chapters = answer.requests.get(request_id, [])
                told[request_id] = [
                    _moved(event, chapter, name, offset) for chapter in chapters for event in chapter.events
                ]
    except TimeoutError:
        return told, f"the worker did not answer within {ANSWER_S:g} s"
    except (OSError, NotHttp, msgspec.MsgspecError, UnicodeError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return told, f"the worker cannot be asked: {reason}"
    return told, ""


def _batches(request_ids: list[str]) -> Iterator[list[str]]:
    for at in range(0, len(request_ids), TOGETHER):
        yield request_ids[at : at + TOGETHER]


async def _get(url: str) -> tuple[_Answer, float, float]:
    asked = clock.now()
    status, body = await call("GET", url, timeout_s=ANSWER_S)
    answered = clock.now()
    if status != 200:
        raise ValueError(f"it answered {status}")
    return msgspec.json.decode(body, type=_Answer), asked, answered


async def _offset(url: str, answer: _Answer, asked: float, answered: float) -> clock.Offset:
    if answer.clock == clock.machine_clock():
        return clock.SAME
    readings = [(asked, answer.now, answered)]
    for _ in range(READINGS - 1):
        again, asked, answered = await _get(f"{url}/timeline")
        readings.append((asked, again.now, answered))
    return clock.estimate(readings)


def _moved(event: _Noted, chapter: _Chapter, where: str, offset: clock.Offset) -> PastEvent:
    attributes = dict(event.attributes)
    if chapter.attempt:
        attributes["attempt"] = chapter.attempt + 1
    if offset is not clock.SAME:
        attributes["clock_error_s"] = offset.error
    return PastEvent(
        name=event.name,
        where=where,
        start=event.start + offset.seconds,
        duration_s=event.duration_s,
        attributes=attributes,
    )
