"""The whole story of requests: the router's own notes, and those of every worker that had them, on one clock.

Workers are asked at their HTTP ports, all at once, each for at most `ANSWER_S`. One that does not answer, or is another
process by now, has its part named as missing. Times of a worker on another machine are moved to this machine's clock by
an estimate (see `telemetry.clock`), and its events say how far that may be off.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from slipstream.plain_http import NotHttp, call
from slipstream.router.journal import Entry, Journal, Visit
from slipstream.telemetry import clock

ANSWER_S = 2.0
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
    """Events in no order; `missing` says of each worker whose part is not there, why."""

    events: dict[str, list[PastEvent]] = field(default_factory=dict)  # by request id
    missing: list[dict[str, str]] = field(default_factory=list)


async def history(journal: Journal, request_ids: Sequence[str]) -> History:
    """Of the requests that the journal knows. Never takes longer than a worker's time to answer."""
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
    for (_, name, _), answer in zip(visits, answers, strict=True):
        if isinstance(answer, str):
            found.missing.append({"where": name, "reason": answer})
            continue
        for request_id, events in answer.items():
            for event in events:
                peer = event.attributes.get("peer")
                if peer in names:
                    event.attributes["peer"] = names[peer]
            found.events[request_id] += events
    return found


def _own(entry: Entry) -> list[PastEvent]:
    return [
        PastEvent(name=name, where="router", start=start, duration_s=seconds, attributes=attributes)
        for start, seconds, name, attributes in entry.notes
    ]


async def _ask(visit: Visit, request_ids: list[str]) -> dict[str, list[PastEvent]] | str:
    """The worker's part, or why there is none."""
    worker_id, name, url = visit
    try:
        async with asyncio.timeout(ANSWER_S):
            answer, asked, answered = await _get(f"{url}/timeline/{','.join(request_ids)}")
            if answer.id != worker_id:
                return "the worker that had it has ended; another process is at its address now"
            offset = await _offset(url, answer, asked, answered)
    except TimeoutError:
        return f"the worker did not answer within {ANSWER_S:g} s"
    except (OSError, NotHttp, msgspec.MsgspecError, UnicodeError, ValueError) as error:
        return f"the worker cannot be asked: {getattr(error, 'strerror', None) or str(error) or type(error).__name__}"
    return {
        request_id: [_moved(event, chapter, name, offset) for chapter in chapters for event in chapter.events]
        for request_id, chapters in answer.requests.items()
    }


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
