"""Looks at the cluster: takes snapshots when somebody asks, and keeps the percentiles of the last minutes.

A snapshot is the text of the front's metrics and of those of each linked worker, asked for at the same time; whoever
asks while one is being taken gets the same. The last ones are kept: rates are growth between two of them, and a figure
can be compared with the very text that it was read from.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric

from slipstream.front.dashboard.figures import Figure, Labels, Samples, quantile
from slipstream.plain_http import NotHttp, call

KEPT = 12  # snapshots
FRESH_S = 0.4  # a snapshot younger than this is shown to the next who asks too
RATE_S = 4.0  # rates are over about this long
STALE_S = 12.0  # ... and never over longer
WORKER_S = 0.6  # for a worker to answer
IDENTITY = ("name", "role", "host", "devices", "model")
AT_ONCE = 16  # workers asked together
STEP_S = 2.0
WINDOW_S = 30.0  # a point of the history is over the observations of the last half minute
HISTORY_S = 900.0

LATENCIES = {
    "ttft": "slipstream_time_to_first_token_seconds",
    "itl": "slipstream_inter_token_latency_seconds",
    "e2e": "slipstream_request_duration_seconds",
}
MADE = "slipstream_time_to_first_token_seconds_count+slipstream_inter_token_latency_seconds_count"  # each token once
GENERATED, REQUESTS, IN_FLIGHT = (
    "slipstream_generated_tokens_total",
    "slipstream_requests_total",
    "slipstream_requests_in_flight",
)
_LATENCY_NAMES = frozenset(f"{name}{part}" for name in LATENCIES.values() for part in ("_bucket", "_count", "_sum"))
HISTORY_NAMES = _LATENCY_NAMES | {REQUESTS, IN_FLIGHT}
FRONT_NAMES = HISTORY_NAMES | {
    GENERATED,
    "slipstream_prompt_tokens_total",
    "slipstream_cached_prompt_tokens_total",
    "slipstream_router_requests",
}
WORKER = "slipstream_worker_"
WORKER_NAMES = frozenset(
    WORKER + name
    for name in (
        "requests",
        "waiting_tokens",
        "pages",
        "tokens_total",
        "steps_total",
        "preemptions_total",
        "transfer_bytes_total",
        "copies_total",
        "copy_failures_total",
        "route_bytes_per_second",
        "route_latency_seconds",
    )
)


@dataclass(frozen=True)
class Reading:
    """The metrics of the front or of one worker process: `at` on the monotonic clock, `problem` why there are none."""

    at: float
    text: str = ""
    samples: Samples = field(default_factory=lambda: Samples(()))
    problem: str = ""


@dataclass(frozen=True)
class Snapshot:
    """`workers` is what the router says of each; `readings` are by the id of the worker's process."""

    id: int
    time: float
    front: Reading
    workers: list[dict[str, Any]]
    readings: dict[str, Reading]

    def reading(self, worker_id: str) -> Reading | None:
        """Of a worker's process, or of the front ("")."""
        return self.readings.get(worker_id) if worker_id else self.front


class Watch:
    """`describe` gives the router's view, `front_families` the front's own metrics, for the history alone."""

    def __init__(
        self,
        registry: CollectorRegistry,
        describe: Callable[[], dict[str, Any]],
        front_families: Callable[[], Iterable[Metric]],
    ) -> None:
        self.history = History()
        self.kept: deque[Snapshot] = deque(maxlen=KEPT)
        self._registry = registry
        self._describe = describe
        self._families = front_families
        self._ids = itertools.count(1)
        self._known: dict[str, dict[str, Any]] = {}  # what a worker said of itself when it was last linked, by URL
        self._taking: asyncio.Task[Snapshot] | None = None
        self._sampling: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._sampling = asyncio.create_task(self._sample(), name="dashboard history")

    async def stop(self) -> None:
        await end(self._sampling, self._taking)

    async def snapshot(self) -> Snapshot:
        """One that is fresh."""
        if self._taking is None or self._taking.done():
            if self.kept and time.monotonic() - self.kept[-1].front.at < FRESH_S:
                return self.kept[-1]
            self._taking = asyncio.create_task(self._take(), name="dashboard snapshot")
        return await asyncio.shield(self._taking)

    def find(self, snapshot_id: int) -> Snapshot | None:
        return next((snapshot for snapshot in self.kept if snapshot.id == snapshot_id), None)

    def rate(
        self, now: Snapshot, metric: str, labels: Labels | None = None, worker: tuple[str, str] = ("", "")
    ) -> Figure:
        """Growth each second; `worker` is id and name. None over a gap, a restart, or what was not there before."""
        worker_id, name = worker
        value, since = None, None
        base = self._base(now, worker_id)
        if base is not None:
            earlier, before, after = base
            growth = _growth(before.samples, after.samples, metric, labels)
            if growth is not None and after.at > before.at:
                value, since = growth / (after.at - before.at), earlier
        return Figure(value=value, metric=metric, labels=labels or {}, worker=name, since=since)

    def each(self, now: Snapshot, metric: str, per: str, worker: tuple[str, str]) -> Figure:
        """Growth of one counter for each growth of another."""
        worker_id, name = worker
        value, since = None, None
        base = self._base(now, worker_id)
        if base is not None:
            earlier, before, after = base
            growth, steps = (_growth(before.samples, after.samples, one, None) for one in (metric, per))
            if growth is not None and steps:
                value, since = growth / steps, earlier
        return Figure(value=value, metric=metric, worker=name, since=since, per=per)

    def _base(self, now: Snapshot, worker_id: str) -> tuple[int, Reading, Reading] | None:
        """The snapshot that rates count from: the last one that is old enough, else the oldest that is not too old."""
        after = now.reading(worker_id)
        if after is None or after.problem:
            return None
        found = None
        for snapshot in reversed(self.kept):
            before = snapshot.reading(worker_id)
            if snapshot.id >= now.id or before is None or before.problem:
                continue
            age = after.at - before.at
            if age > STALE_S:
                break
            found = snapshot.id, before, after
            if age >= RATE_S:
                break
        return found

    # ------------------------------------------------------------------------------------------ looking

    async def _take(self) -> Snapshot:
        workers = self._workers()
        linked = [worker for worker in workers if worker.get("state") not in ("connecting", "silent", "refused", None)]
        room = asyncio.Semaphore(AT_ONCE)

        async def ask(worker: dict[str, Any]) -> Reading:
            async with room:
                return await _ask(worker["url"])

        readings = await asyncio.gather(*(ask(worker) for worker in linked))
        text = generate_latest(self._registry).decode()
        front = Reading(time.monotonic(), text, Samples.of_text(text, FRONT_NAMES))
        found = {worker["id"]: reading for worker, reading in zip(linked, readings, strict=True)}
        workers = self._workers()  # as it is at the time of the front's numbers
        snapshot = Snapshot(next(self._ids), time.time(), front, workers, found)
        self.kept.append(snapshot)
        return snapshot

    def _workers(self) -> list[dict[str, Any]]:
        """What the router says; of a worker whose link is lost it keeps no name, so that is remembered here."""
        workers = self._describe().get("workers", [])
        known, self._known = self._known, {}
        for worker in workers:
            if worker.get("name"):
                self._known[worker["url"]] = {key: worker.get(key) for key in IDENTITY}
            elif worker["url"] in known:
                self._known[worker["url"]] = known[worker["url"]]
                worker |= known[worker["url"]]
        return workers

    async def _sample(self) -> None:
        while True:
            self.history.add(time.time(), Samples.of_families(self._families(), HISTORY_NAMES))
            await asyncio.sleep(STEP_S)


class History:
    """Points every two seconds for a quarter of an hour: percentiles over the last half minute, and rates."""

    def __init__(self) -> None:
        self.points: deque[dict[str, float | None]] = deque(maxlen=int(HISTORY_S / STEP_S))
        self._recent: deque[tuple[float, Samples]] = deque(maxlen=int(WINDOW_S / STEP_S) + 1)

    def add(self, now: float, samples: Samples) -> None:
        """One more look; `now` in Unix seconds."""
        point: dict[str, float | None] = {"t": now, "in_flight": samples.total(IN_FLIGHT)}
        start = self._recent[0][1] if self._recent else Samples(())
        for key, name in LATENCIES.items():
            after, before = samples.buckets(name), start.buckets(name)
            for part, q in (("p50", 0.5), ("p99", 0.99)):
                point[f"{key}_{part}"] = quantile(after, q, before)
        for key, name in (("tokens", MADE), ("requests", REQUESTS)):
            point[key] = self._rate(now, samples, name)
        self._recent.append((now, samples))
        self.points.append(point)

    def since(self, moment: float) -> list[dict[str, float | None]]:
        """The points after `moment`, oldest first."""
        return [point for point in self.points if (point["t"] or 0.0) > moment]

    def _rate(self, now: float, samples: Samples, name: str) -> float | None:
        if len(self._recent) < 2:
            return None
        then, before = self._recent[-2]
        growth = _growth(before, samples, name, None)
        return growth / (now - then) if growth is not None and now > then else None


def _growth(before: Samples, after: Samples, metric: str, labels: Labels | None) -> float | None:
    """How much a counter grew; a labelled one that was not there yet began at 0. None when it shrank."""
    now = after.total(metric, labels)
    if now is None:
        return None
    growth = now - (before.total(metric, labels) or 0.0)
    return growth if growth >= 0 else None


async def end(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancels what runs and waits until it has ended."""
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def _ask(url: str) -> Reading:
    try:
        status, body = await call("GET", f"{url}/metrics", timeout_s=WORKER_S)
    except TimeoutError:
        return Reading(time.monotonic(), problem=f"no answer within {WORKER_S:g} s")
    except (OSError, NotHttp, ValueError) as error:
        return Reading(time.monotonic(), problem=f"cannot be asked: {getattr(error, 'strerror', None) or error}")
    if status != 200:
        return Reading(time.monotonic(), problem=f"answered {status}")
    text = body.decode("utf-8", errors="replace")
    return Reading(time.monotonic(), text, Samples.of_text(text, WORKER_NAMES))
