"""Timelines as a trace that chrome://tracing and Perfetto (ui.perfetto.dev) open.

One process a place (router, each worker), in it one track for what a request computes or waits for, one for its
handoff, one for its copies. Slices of one track must not overlap halfway, so an event that would goes to a further
track of the same name. A stretch in which nothing was heard is a slice at the worker that had the request. An arrow
leads from the commit of a prefill worker to the decode worker that takes over.

The format: "Trace Event Format", JSON object form: `X` complete events and `i` instants with `ts` (and `dur`) in
microseconds, `M` metadata that names processes and threads, `s` and `f` for arrows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

TRACKS = {"offer": "handoff", "grant": "handoff", "commit": "handoff", "copy_chunk": "copies"}
ROUTER = "router"

Event = dict[str, Any]


def trace(timelines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The trace of timelines as `GET /v1/requests/{id}/timeline` gives them. Time zero is the first of them."""
    zero = min((timeline["created"] for timeline in timelines), default=0.0)
    book = _Book()
    events: list[Event] = []
    for timeline in timelines:
        shift = timeline["created"] - zero
        placed = [_placed(book, timeline["id"], event, shift) for event in timeline["events"]]
        events += placed
        events += _arrows(timeline["events"], placed)
        events += [_placed(book, timeline["id"], silence, shift) for silence in timeline.get("silences", [])]
    events.sort(key=lambda event: event["ts"])
    return {
        "traceEvents": [*book.metadata(), *events],
        "displayTimeUnit": "ms",
        "otherData": {"source": "slipstream timeline", "requests": len(timelines), "started_unix_s": zero},
    }


class _Book:
    """Numbers of processes and threads, and which tracks are free when."""

    def __init__(self) -> None:
        self._pids: dict[str, int] = {ROUTER: 1}
        self._threads: dict[tuple[int, str, str, int], int] = {}
        self._open: dict[tuple[int, str, str, int], list[int]] = {}  # ends of the slices that are open in a track

    def pid(self, where: str) -> int:
        return self._pids.setdefault(where, len(self._pids) + 1)

    def thread(self, pid: int, request: str, track: str, start: int, end: int) -> int:
        """A thread of this track in which the slice neither begins nor ends in the middle of another."""
        lane = 0
        while True:
            key = (pid, request, track, lane)
            open_ends = [other for other in self._open.get(key, []) if other > start]
            if all(end <= other for other in open_ends):
                self._open[key] = [*open_ends, end]
                return self._threads.setdefault(key, len(self._threads) + 1)
            lane += 1

    def metadata(self) -> Iterable[Event]:
        for where, pid in self._pids.items():
            yield _meta("process_name", pid, 0, name=where)
            yield _meta("process_sort_index", pid, 0, sort_index=pid)
        for (pid, request, track, lane), tid in self._threads.items():
            yield _meta("thread_name", pid, tid, name=f"{request} {track}{f' {lane + 1}' if lane else ''}")
            yield _meta("thread_sort_index", pid, tid, sort_index=tid)


def _meta(kind: str, pid: int, tid: int, **arguments: Any) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": arguments}


def _placed(book: _Book, request: str, event: dict[str, Any], shift: float) -> Event:
    start = round(max(0.0, (shift + event["start_s"]) * 1e6))
    length = round(max(0.0, event["duration_s"] * 1e6))
    pid = book.pid(event["where"])
    track = TRACKS.get(event["name"], "work")
    shown: Event = {
        "name": event["name"],
        "cat": track,
        "pid": pid,
        "tid": book.thread(pid, request, track, start, start + length),
        "ts": start,
        "args": {"request": request, **event["attributes"]},
    }
    return {**shown, "ph": "X", "dur": length} if length > 0 else {**shown, "ph": "i", "s": "t"}


def _arrows(events: Sequence[dict[str, Any]], placed: Sequence[Event]) -> Iterable[Event]:
    """From each commit that lasted (the source's) to the next thing that its destination did."""
    for at, event in enumerate(events):
        if event["name"] != "commit" or event["duration_s"] <= 0:
            continue
        peer = event["attributes"].get("peer")
        for later, landed in zip(events[at + 1 :], placed[at + 1 :], strict=True):
            if later["where"] == peer and later["duration_s"] > 0:
                source = placed[at]
                arrow = {"name": "handoff", "cat": "handoff", "id": f"{source['args']['request']}-{at}"}
                yield {**arrow, "ph": "s", "pid": source["pid"], "tid": source["tid"], "ts": source["ts"]}
                yield {**arrow, "ph": "f", "bp": "e", "pid": landed["pid"], "tid": landed["tid"], "ts": landed["ts"]}
                break
