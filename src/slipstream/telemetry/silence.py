"""The stretches of a request in which nobody said anything: found from its events when somebody asks for its timeline.

A worker that is stopped notes nothing until it goes on; what a worker noted is lost with its process. Between the
events of such a request time is left over. It is told as what it is, with the worker that had the request then, as far
as the notes of the router and of the others say who that was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

NAME = "nothing heard"
ROUTER = "router"
LEAST_S = 0.2  # shorter ones are ordinary: a step under way, a message between processes
LEAST_SHARE = 0.02  # of the whole request

Event = dict[str, Any]


def least(whole_s: float) -> float:
    """How long a stretch of a request must be to be told."""
    return max(LEAST_S, LEAST_SHARE * whole_s)


def silences(events: Sequence[Event], end_s: float, *, finished: bool, lost: Mapping[str, str]) -> list[Event]:
    """What no event covers, from the request's start to `end_s`, each like an event, in order of their begin.

    `events` are in order of their begin; those of one choice leave the others uncovered. `finished`: at `end_s` its
    client had the whole answer. `lost` are the workers whose notes are missing, and why. `where` is the worker that had
    the request, or the router. Attributes: `placed_s`, when the router gave it to that worker, and `reason`, as far as
    they are known, and `choice`.
    """
    end_s = round(end_s, 6)  # as the events are
    choices = sorted({event["attributes"]["choice"] for event in events if "choice" in event["attributes"]})
    found: list[Event] = []
    for choice in choices or [None]:
        own = [event for event in events if event["attributes"].get("choice", choice) == choice]
        for begin, end, before in _uncovered(own, end_s):
            where, attributes = _holder(before, lost, over=finished and end == end_s)
            if choice is not None:
                attributes["choice"] = choice
            about = {"name": NAME, "where": where, "start_s": begin, "duration_s": round(end - begin, 6)}
            found.append({**about, "attributes": attributes})
    return sorted(found, key=lambda silence: silence["start_s"])


def _uncovered(events: Sequence[Event], end_s: float) -> Iterator[tuple[float, float, Sequence[Event]]]:
    """Begin, end, and the events before it. What happened in a moment parts two stretches."""
    shortest, reach = least(end_s), 0.0
    for at, event in enumerate(events):
        begin = min(event["start_s"], end_s)
        if begin - reach > shortest:
            yield reach, begin, events[:at]
        reach = max(reach, round(event["start_s"] + event["duration_s"], 6))
    if end_s - reach > shortest:
        yield reach, end_s, events


def _holder(before: Sequence[Event], lost: Mapping[str, str], *, over: bool) -> tuple[str, dict[str, Any]]:
    """Who had the request after these events, and what is known of that. `over`: until it was finished."""
    at = max((at for at, event in enumerate(before) if event["name"] in ("placed", "resubmitted")), default=-1)
    if at < 0:
        return ROUTER, {}
    if before[at]["name"] == "resubmitted":
        return ROUTER, {"reason": "it waited for a place again"}
    placed, since = before[at], before[at + 1 :]
    where = _worker(placed["attributes"]["prefill"], placed["attributes"]["decode"], since, lost)
    if over and where not in lost and any(event["where"] == where for event in since):
        return ROUTER, {"reason": f"{where} was done with it; the answer was on its way to the client"}
    attributes: dict[str, Any] = {"placed_s": round(placed["start_s"] + placed["duration_s"], 6)}
    if where in lost:
        attributes["reason"] = f"what it noted is missing: {lost[where]}"
    return where, attributes


def _worker(prefill: str, decode: str, since: Sequence[Event], lost: Mapping[str, str]) -> str:
    """Which of the two that it was placed at. From the first token on, the handoff is what a request waits for."""
    for event in reversed(since):
        if event["name"] == "decode_step":
            return event["where"]
        if event["name"] == "commit":
            return decode
    if not any(event["name"] == "first_token" for event in since):
        return prefill
    return prefill if prefill in lost and decode not in lost else decode
