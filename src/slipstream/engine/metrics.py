"""A worker's Prometheus metrics, in a registry of its own so that two workers fit in one process."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from slipstream.engine.plan import StepPlan
from slipstream.wire import RouteReport, Status

STEP_BUCKETS = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.0, 2.0, 5.0)
COPY_BUCKETS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


class WorkerMetrics:
    """Counts steps, copies and load. Names start with `slipstream_worker_`; units are in the names."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self._steps = Counter("slipstream_worker_steps", "Engine steps executed.", registry=registry)
        self._step_seconds = Histogram(
            "slipstream_worker_step_seconds",
            "Duration of engine steps: compute, sampling and bookkeeping.",
            buckets=STEP_BUCKETS,
            registry=registry,
        )
        self._tokens = Counter(
            "slipstream_worker_tokens",
            "Tokens computed, by kind of work.",
            ["stage"],
            registry=registry,
        )
        self._copied_bytes = Counter(
            "slipstream_worker_copied_bytes", "KV bytes copied to peers.", ["transport"], registry=registry
        )
        self._copy_seconds = Histogram(
            "slipstream_worker_copy_seconds",
            "Duration of one chunk's KV copy, from hand-over to the mover until visible at the peer.",
            ["transport"],
            buckets=COPY_BUCKETS,
            registry=registry,
        )
        self._copy_failures = Counter(
            "slipstream_worker_copy_failures", "KV copies that failed.", ["transport"], registry=registry
        )
        self._requests = Gauge(
            "slipstream_worker_requests", "Requests at this worker, by state.", ["state"], registry=registry
        )
        self._preemptions = Gauge(
            "slipstream_worker_preemptions",
            "Sequences whose pages were taken away since the start of the worker; each was computed again.",
            registry=registry,
        )
        self._pages = Gauge("slipstream_worker_pages", "Pages of the KV pool, by state.", ["state"], registry=registry)
        self._route_rate = Gauge(
            "slipstream_worker_route_gigabytes_per_second",
            "Rate of a route to a decode worker, measured by its preflight.",
            ["peer", "transport"],
            registry=registry,
        )

    def step(self, plan: StepPlan, seconds: float) -> None:
        lengths = plan.query_start[1:] - plan.query_start[:-1]
        decode = int((lengths == 1).sum())
        self._steps.inc()
        self._step_seconds.observe(seconds)
        self._tokens.labels("decode").inc(decode)
        self._tokens.labels("prefill").inc(int(lengths.sum()) - decode)

    def copy(self, transport: str, size: int, seconds: float, error: str | None) -> None:
        if error is not None:
            self._copy_failures.labels(transport).inc()
            return
        self._copied_bytes.labels(transport).inc(size)
        self._copy_seconds.labels(transport).observe(seconds)

    def preemptions(self, count: int) -> None:
        self._preemptions.set(count)

    def status(self, status: Status) -> None:
        self._requests.labels("waiting").set(status.waiting)
        self._requests.labels("running").set(status.running)
        self._requests.labels("handing_off").set(status.handing_off)
        self._pages.labels("free").set(status.pages_free)
        self._pages.labels("cached").set(status.pages_cached)
        self._pages.labels("used").set(status.pages_total - status.pages_free - status.pages_cached)

    def routes(self, reports: list[RouteReport]) -> None:
        self._route_rate.clear()
        for report in (report for report in reports if not report.error):
            self._route_rate.labels(report.peer, report.transport).set(report.gb_per_s)
