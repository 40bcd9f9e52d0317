"""Timelines of requests, as `GET /v1/requests/{id}/timeline` tells them, made short."""

from __future__ import annotations

from typing import Any

Event = dict[str, Any]


def line(story: dict[str, Any]) -> str:
    """All events in a line: name@where, milliseconds from the request's coming, how long it took."""
    if "problem" in story:
        return story["problem"]
    parts = [
        f"{event['name']}@{event['where']} {1e3 * event['start_s']:.2f}+{1e3 * event['duration_s']:.2f}"
        for event in story["events"]
    ]
    parts += [f"nothing heard of {gone}" for gone in (*story["silences"], *story["missing"])]
    return ", ".join(parts)


def events(story: dict[str, Any], name: str) -> list[Event]:
    return [event for event in story.get("events", ()) if event["name"] == name]


def total(story: dict[str, Any], name: str, attribute: str) -> float:
    """The sum of an attribute over all events of that name."""
    return float(sum(event["attributes"].get(attribute, 0) for event in events(story, name)))
