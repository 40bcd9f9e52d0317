"""What the router remembers of requests: where each was placed and why, when it was continued, its first token.

A few tuples a request, nothing a token. Old requests make room for new ones. What the workers remember is fetched when
somebody asks (`history.py`).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from slipstream.router.place import Placement
from slipstream.router.remote import RemoteWorker
from slipstream.telemetry.clock import now
from slipstream.telemetry.trace import Spans
from slipstream.types import Request

RECENT = 2048

Note = tuple[float, float, str, dict[str, Any]]  # start, seconds, name, attributes
Visit = tuple[str, str, str]  # id, name and HTTP address of a worker that had the request


class Entry:
    """One request. `visits` are all workers that had it, `prefill` and `decode` the names of the last two."""

    __slots__ = ("attempts", "decode", "first", "notes", "prefill", "since", "spans", "trace", "visits")

    def __init__(self, request: Request, spans: Spans | None = None) -> None:
        self.spans = spans
        self.notes: list[Note] = []
        self.visits: dict[Visit, None] = {}
        self.attempts = 1
        self.first = 0.0
        self.since = now()  # from when on it waits for a place
        self.prefill = self.decode = ""
        self.trace = request.trace

    def placed(self, placement: Placement, tokens: int, p: RemoteWorker, d: RemoteWorker, usable: int) -> None:
        """Before it is charged to the standings of its workers, so that their loads say why."""
        assert p.standing is not None
        assert d.standing is not None
        self.prefill, self.decode = p.label, d.label
        self.visits[p.id, p.label, p.url] = None
        self.visits[d.id, d.label, d.url] = None
        attributes = {
            "prefill": p.label,
            "decode": d.label,
            "attempt": self.attempts,
            "prompt_tokens": tokens,
            "known_tokens": tokens - placement.to_compute,
            "prefill_queued_tokens": p.standing.queued,
            "decode_load": round(d.standing.load, 4),
            "usable_workers": usable,
        }
        if placement.borrowed is not None:
            attributes["borrowed"] = placement.borrowed
        self._note(self.since, "placed", attributes)
        if self.spans is not None:
            facts = {f"slipstream.{name}": value for name, value in attributes.items()}
            self.spans.stage("place", self.trace, self.since, now(), facts)

    def spoke(self) -> None:
        """Its first token is here."""
        self.first = now()
        self.notes.append((self.first, 0.0, "first_token", {}))

    def resubmitted(self, cause: str, tokens: int) -> None:
        self.attempts += 1
        self.since = now()
        self._note(self.since, "resubmitted", {"cause": cause, "behind_tokens": tokens, "attempt": self.attempts})

    def _note(self, start: float, name: str, attributes: dict[str, Any]) -> None:
        self.notes.append((start, now() - start, name, attributes))


class Journal:
    """The entries of one router, by request id. With `spans`, placements are told to them."""

    def __init__(self, spans: Spans | None = None) -> None:
        self._spans = spans
        self._entries: OrderedDict[str, Entry] = OrderedDict()

    def begin(self, request: Request) -> Entry:
        entry = Entry(request, self._spans)
        self._entries[request.id] = entry
        self._entries.move_to_end(request.id)
        if len(self._entries) > RECENT:
            self._entries.popitem(last=False)
        return entry

    def get(self, request_id: str) -> Entry | None:
        return self._entries.get(request_id)
