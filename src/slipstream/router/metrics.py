"""What the router counts, as Prometheus metrics named slipstream_router_*.

Each router has its own set in the registry it is given, so that two routers fit in one process. Counters are touched a
few times a request, never a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from slipstream.router.views import WorkerView
from slipstream.telemetry.meters import Meters, Values

PREFIX = "slipstream_router"
WAIT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

Gauges = Callable[[], dict[str, int]]


class RouterMetrics:
    """Counters of one router. At a scrape `requests`, `workers` and `load` are asked for numbers by stage or state."""

    def __init__(self, registry: CollectorRegistry, requests: Gauges, workers: Gauges, load: Gauges = dict) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"{PREFIX}_{name}", text, labels, registry=registry)

        self.placements = counter("placements", "Requests given to a pair of workers.", "prefill", "decode")
        self.borrowed = counter("borrowed", "Placements for which the missing role was borrowed.", "role")
        self.resubmissions = counter("resubmissions", "Requests continued on other workers, by cause.", "cause")
        self.finished = counter("finished", "Requests that ended with tokens, by finish reason.", "reason")
        self.failures = counter("failures", "Requests that ended with an error, by code.", "code")
        self.given_up = counter(
            "given_up_workers",
            "Workers that answered nothing for worker_silence_s and were taken for lost.",
            "worker",
        )
        self.aborted = counter("aborted", "Requests that their client gave up.")
        self.stale_tokens = counter("stale_tokens", "Token messages of ended requests or earlier attempts, ignored.")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of placed requests.")
        self.prefix_hit_tokens = counter("prefix_hit_tokens", "Prompt tokens that prefill workers held already.")
        self.queue_wait = Histogram(
            f"{PREFIX}_queue_wait_seconds",
            "Time from submission to the first placement.",
            registry=registry,
            buckets=WAIT_BUCKETS,
        )
        self.gauges = (
            _Gauges("requests", "Requests under way, by stage.", "stage", requests),
            _Gauges("workers", "Registered workers, by state.", "state", workers),
            _Gauges(
                "load",
                "Requests under way, each counted once: queued (here, or by its last report at a prefill worker) or "
                "running.",
                "state",
                load,
            ),
        )
        for gauge in self.gauges:
            registry.register(gauge)


class _Gauges(Collector):
    """Numbers that exist anyway, read when they are scraped."""

    def __init__(self, name: str, text: str, label: str, read: Gauges) -> None:
        self.name, self.text, self.label, self._read = f"{PREFIX}_{name}", text, label, read

    def describe(self) -> Iterable[Metric]:
        return [GaugeMetricFamily(self.name, self.text, labels=[self.label])]

    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(self.name, self.text, labels=[self.label])
        for key, value in self._read().items():
            family.add_metric([key], value)
        return [family]


class FleetMetrics(Meters):
    """What the router knows of its workers from their reports, read at each scrape; the workers count the rest."""

    def __init__(self, views: Callable[[], Sequence[WorkerView]]) -> None:
        super().__init__(f"{PREFIX}_", dict)
        self._views = views
        self.gauge(
            "worker_requests",
            "Requests at a worker as it last reported: waiting, running, handing_off.",
            "worker",
            "role",
            "stage",
            read=self._requests,
        )
        self.gauge(
            "worker_pages", "KV pages of a worker by state (used, cached, free).", "worker", "role", "state",
            read=self._pages,
        )  # fmt: skip
        self.gauge("worker_up", "Whether requests are given to this worker, 1 or 0.", "worker", "role", read=self._up)
        self.gauge("kv_usage_ratio", "Share of all workers' KV pages that live requests hold.", read=self._usage)
        self.gauge("pool_info", "KV pages of all workers together; always 1.", "page_tokens", "pages", read=self._pool)
        self.gauge(
            "route_bytes_per_second",
            "Rate of a route between two workers, measured by its preflight.",
            "source",
            "destination",
            "transport",
            read=self._routes,
        )

    def _requests(self) -> dict[Values, float]:
        return {
            (view.name, view.role, stage): count
            for view in self._linked()
            for stage, count in (
                ("waiting", view.waiting), ("running", view.running), ("handing_off", view.handing_off)
            )
        }  # fmt: skip

    def _pages(self) -> dict[Values, float]:
        return {
            (view.name, view.role, state): count
            for view in self._linked()
            for state, count in (
                ("used", view.pages_total - view.pages_free - view.pages_cached),
                ("cached", view.pages_cached),
                ("free", view.pages_free),
            )
        }

    def _up(self) -> dict[Values, float]:
        return {(view.name or view.url, view.role): float(view.state == "live") for view in self._views()}

    def _usage(self) -> dict[Values, float]:
        total = sum(view.pages_total for view in self._linked())
        free = sum(view.pages_free + view.pages_cached for view in self._linked())
        return {(): (total - free) / total if total else 0.0}

    def _pool(self) -> dict[Values, float]:
        linked = self._linked()
        pages = sum(view.pages_total for view in linked)
        return {(str(linked[0].page_tokens), str(pages)): 1.0} if linked else {}

    def _routes(self) -> dict[Values, float]:
        return {
            (view.name, route.peer, route.transport): route.gb_per_s * 1e9
            for view in self._linked()
            for route in view.routes
            if not route.error
        }

    def _linked(self) -> list[WorkerView]:
        return [view for view in self._views() if view.state not in ("connecting", "silent", "refused")]
