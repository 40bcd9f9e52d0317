"""What the front asks of the router: this and no more, so that anything that keeps it can stand behind the front."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from prometheus_client import CollectorRegistry

from slipstream.errors import RequestError
from slipstream.types import FinishReason, Request, Role, Tokens


class Sink(Protocol):
    """Where the tokens of one request go, on the event loop, in order and without repetition.

    The last call is either a Tokens with `finish` or an `error`; after `Backend.abort` there is none.
    """

    def tokens(self, t: Tokens) -> None: ...

    def error(self, e: RequestError) -> None: ...


class Card(Protocol):
    """The model that the cluster serves: the name clients use, where it was loaded from, its context in tokens."""

    @property
    def name(self) -> str: ...

    @property
    def model(self) -> str: ...

    @property
    def max_model_len(self) -> int: ...


class Entry(Protocol):
    """What the router remembers of a request: the workers that have it, by name, and how often it was given away."""

    attempts: int
    prefill: str
    decode: str


class Event(Protocol):
    """One thing that happened to a request; `start` is on this machine's monotonic clock."""

    name: str
    where: str
    start: float
    duration_s: float
    attributes: dict[str, Any]


class History(Protocol):
    """By request id: its events, and whose part is missing and why (`where`, `reason`)."""

    @property
    def events(self) -> Mapping[str, Sequence[Event]]: ...

    @property
    def missing(self) -> Mapping[str, Sequence[dict[str, str]]]: ...


class Backend(Protocol):
    """The router. `submit` raises RequestError for what it refuses at once; `abort` is final and silent;
    `finish` says that the answer is whole.

    `describe` and `audit` give what JSON can hold, `add_worker` and `remove_worker` raise ConfigError. `entry` and
    `history` are of requests under way and of recent ones.
    """

    id: str
    metrics_registry: CollectorRegistry

    @property
    def ready(self) -> bool: ...

    def model_card(self) -> Card | None: ...

    def submit(self, request: Request, sink: Sink) -> None: ...

    def abort(self, request_id: str, finish: FinishReason | None = None) -> None: ...

    def add_worker(self, url: str, role: Role | None = None, *, joins: bool = False) -> Any: ...

    def remove_worker(self, url_or_id: str, drain: bool = True) -> Any: ...

    def describe(self) -> dict[str, Any]: ...

    def entry(self, request_id: str) -> Entry | None: ...

    async def history(self, request_ids: Sequence[str]) -> History: ...

    def audit(self) -> Any: ...
