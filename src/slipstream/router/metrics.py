"""What the router counts, as Prometheus metrics named slipstream_router_*.

Each router has its own set in the registry it is given, so that two routers fit in one process. Counters are touched a
few times a request, never a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

PREFIX = "slipstream_router"
WAIT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

Gauges = Callable[[], dict[str, int]]


class RouterMetrics:
    """Counters of one router. `requests` and `workers` are asked at each scrape for a number by stage or state."""

    def __init__(self, registry: CollectorRegistry, requests: Gauges, workers: Gauges) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"{PREFIX}_{name}", text, labels, registry=registry)

        self.placements = counter("placements", "Requests given to a pair of workers.", "prefill", "decode")
        self.borrowed = counter("borrowed", "Placements for which the missing role was borrowed.", "role")
        self.resubmissions = counter("resubmissions", "Requests continued on other workers, by cause.", "cause")
        self.finished = counter("finished", "Requests that ended with tokens, by finish reason.", "reason")
        self.failures = counter("failures", "Requests that ended with an error, by code.", "code")
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
        registry.register(_Gauges("requests", "Requests under way, by stage.", "stage", requests))
        registry.register(_Gauges("workers", "Registered workers, by state.", "state", workers))


class _Gauges(Collector):
    """Numbers that exist anyway, read when they are scraped."""

    def __init__(self, name: str, text: str, label: str, read: Gauges) -> None:
        self._name, self._text, self._label, self._read = f"{PREFIX}_{name}", text, label, read

    def describe(self) -> Iterable[Metric]:
        return [GaugeMetricFamily(self._name, self._text, labels=[self._label])]

    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(self._name, self._text, labels=[self._label])
        for key, value in self._read().items():
            family.add_metric([key], value)
        return [family]
