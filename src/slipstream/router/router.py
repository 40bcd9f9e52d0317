"""The router: what the front calls.

A request comes in by `submit` with a sink; the router finds it a prefill and a decode worker, and the sink gets its
tokens, in order and complete, until the finish or an error. Workers come and go by `add_worker` and `remove_worker`,
or by joining themselves.

    fleet.py    which workers there are, and who can hand over to whom
    place.py    where a request goes
    life.py     one request: its stage and the numbering of its tokens
    assign.py   gives it there, and keeps the standings right
    lives.py    all requests, and what happens to them when something happens to a worker

All of it runs on one event loop, that of the front; nothing here waits while a message is handled.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry

from slipstream import wire
from slipstream.config import RouterConfig
from slipstream.router.audit import RouterAudit, audit
from slipstream.router.fleet import Fleet
from slipstream.router.history import History, history
from slipstream.router.journal import Entry
from slipstream.router.life import Sink
from slipstream.router.lives import Lives
from slipstream.router.metrics import FleetMetrics, RouterMetrics
from slipstream.router.remote import RemoteWorker
from slipstream.router.views import WorkerView, view
from slipstream.telemetry.trace import Spans
from slipstream.types import FinishReason, Request, Role


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """The model that this router's workers serve: the name that clients use, where it was loaded from, and the longest
    prompt plus answer that every usable worker can take, in tokens."""

    name: str
    model: str
    max_model_len: int


class Router:
    """Gives requests to workers. One event loop; `start` before anything else, `stop` at the end.

    `registry` gets the metrics (a new one by default; it is `metrics_registry`). `heartbeat_s` is the interval of
    pings. `id` is what workers know this router by; it is new for each Router. `spans` makes placements part of traces.
    """

    def __init__(
        self,
        config: RouterConfig,
        *,
        registry: CollectorRegistry | None = None,
        heartbeat_s: float = 1.0,
        spans: Spans | None = None,
    ) -> None:
        self.id = f"router-{uuid.uuid4().hex[:12]}"
        self.metrics_registry = registry or CollectorRegistry()
        self._config = config
        self._changed = asyncio.Event()
        self._card: ModelCard | None = None
        self._fleet = Fleet(
            self.id, self, patience_s=config.worker_wait_s, heartbeat_s=heartbeat_s, silence_s=config.worker_silence_s
        )
        self._metrics = RouterMetrics(
            self.metrics_registry, lambda: self._lives.stages(), self._worker_states, lambda: self._lives.load()
        )
        self.metrics_registry.register(FleetMetrics(self.workers))
        self._lives = Lives(self._fleet, config, self._metrics, spans)
        self._lives.closed = True

    # ------------------------------------------------------------------------------------------ life

    async def start(self, *, joins: bool = False) -> None:
        """Begins to look for the configured workers; does not wait for them. Raises ConfigError on a bad address.

        `joins`: those configured had joined an earlier router by themselves, and so they are kept as these are.
        """
        self._fleet.start()
        self._lives.closed = False
        configured: dict[Role, tuple[str, ...]] = {
            "prefill": self._config.prefill,
            "decode": self._config.decode,
            "both": self._config.both,
        }
        for role, urls in configured.items():
            for url in urls:
                self._fleet.add(url, role, joins=joins)

    async def stop(self) -> None:
        """Ends what is under way with an error, aborts it at the workers, and closes all links."""
        self._lives.close()
        await self._fleet.stop()

    async def wait_ready(self, timeout: float) -> bool:
        """Waits until a request could be served; False when that took longer than `timeout` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while not self.ready:
                    self._changed.clear()
                    await self._changed.wait()
        return self.ready

    # ------------------------------------------------------------------------------------------ requests

    def submit(self, request: Request, sink: Sink) -> None:
        """Takes a request; from then on its sink is told (see Sink). The request object is not changed.

        Raises NoWorkers, QueueFull, ContextTooLong or InvalidRequest when it is not taken; the sink then hears nothing.
        """
        self._lives.submit(request, sink)

    def abort(self, request_id: str, finish: FinishReason | None = None) -> None:
        """Ends a request at once, at both its workers; its sink is not called any more. Unknown ids are ignored.

        `finish` is given where the front has found the end of its answer, at a string that stops it.
        """
        self._lives.abort(request_id, finish)

    def entry(self, request_id: str) -> Entry | None:
        """What is remembered of a request: workers, attempts; None of one that is too long ago."""
        return self._lives.journal.get(request_id)

    async def history(self, request_ids: Sequence[str]) -> History:
        """Everything that happened to these requests, here and at their workers; see `router.history`."""
        return await history(self._lives.journal, request_ids)

    # ------------------------------------------------------------------------------------------ workers

    def add_worker(self, url: str, role: Role | None = None, *, joins: bool = False) -> WorkerView:
        """Registers the worker whose HTTP port is at `url`; it is linked as soon as it answers.

        `role` overrides what the worker says of itself. `joins` says that the worker itself asks, again and again until
        it is linked: it is forgotten when it has been gone for a minute. Registering a URL again does no harm. Raises
        ConfigError.
        """
        return self._view(self._fleet.add(url, role, joins=joins))

    def remove_worker(self, url_or_id: str, drain: bool = True) -> WorkerView:
        """Takes a worker out, found by URL, id or name; raises ConfigError when there is none.

        With `drain` it is told to take nothing more from anybody, finishes what it has, and is taken out then;
        without, the link ends now and its requests continue elsewhere.
        """
        worker = self._fleet.find(url_or_id)
        if drain and worker.link is not None:
            worker.send(wire.Drain())
            self._lives.leave(worker)
            self.fleet_changed()
        else:
            self._fleet.forget(worker)
        return self._view(worker)

    def workers(self) -> list[WorkerView]:
        return [self._view(worker) for worker in self._fleet.workers.values()]

    @property
    def ready(self) -> bool:
        """Whether a request submitted now would be placed at once."""
        return not self._lives.closed and self._lives.placement() is not None

    def model_card(self) -> ModelCard | None:
        """Of the usable workers; while there is none, that of the last ones; None before the first."""
        infos = [w.info for w in self._fleet.linked() if w.info is not None and w.usable]
        if infos:
            length = min(info.max_model_len for info in infos)
            self._card = ModelCard(name=infos[0].served_name, model=infos[0].model, max_model_len=length)
        return self._card

    def describe(self) -> dict[str, Any]:
        """Everything about the fleet as plain data, for `/workers` and the banner."""
        card = self.model_card()
        return {
            "router": self.id,
            "ready": self.ready,
            "model": msgspec.to_builtins(card) if card is not None else None,
            "requests": self._lives.stages(),
            "workers": [msgspec.to_builtins(worker) for worker in self.workers()],
        }

    def audit(self) -> RouterAudit:
        """Requests under way and whatever is wrong with the router's books; `problems` is empty when they are right."""
        return audit(self._fleet, self._lives)

    def _view(self, worker: RemoteWorker) -> WorkerView:
        return view(
            worker,
            requests=self._lives.at(worker.id),
            problems=self._fleet.problems_of(worker),
            name_of=self._fleet.name_of,
        )

    def _worker_states(self) -> dict[str, int]:
        return Counter(worker.state for worker in self._fleet.workers.values())

    # ------------------------------------------------------------------------------------------ from the fleet

    def worker_up(self, worker: RemoteWorker) -> None:
        self._lives.worker_up(worker)

    def worker_down(self, worker: RemoteWorker, reason: str) -> None:
        if worker.silent:
            self._metrics.given_up.labels(worker.label).inc()
        self._lives.worker_down(worker)

    def worker_message(self, worker: RemoteWorker, message: wire.Message) -> None:
        match message:
            case wire.StepOutput():
                take = self._lives.tokens
                for tokens in message.tokens:
                    take(worker, tokens)
            case wire.Adopted():
                self._lives.adopted(worker, message)
            case wire.Failed():
                self._lives.failed(worker, message)
            case wire.Pong():
                self._lives.pong(worker, message.n)
            case _:
                worker.cut(f"{worker.label} sent {type(message).__name__}, which a worker does not send to a router")

    def fleet_changed(self) -> None:
        self._lives.dispatch()
        self._changed.set()
